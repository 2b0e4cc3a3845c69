"""What tests of `tg.CUDAGraph` share: both devices, and a block as a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.cuda import buffer

N = 4


def use_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    """Makes captures use the host device, or a CudaDevice over host memory, which is returned."""
    # Host memory of JAX is on borders of 64 bytes; what is not on one of XLA's is copied.
    monkeypatch.setattr(buffer, "ALIGNMENT", 64)
    return capture_for_gpu(monkeypatch) if kind == "cuda" else None


def record(block: Callable[[], Any], **options: Any) -> tuple[tg.CUDAGraph, Any]:
    """Returns a graph of a block, and what the block made."""
    g = tg.CUDAGraph()
    with tg.graph(g, **options):
        made = block()
    return g, made


def find_captured(g: tg.CUDAGraph) -> CapturedGraph:
    """Returns what was made executable last."""
    captured = g._captured
    assert captured is not None, f"{g!r} is not executable"
    return captured


def assert_value(array: Any, value: Any) -> None:
    """Reads an array."""
    np.testing.assert_array_equal(np.asarray(array), value)


def fill(value: float) -> Any:
    """Returns an array of N equal numbers."""
    return jnp.full(N, value, jnp.float32)
