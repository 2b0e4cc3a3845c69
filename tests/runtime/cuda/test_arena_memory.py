"""The memory of arenas: what is copied, what is compiled, and what waits for the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, kernel, make_cuda_replay
from tests.fakes.definitions import make_definition, make_stage
from tracegraph.runtime.arena import Arena
from tracegraph.runtime.cuda.memory import jax_arrays
from tracegraph.runtime.definition.graph import ArenaSize
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.memory.waiting import allow_waiting

DOUBLE = make_definition(make_stage(kernel("double", "x", "y")))
# The fixture puts another in its place.
MAKE_ALLOCATOR = jax_arrays._make_allocator


@pytest.fixture
def compiled(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the sizes for which programs are compiled."""
    sizes: list[int] = []
    compile_allocator = jax_arrays._compile_allocator

    def note(shapes: Any, jax_device: Any) -> Any:
        sizes.append(shapes[0][0][0])
        return compile_allocator(shapes, jax_device)

    monkeypatch.setattr(jax_arrays, "_make_allocator", MAKE_ALLOCATOR)
    monkeypatch.setattr(jax_arrays, "_allocators", {})
    monkeypatch.setattr(jax_arrays, "_compile_allocator", note)
    monkeypatch.setattr(jax_arrays, "MOST_COPIED_BYTES", 1 << 14)
    return sizes


def test_an_arena_is_a_copy_of_the_drivers_memory(device: CudaOnHost, compiled: list[int]) -> None:
    before = device.driver.live_handles()
    pool = PrivatePool(new_pool_id(), device.allocator)
    arenas = [Arena(pool, ArenaSize(1000, 3000), shares_scratch=False) for _ in range(3)]
    assert not compiled
    assert device.driver.count_calls("allocate_memory") == 6
    assert device.driver.live_handles() == before
    # No two parts share memory, and all of it can be written.
    parts = [part for arena in arenas for part in arena.ranges]
    for number, (address, nbytes) in enumerate(parts):
        ctypes.memset(address, number, nbytes)
    for number, (address, nbytes) in enumerate(parts):
        assert ctypes.string_at(address, nbytes) == bytes([number]) * nbytes


def test_a_graph_waits_for_its_memory_and_other_allocations_do_not(
    device: CudaOnHost, compiled: list[int]
) -> None:
    nbytes = make_cuda_replay(device, DOUBLE).arena.size.kept_bytes
    assert device.driver.count_calls("allocate_memory") == 1
    assert nbytes not in compiled
    device.allocator.provider.free(device.allocator.provider.allocate(nbytes))
    assert device.driver.count_calls("allocate_memory") == 1
    assert compiled[-1] == nbytes


@pytest.mark.parametrize(("nbytes", "free_bytes"), [(1 << 15, 1 << 20), (1024, 512)])
def test_what_is_large_or_finds_too_little_memory_is_allocated_by_a_program(
    device: CudaOnHost, compiled: list[int], nbytes: int, free_bytes: int
) -> None:
    before = device.driver.live_handles()
    device.driver.memory_bytes = free_bytes
    with allow_waiting():
        device.allocator.provider.free(device.allocator.provider.allocate(nbytes))
    assert compiled == [nbytes]
    assert device.driver.live_handles() == before


def run_out_of_memory(*_: Any, **__: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def break_off(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fault", "error"), [(run_out_of_memory, OutOfMemoryError), (break_off, KeyboardInterrupt)]
)
def test_a_copy_that_fails_leaves_nothing(
    device: CudaOnHost,
    compiled: list[int],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., Any],
    error: type[BaseException],
) -> None:
    before, provider = device.driver.live_handles(), device.allocator.provider
    with allow_waiting(), monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", fault)
        with pytest.raises(error):
            provider.allocate(1024)
    assert device.driver.live_handles() == before
    with allow_waiting():
        provider.free(provider.allocate(1024))
    assert not compiled


def test_an_allocation_whose_preparation_failed_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax_arrays, "_allocators", {})
    outcomes: list[Any] = [RuntimeError("XLA"), "allocator"]

    def compile_once(shapes: Any, jax_device: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(jax_arrays, "_compile_allocator", compile_once)
    shapes = (((8,), np.dtype(np.uint8)),)
    with pytest.raises(RuntimeError, match="XLA"):
        jax_arrays._make_allocator(shapes, None)
    assert [jax_arrays._make_allocator(shapes, None) for _ in range(2)] == ["allocator"] * 2
