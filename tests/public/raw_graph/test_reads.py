"""Host reads of what a raw graph writes, and of static inputs, on a CudaDevice over host memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.definitions_anew import note_definitions
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.runtime.cuda import buffer


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    monkeypatch.setattr(buffer, "ALIGNMENT", 64)
    return capture_for_gpu(monkeypatch)


@pytest.fixture
def defined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return note_definitions(monkeypatch)


def record() -> tuple[Any, Any, Any, Any]:
    graph, x = tg.CUDAGraph(), tg.static_input(jnp.arange(4.0))
    with tg.graph(graph):
        y = x * 2
        total = y.sum()
    return graph, x, y, total


def test_results_are_read_from_the_latest_replay(device: CudaOnHost, defined: list[Any]) -> None:
    graph, x, y, total = record()
    with pytest.raises(tg.ReplayError, match="not been replayed"):
        float(total)
    for start in range(3):
        x.copy_(jnp.arange(4.0) + start)
        graph.replay()
        assert float(total) == 2 * (6 + 4 * start)
        assert y.tolist() == [2 * (start + i) for i in range(4)]
        assert f"{total:.1f}" == f"{2 * (6 + 4 * start):.1f}"
    assert not defined
    # As an array of JAX, it is a value that no later replay changes.
    kept = y.jax()
    x.copy_(jnp.zeros(4))
    graph.replay()
    np.testing.assert_array_equal(kept, [4, 6, 8, 10])
    np.testing.assert_array_equal(y, [0] * 4)


def test_a_static_input_that_the_host_reads_is_written_in_place(device: CudaOnHost) -> None:
    graph, x, y, _ = record()
    address = x.data_ptr()
    for start in range(3):
        x.copy_(jnp.arange(4.0) + start)
        np.testing.assert_array_equal(x, np.arange(4.0) + start)
        graph.replay()
        np.testing.assert_array_equal(y, 2 * (np.arange(4.0) + start))
    assert x.data_ptr() == address


def test_a_read_in_a_block_is_refused_as_before(device: CudaOnHost) -> None:
    graph, x, _, total = record()
    graph.replay()
    other = tg.CUDAGraph()
    with pytest.raises(tg.CaptureError), tg.graph(other):
        float(total + x[0])
    assert float(total) == 12


def test_the_guard_of_jax_holds(device: CudaOnHost, defined: list[Any]) -> None:
    graph, _, _, total = record()
    graph.replay()
    with jax.transfer_guard_device_to_host("log"):
        assert float(total) == 12
    assert len(defined) == 1
