"""GPUs counted without CUDA: what the settings leave, NVML, device files."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import pytest

from tracegraph.runtime import gpu_count
from tracegraph.runtime.gpu_count import count_gpus, count_visible

UUIDS = ["GPU-a0", "GPU-a1", "GPU-b7"]


class FakeNvml:
    """The functions of NVML that count, strict about use before it is opened.

    Args:
        uuids: of the GPUs.
        failing: the function that returns an error.
    """

    def __init__(self, uuids: list[str], failing: str = "") -> None:
        self.uuids, self.failing, self.opened = uuids, failing, 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        if self.failing == "nvmlInit_v2":
            return 9
        self.opened += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.opened -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        assert self.opened
        count._obj.value = len(self.uuids)
        return 3 if self.failing == "nvmlDeviceGetCount_v2" else 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        assert self.opened
        handle._obj.value = 0x1000 + index.value
        return 4 if self.failing == "nvmlDeviceGetHandleByIndex_v2" else 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:  # noqa: N802
        text.value = self.uuids[handle.value - 0x1000].encode()
        assert len(text) == size.value
        return 3 if self.failing == "nvmlDeviceGetUUID" else 0


class Plugin:
    """An entry point of a package for JAX."""

    value = "jax_plugins.xla_cuda13"


class Config:
    """The settings of a JAX that chooses by itself."""

    jax_platforms: str | None = None
    jax_cuda_visible_devices = "all"

    def read(self, name: str) -> str:
        return getattr(self, name)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Makes this a process with three GPUs, in which JAX has not started."""
    library = FakeNvml(UUIDS)
    monkeypatch.setattr(gpu_count, "has_backends", lambda: False)
    monkeypatch.setattr(gpu_count, "load_library", lambda: library)
    monkeypatch.setattr(gpu_count.importlib.metadata, "entry_points", lambda group: [Plugin])
    monkeypatch.setattr(jax, "config", Config())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        (None, 3),
        ("", 0),
        ("0", 1),
        ("2,0", 2),
        (" 1 , 2 ", 2),
        ("0,1,2,3", 3),
        ("3,0", 0),
        ("1,-1,0", 1),
        ("-1", 0),
        ("1gpu,2", 2),
        ("none", 0),
        ("1,1", 0),
        ("GPU-b7", 1),
        ("GPU-b,GPU-a0", 2),
        ("GPU-a", 0),
        ("GPU-c", 0),
        ("MIG-1/2,MIG-3", 1),
    ],
)
def test_the_setting_of_cuda(setting: str | None, count: int) -> None:
    assert count_visible(setting, UUIDS) == count


def test_uuids_are_believed_where_none_are_known() -> None:
    assert count_visible("GPU-a0,GPU-b7", [None, None, None]) == 2
    assert count_visible("GPU-a0,GPU-a0", [None, None, None]) == 0


def test_nvml_counts_and_is_closed(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,0")
    assert count_gpus() == 2
    assert nvml.opened == 0


@pytest.mark.parametrize("failing", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "no library"])
def test_device_files_are_counted_without_nvml(
    failing: str, nvml: FakeNvml, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpu_count, "DEVICE_FILES", tmp_path)
    nvml.failing = failing
    if failing == "no library":
        monkeypatch.setattr(gpu_count, "load_library", lambda: None)
    assert count_gpus() == 2
    assert nvml.opened == 0


@pytest.mark.parametrize("failing", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"])
def test_a_gpu_without_an_identity_is_counted(
    failing: str, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.failing = failing
    assert count_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a0")
    assert count_gpus() == 0


@pytest.mark.parametrize(
    ("platforms", "count"), [("cuda", 3), ("cuda,cpu", 3), ("gpu", 3), ("cpu", 0), ("cpu,cuda", 0)]
)
def test_the_platforms_that_jax_is_to_use(platforms: str, count: int, nvml: FakeNvml) -> None:
    vars(jax.config)["jax_platforms"] = platforms
    assert count_gpus() == count


@pytest.mark.parametrize(("setting", "count"), [("0", 1), ("2,1", 2), ("0,1,2,3", 3)])
def test_the_gpus_that_jax_is_to_use(setting: str, count: int, nvml: FakeNvml) -> None:
    vars(jax.config)["jax_cuda_visible_devices"] = setting
    assert count_gpus() == count


def test_without_a_plugin_jax_has_no_gpus(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_count.importlib.metadata, "entry_points", lambda group: [])
    assert count_gpus() == 0


def test_once_jax_has_started_its_own_list_counts(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_count, "has_backends", lambda: True)
    assert count_gpus() == sum(device.platform == "gpu" for device in jax.local_devices())


def test_a_missing_library_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_count, "LIBRARY", "libnowhere-ml.so.1")
    assert gpu_count.load_library() is None
