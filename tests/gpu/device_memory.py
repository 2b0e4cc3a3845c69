"""Bytes in use on the GPU as JAX counts them; the pools of graphs are part of that."""

from __future__ import annotations

import gc

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


def _read_statistics() -> dict[str, int]:
    statistics = jax.devices()[0].memory_stats()
    assert statistics is not None, "this device does not count its memory"
    return statistics
