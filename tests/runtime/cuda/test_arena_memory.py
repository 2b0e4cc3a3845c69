"""Preparing the memory of an arena: in which thread, what is compiled, and what is copied."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost
from tracegraph.runtime.arena import Arena
from tracegraph.runtime.cuda.memory import jax_arrays
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.graph import ArenaSize
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool

# The fixture puts another in its place.
MAKE_ALLOCATOR = jax_arrays._make_allocator


def test_an_arena_is_prepared_in_threads_and_compiled_once(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_arrays, "_make_allocator", MAKE_ALLOCATOR)
    monkeypatch.setattr(jax_arrays, "_allocators", {})
    compiled: list[int] = []
    has_begun, may_end = threading.Event(), threading.Event()
    compile_allocator = jax_arrays._compile_allocator

    def compile_late(shapes: Any, jax_device: Any) -> Any:
        compiled.append(shapes[0][0][0])
        if len(compiled) == 2:
            has_begun.set()
        assert may_end.wait(240)
        return compile_allocator(shapes, jax_device)

    monkeypatch.setattr(jax_arrays, "_compile_allocator", compile_late)
    device.prepare_arena(ArenaSize(1000, 3000))
    # Both at the same time, and not in this thread.
    assert has_begun.wait(240)
    may_end.set()
    arena = Arena(PrivatePool(new_pool_id(), device.allocator), ArenaSize(1000, 3000))
    assert sorted(compiled) == [1024, 3072] == sorted(b - a for a, b in list_ends(arena))


def copy_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets parts of 2 KiB at most be copied, and forgets what was prepared before."""
    monkeypatch.setattr(jax_arrays, "_make_allocator", MAKE_ALLOCATOR)
    monkeypatch.setattr(jax_arrays, "_allocators", {})
    monkeypatch.setattr(jax_arrays, "_to_copy", {})
    monkeypatch.setattr(jax_arrays, "SMALL_BYTES", 2048)


def test_an_arena_is_lowered_here_and_compiled_where_its_owner_says(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_small_parts(monkeypatch)
    done: list[str] = []
    lower_allocator, compile_lowered = jax_arrays._lower_allocator, jax_arrays._compile_lowered

    def lower(shapes: Any, jax_device: Any) -> Any:
        done.append(f"lowered {shapes[0][0][0]}")
        return lower_allocator(shapes, jax_device)

    def compile_once(lowered: Any) -> Any:
        done.append("compiled")
        if done.count("compiled") == 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: no compilation")
        return compile_lowered(lowered)

    monkeypatch.setattr(jax_arrays, "_lower_allocator", lower)
    monkeypatch.setattr(jax_arrays, "_compile_lowered", compile_once)
    assert device.lower_arena(0) is None
    compile_segment = device.lower_arena(1000)
    assert compile_segment is not None
    assert done == ["lowered 1024"]
    # What fails ahead is tried again.
    compile_segment()
    compile_segment()
    assert done[1:] == ["compiled"] * 2
    # A small part for which there is a program is not copied.
    device.prepare_arena(ArenaSize(1000, 2000))
    assert [nbytes for nbytes, _ in jax_arrays._to_copy] == [2048]
    provider = device.allocator.provider
    for nbytes in (1024, 2048):
        provider.free(provider.allocate(nbytes))
    assert len(done) == 3


def test_a_small_part_of_an_arena_compiles_nothing(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_small_parts(monkeypatch)
    compiled: list[int] = []
    compile_allocator = jax_arrays._compile_allocator

    def note(shapes: Any, jax_device: Any) -> Any:
        compiled.append(shapes[0][0][0])
        return compile_allocator(shapes, jax_device)

    monkeypatch.setattr(jax_arrays, "_compile_allocator", note)
    device.prepare_arena(ArenaSize(1000, 2000))
    # Only what was prepared, once for each part: others do not wait for JAX's work.
    sizes = [1024, 2048, 1024, 2048, 1024, 2048, 2048]
    segments = [device.allocator.provider.allocate(nbytes) for nbytes in sizes]
    assert compiled == [1024, 2048]
    # No two share memory, and all of it can be written.
    for number, segment in enumerate(segments):
        ctypes.memset(segment.address, number, segment.nbytes)
    for number, segment in enumerate(segments):
        assert ctypes.string_at(segment.address, segment.nbytes) == bytes([number]) * segment.nbytes
        device.allocator.provider.free(segment)


def test_a_small_part_of_an_arena_for_which_there_is_no_memory(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_small_parts(monkeypatch)

    def refuse(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    device.prepare_arena(ArenaSize(1000, 0))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", refuse)
        with pytest.raises(OutOfMemoryError, match="cannot reserve 1,024 bytes"):
            device.allocator.provider.allocate(1024)
    device.allocator.provider.free(device.allocator.provider.allocate(1024))


def list_ends(arena: Arena) -> list[tuple[int, int]]:
    """Returns start and end of the segments of both parts."""
    blocks = [arena.find_block(offset) for offset in (0, arena.size.kept_bytes)]
    return [(block.address, block.address + block.segment.nbytes) for block in blocks]


def test_a_small_part_does_not_wait_for_its_program(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_small_parts(monkeypatch)
    has_begun, may_end = threading.Event(), threading.Event()
    compile_lowered = jax_arrays._compile_lowered

    def compile_late(lowered: Any) -> Any:
        has_begun.set()
        assert may_end.wait(240)
        return compile_lowered(lowered)

    monkeypatch.setattr(jax_arrays, "_compile_lowered", compile_late)
    compile_arena = device.lower_arena(2000)
    assert compile_arena is not None
    behind = threading.Thread(target=compile_arena)
    behind.start()
    try:
        assert has_begun.wait(240)
        device.allocator.provider.free(device.allocator.provider.allocate(2048))
        (once,) = jax_arrays._allocators.values()
        assert once.is_running
    finally:
        may_end.set()
        behind.join()
    assert not once.is_running
    with monkeypatch.context() as patch:
        # From now on the program allocates, which waits for nothing.
        patch.delattr(jax, "device_put")
        device.allocator.provider.free(device.allocator.provider.allocate(2048))


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
    assert not jax_arrays._is_late(8, None)
    assert [jax_arrays._make_allocator(shapes, None) for _ in range(2)] == ["allocator"] * 2
