"""FakeNvml: the module ``pynvml`` for one GPU, strict about use before it is opened."""

from __future__ import annotations

import types
from typing import Any


class NVMLError(Exception):
    """An error of NVML."""


class NVMLErrorNotSupported(NVMLError):
    """What NVML answers where a GPU has no such sensor."""

    def __str__(self) -> str:
        return "Not Supported"


class FakeNvml(types.ModuleType):
    """Answers for the GPU at one address of the bus.

    Args:
        bus_id: of the GPU.
        failing: the function that the GPU does not support.

    Attributes:
        opened: how often it is open.
    """

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1

    def __init__(self, bus_id: str, failing: str = "") -> None:
        super().__init__("pynvml")
        self.bus_id, self.failing, self.opened = bus_id, failing, 0
        self.processes: list[Any] = []

    def nvmlInit(self) -> None:  # noqa: N802
        self._enter("nvmlInit", 0)
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        assert self.opened
        self.opened -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:  # noqa: N802
        self._enter("nvmlDeviceGetHandleByPciBusId", 1)
        assert bus_id == self.bus_id
        return f"handle of {bus_id}"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        self._enter("nvmlDeviceGetUtilizationRates", 1, handle)
        return types.SimpleNamespace(gpu=87, memory=41)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetTemperature", 1, handle)
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 45

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetPowerUsage", 1, handle)
        return 312_500

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetClockInfo", 1, handle)
        assert kind == self.NVML_CLOCK_SM
        return 1980

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        self._enter("nvmlDeviceGetComputeRunningProcesses", 1, handle)
        return self.processes

    def _enter(self, name: str, opened: int, handle: str | None = None) -> None:
        assert self.opened == opened
        assert handle in (None, f"handle of {self.bus_id}")
        if name == self.failing:
            raise NVMLErrorNotSupported
