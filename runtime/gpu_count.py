"""How many GPUs JAX would compute on, counted without CUDA.

Note [Counting GPUs]. A process that has started CUDA cannot use it in a child that it forks. So
what is asked before a fork must not start it: neither `jax.devices()`, which opens all backends of
JAX, nor `cuInit`. NVML, the library of ``nvidia-smi``, counts GPUs without either, as PyTorch has
it with ``PYTORCH_NVML_BASED_CUDA_CHECK=1``. It comes with the driver. A container may leave it out
and still have CUDA; then the device files in ``/dev`` are counted. ``CUDA_VISIBLE_DEVICES`` and
JAX's own settings are applied as CUDA and JAX apply them. Once JAX has opened its backends, its own
list is the answer: CUDA is started or never will be. Until then the answer is a forecast: it does
not know whether CUDA will start, and of GPUs that are cut up by MIG it counts one part at most.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax

from tracegraph.runtime.environment import read_visible_gpus
from tracegraph.runtime.jax_interop import has_backends

LIBRARY = "libnvidia-ml.so.1"
DEVICE_FILES = pathlib.Path("/dev")
_UUID_BYTES = 96
# How JAX spells the platform where it takes one.
_CUDA_NAMES = ("cuda", "gpu")


def count_gpus() -> int:
    """Returns how many GPUs JAX computes on, or would, in this process: Note [Counting GPUs]."""
    if has_backends():
        return sum(device.platform == "gpu" for device in jax.local_devices())
    if not _chooses_cuda():
        return 0
    return _count_chosen(count_visible(read_visible_gpus(), _list_gpus()))


def _chooses_cuda() -> bool:
    """True when JAX would compute on GPUs if there were any."""
    chosen = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if chosen and chosen.split(",")[0] not in _CUDA_NAMES:
        return False
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return any("cuda" in plugin.value for plugin in plugins)


def _count_chosen(visible: int) -> int:
    """Returns how many of the GPUs that CUDA sees the setting of JAX leaves."""
    setting: str = jax.config.read("jax_cuda_visible_devices")
    return visible if setting == "all" else min(visible, len(set(setting.split(","))))


def count_visible(setting: str | None, uuids: Sequence[str | None]) -> int:
    """Returns how many GPUs CUDA sees.

    Args:
        setting: of ``CUDA_VISIBLE_DEVICES``; None if it is not set.
        uuids: of the GPUs of the machine; None where one is not known.

    Example:
        >>> count_visible("1,GPU-b7", ["GPU-a0", "GPU-a1", "GPU-b7"])
        2
        >>> count_visible("0,-1,1", ["GPU-a0", "GPU-a1"])
        1
    """
    if setting is None:
        return len(uuids)
    if setting.strip().startswith("MIG-"):
        return min(1, len(uuids))
    found: list[int | str] = []
    for word in setting.split(","):
        gpu = _find_gpu(word.strip(), uuids)
        if gpu is None:
            # CUDA does not look behind a word that names nothing.
            break
        found.append(gpu)
    # It sees none if one is named twice.
    return len(found) if len(set(found)) == len(found) else 0


def _find_gpu(word: str, uuids: Sequence[str | None]) -> int | str | None:
    if word.startswith("GPU-"):
        if None in uuids:
            return word
        matches = [i for i, uuid in enumerate(uuids) if uuid and uuid.startswith(word)]
        return matches[0] if len(matches) == 1 else None
    # As C's strtol, which stops at what is no digit.
    number = re.match(r"\+?[0-9]+", word)
    index = int(number[0]) if number else -1
    return index if 0 <= index < len(uuids) else None


def _list_gpus() -> list[str | None]:
    """Returns the UUID of every GPU of the machine; None where only a device file is found."""
    library = load_library()
    uuids = _read_uuids(library) if library is not None else None
    if uuids is not None:
        return list(uuids)
    return [None for _ in DEVICE_FILES.glob("nvidia[0-9]*")]


def load_library() -> Any:
    """Returns the library of NVML; None where it is not installed."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def _read_uuids(library: Any) -> list[str] | None:
    if library.nvmlInit_v2():
        return None
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        return [_read_uuid(library, index) for index in range(count.value)]
    finally:
        library.nvmlShutdown()


def _read_uuid(library: Any, index: int) -> str:
    """Returns a GPU's UUID; an empty text, which no setting names, where NVML has none."""
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
        return ""
    text = ctypes.create_string_buffer(_UUID_BYTES)
    if library.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(_UUID_BYTES)):
        return ""
    return text.value.decode()
