"""OwnedBuffer: resident state that a donating call updates in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.runtime.arena import Arena
from tracegraph.runtime.definition.graph import ArenaSize, BufferSlot, ReplayClock
from tracegraph.runtime.host.owned_buffer import OwnedBuffer
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.memory.providers.host import HostProvider


def make_buffer(shape: tuple[int, ...] = (4,), dtype: Any = np.float32) -> OwnedBuffer:
    arena = Arena(PrivatePool(new_pool_id(), CachingAllocator(HostProvider())), ArenaSize(512))
    slot = BufferSlot("w", 0, shape, np.dtype(dtype), is_resident=True)
    return OwnedBuffer(slot, arena, jax.devices("cpu")[0], ReplayClock())


@pytest.mark.parametrize("dtype", [np.float32, np.int8, bool, np.complex64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_what_is_written_is_read(shape: tuple[int, ...], dtype: Any):
    buffer = make_buffer(shape, dtype)
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    buffer.write(value)
    np.testing.assert_array_equal(buffer.snapshot(), value)


def test_a_donating_call_keeps_the_address():
    buffer = make_buffer()
    arguments = [None]
    buffer.bind(arguments, 0)
    buffer.write(np.arange(4))
    address = buffer.address
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    for _ in range(3):
        arguments[0] = step(arguments[0])
    assert buffer.address == address
    np.testing.assert_array_equal(buffer.snapshot(), np.arange(4) + 3)


def test_a_reader_does_not_stop_the_donation():
    buffer = make_buffer()
    arguments = [None]
    buffer.bind(arguments, 0)
    buffer.write(np.ones(4))
    address, seen = buffer.address, [buffer.snapshot(), buffer.view]
    arguments[0] = jax.jit(lambda w: w * 2, donate_argnums=0)(arguments[0])
    assert buffer.address == address
    for copy in seen:
        np.testing.assert_array_equal(copy, np.ones(4))


def test_a_lost_array_is_made_anew():
    buffer = make_buffer()
    assert not buffer.restore()
    buffer.alias.delete()
    assert buffer.restore()
    buffer.write(np.full(4, 7))
    np.testing.assert_array_equal(buffer.snapshot(), np.full(4, 7))


def test_a_launch_that_loses_the_state_says_so_and_the_next_call_works(
    monkeypatch: pytest.MonkeyPatch,
):
    step = tg.capture(lambda w, x: (w + x, w.sum()), donate_argnums=0, name="step")
    w, _ = step(jnp.ones(3), jnp.ones(3))
    graph = step._latest
    assert graph is not None
    launch_stages = graph._launch_stages

    def fail() -> None:
        launch_stages()
        graph.replay.inputs[0].alias.delete()  # pyright: ignore[reportAttributeAccessIssue]
        raise MemoryError("planted")

    monkeypatch.setattr(graph, "_launch_stages", fail)
    with pytest.raises(MemoryError, match="planted"):
        step(w, jnp.ones(3))
    monkeypatch.undo()
    assert w.is_deleted()
    with pytest.raises(tg.ReplayError, match="it was donated to `step`") as caught:
        step(w, jnp.ones(3))
    assert "argument 0 `w`; it was `w` of that call" in caught.value.where
    w, _ = step(jnp.zeros(3), jnp.ones(3))
    np.testing.assert_array_equal(w, np.ones(3))


def test_in_place_is_for_state_that_one_region_reads():
    side = tg.Stream()

    def split(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        current = tg.current_stream()
        side.wait_stream(current)
        with tg.stream(side):
            other = jnp.sin(w)
        new = w + x
        current.wait_stream(side)
        return new, other + new

    step = tg.capture(split, donate_argnums=0)
    w = jnp.ones(3)
    for count in range(1, 4):
        w, total = step(w, jnp.ones(3))
        np.testing.assert_array_equal(w, np.full(3, count + 1))
        np.testing.assert_array_equal(total, jnp.sin(jnp.full(3, float(count))) + count + 1)
    assert step._latest is not None
    assert not isinstance(step._latest.replay.inputs[0], OwnedBuffer)
