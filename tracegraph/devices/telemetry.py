"""How busy, warm and full a GPU is, by NVML's own Python package, imported at its first use."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import jax

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.default_device import find_jax_device, read_properties
from tracegraph.runtime.errors import CudaError

MIB = 1 << 20


def utilization(device: Any = None) -> int:
    """Returns in which percentage of the last sample period a kernel was running.

    Args:
        device: a JAX device, the index of one, or None for the current one.

    Raises:
        CudaError: it is no GPU, nvidia-ml-py is not installed, or NVML cannot tell.
    """
    with _open_nvml("utilization", device) as (nvml, handle):
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def memory_usage(device: Any = None) -> int:
    """Returns in which percentage of the last sample period memory was being read or written.

    How many bytes are in use is `tg.memory.memory_allocated`.

    Args:
        device: a JAX device, the index of one, or None for the current one.

    Raises:
        CudaError: it is no GPU, nvidia-ml-py is not installed, or NVML cannot tell.
    """
    with _open_nvml("memory_usage", device) as (nvml, handle):
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).memory)


def temperature(device: Any = None) -> int:
    """Returns the temperature of the GPU's chip in degrees Celsius.

    Args:
        device: a JAX device, the index of one, or None for the current one.

    Raises:
        CudaError: it is no GPU, nvidia-ml-py is not installed, or NVML cannot tell.
    """
    with _open_nvml("temperature", device) as (nvml, handle):
        return int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))


def power_draw(device: Any = None) -> int:
    """Returns the power that the GPU draws, in milliwatts.

    Args:
        device: a JAX device, the index of one, or None for the current one.

    Raises:
        CudaError: it is no GPU, nvidia-ml-py is not installed, or NVML cannot tell.
    """
    with _open_nvml("power_draw", device) as (nvml, handle):
        return int(nvml.nvmlDeviceGetPowerUsage(handle))


def clock_rate(device: Any = None) -> int:
    """Returns the clock rate of the multiprocessors at this moment, in MHz.

    Args:
        device: a JAX device, the index of one, or None for the current one.

    Raises:
        CudaError: it is no GPU, nvidia-ml-py is not installed, or NVML cannot tell.
    """
    with _open_nvml("clock_rate", device) as (nvml, handle):
        return int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))


def list_gpu_processes(device: Any = None) -> str:
    """Returns a text to print: the processes that compute on a GPU, and the memory of each.

    Args:
        device: a JAX device, the index of one, or None for the current one.

    Raises:
        CudaError: it is no GPU, nvidia-ml-py is not installed, or NVML cannot tell.
    """
    with _open_nvml("list_gpu_processes", device) as (nvml, handle):
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    lines = [_describe_process(each) for each in sorted(found, key=lambda each: each.pid)]
    index = jax.local_devices().index(find_jax_device(device))
    return "\n".join([f"GPU:{index}", *(lines or ["no process computes on it"])])


def _describe_process(process: Any) -> str:
    # None in a container, which does not see the bytes of others.
    nbytes = process.usedGpuMemory
    used = "an unknown amount" if nbytes is None else f"{nbytes / MIB:,.1f} MiB"
    return f"process {process.pid:>10} uses {used} of GPU memory"


@contextlib.contextmanager
def _open_nvml(call: str, device: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the module of NVML and its handle of a device; an error of NVML becomes ours."""
    handle_name = _find_bus_id(call, device)
    nvml = _import_nvml(call)
    try:
        nvml.nvmlInit()
        try:
            yield nvml, nvml.nvmlDeviceGetHandleByPciBusId(handle_name)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise CudaError(
            f"NVML cannot tell: {error}",
            where=f"{locate_caller()}, {call}() of {find_jax_device(device)}",
            why=f"NVML raised {type(error).__name__}; not every GPU, driver or container tells all",
            fix="see what this one tells: nvidia-smi -q",
            anchor="nvml",
        ) from error


def _find_bus_id(call: str, device: Any) -> str:
    """Returns the address of a GPU on its bus: CUDA and NVML number GPUs differently."""
    jax_device = find_jax_device(device)
    if jax_device.platform == "gpu":
        found = read_properties(jax_device)
        return f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    raise CudaError(
        f"{call}() is asked of {jax_device}, which is no GPU",
        where=f"{locate_caller()}, {call}()",
        why="NVML watches NVIDIA GPUs only",
        fix="ask tg.is_available() first, or name a GPU",
        anchor="nvml",
    )


def _import_nvml(call: str) -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise CudaError(
            "nvidia-ml-py, NVML's package for Python, is not installed",
            where=f"{locate_caller()}, {call}(): {error}",
            why="NVML measures what a GPU does; CUDA does not",
            fix='pip install nvidia-ml-py, or "tracegraph-jax[telemetry]"',
            anchor="nvml",
        ) from error
