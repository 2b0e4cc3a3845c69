"""Bytes in use on the GPU as JAX counts them, and how many it has."""

from __future__ import annotations

import functools
import gc
import shutil
import subprocess

import jax

import tracegraph as tg


def measure_used_bytes() -> int:
    """Returns the bytes that JAX has allocated on its first device, garbage not counted."""
    gc.collect()
    tg.synchronize()
    return _read_statistics()["bytes_in_use"]


def measure_limit_bytes() -> int:
    """Returns the bytes that JAX may allocate on its first device."""
    return _read_statistics()["bytes_limit"]


@functools.cache
def list_total_bytes() -> tuple[int, ...]:
    """Returns the bytes of each GPU, without opening one: no worker has begun."""
    if not shutil.which("nvidia-smi"):
        return ()
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(int(line) << 20 for line in done.stdout.splitlines())


def _read_statistics() -> dict[str, int]:
    statistics = jax.devices()[0].memory_stats()
    assert statistics is not None, "this device does not count its memory"
    return statistics
