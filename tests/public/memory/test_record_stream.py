"""tg.Array.record_stream: memory that another stream reads is not reused before it is done."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import (
    STREAM,
    CudaOnHost,
    floats,
    kernel,
    make_cuda_replay,
    make_device,
)
from tests.fakes.definitions import make_definition, make_stage
from tests.fakes.devices import ones
from tests.oracles import error_lines
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.replay import Replay

DOUBLE = make_definition(make_stage(kernel("double", "x", "y")))
STATE = make_definition(
    make_stage(kernel("increment", "s", "s")), inputs="s", outputs="s", residents=("s",)
)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaOnHost]:
    """A GPU whose streams do nothing until they are waited for."""
    device = make_device(monkeypatch, is_deferred=True)
    yield device
    # While the memory is still there.
    device.driver._finish_all()


@pytest.fixture
def side() -> tg.Stream:
    return tg.Stream()


def call(replay: Replay, value: float) -> Any:
    replay.settle()
    replay.load([(0, floats([value] * 4))])
    replay.launch()
    return replay.make_taker(0)()


def read_on(device: CudaOnHost, stream: tg.Stream, address: int) -> list[bytes]:
    """Enqueues a read of four floats by a stream of the user, behind all that is on JAX's.

    Returns:
        Where it will stand.
    """
    found: list[bytes] = []
    handle = device.context.order.find_stream(stream)
    device.context.order.make_wait(handle, STREAM)

    def read() -> None:
        found.append(device.driver.read_bytes(address, 16))

    device.driver._enqueue(handle, read)
    return found


def finish(device: CudaOnHost, stream: tg.Stream) -> None:
    device.driver.finish(device.context.order.find_stream(stream))


@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_memory_of_a_result(
    is_recorded: bool, is_settled: bool, late: CudaOnHost, side: tg.Stream
) -> None:
    """Planted: without the record, the memory of an unread result is reused by the next replay."""
    replay = make_cuda_replay(late, DOUBLE)
    result = call(replay, 1)
    if is_settled:
        result.jax()
    address = result.data_ptr()
    found = read_on(late, side, address)
    if is_recorded:
        result.record_stream(side)
        assert result.data_ptr() == address
    del result
    gc.collect()
    addresses = {call(replay, value).data_ptr() for value in range(2, 20)}
    late.driver.finish(STREAM)
    finish(late, side)
    has_old_value = found == [floats([2] * 4).tobytes()]
    if is_recorded:
        assert has_old_value
        assert address not in addresses
    elif not is_settled:
        assert not has_old_value
        assert address in addresses


def test_the_memory_goes_when_the_stream_is_done(late: CudaOnHost, side: tg.Stream) -> None:
    held = late.context.held
    result = call(make_cuda_replay(late, DOUBLE), 1)
    read_on(late, side, result.data_ptr())
    result.record_stream(side)
    result.record_stream(side)
    assert len(held) == 0
    plain = result.jax()
    del result
    gc.collect()
    held.poll()
    assert len(held) == 1
    finish(late, side)
    held.poll()
    assert len(held) == 0
    assert held._streams == {}
    # What the user holds is his own.
    np.testing.assert_array_equal(plain, [2] * 4)


def test_held_memory_is_looked_at_when_memory_is_needed(late: CudaOnHost, side: tg.Stream) -> None:
    replay = make_cuda_replay(late, DOUBLE)
    kept = []
    for value in range(40):
        result = call(replay, value)
        read_on(late, side, result.data_ptr())
        result.record_stream(side)
        kept.append(call(replay, value))
        del result
        finish(late, side)
    assert len(late.context.held) < 12
    values = [float(np.asarray(each)[0]) for each in kept]
    assert values == [2.0 * value for value in range(40)]


def test_several_streams(late: CudaOnHost) -> None:
    held, streams = late.context.held, [tg.Stream(), tg.Stream()]
    result = call(make_cuda_replay(late, DOUBLE), 1)
    for stream in streams:
        read_on(late, stream, result.data_ptr())
        result.record_stream(stream)
    del result
    gc.collect()
    for stream in streams:
        held.poll()
        assert len(held) == 1
        finish(late, stream)
    held.poll()
    assert len(held) == 0


def test_what_the_stream_holds_at_the_end_counts(late: CudaOnHost, side: tg.Stream) -> None:
    """Work that comes after the record, but before the array is gone, is waited for too."""
    result = call(make_cuda_replay(late, DOUBLE), 1)
    result.record_stream(side)
    found = read_on(late, side, result.data_ptr())
    del result
    gc.collect()
    late.context.held.poll()
    assert (len(late.context.held), found) == (1, [])
    finish(late, side)
    assert found == [floats([2] * 4).tobytes()]


def test_the_stream_of_jax_needs_no_record(late: CudaOnHost) -> None:
    replay = make_cuda_replay(late, DOUBLE)
    result, state = call(replay, 1), call(make_cuda_replay(late, STATE), 1)
    before = late.driver.count_calls("record_event")
    result.record_stream(tg.default_stream())
    state.record_stream(tg.current_stream())
    del result, state
    gc.collect()
    assert late.driver.count_calls("record_event") == before
    assert len(late.context.held) == 0


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("state", [ArrayState.FRESH, ArrayState.STATIC])
def test_the_memory_of_an_arena(
    is_recorded: bool, state: ArrayState, late: CudaOnHost, side: tg.Stream
) -> None:
    """Planted: without the record, the next graph of the pool gets the memory at once."""
    pool = PrivatePool(new_pool_id(), late.allocator)
    definition = STATE if state is ArrayState.FRESH else DOUBLE
    make = functools.partial(Replay, definition, late, pool, state)
    replay = make()
    array = call(replay, 1)
    assert isinstance(array, Array)
    found = read_on(late, side, array.data_ptr())
    arena = replay.arena.block.address
    if is_recorded:
        array.record_stream(side)
    del array, replay
    gc.collect()
    following = make()
    call(following, 5)
    assert (following.arena.block.address == arena) == (not is_recorded)
    late.driver.finish(STREAM)
    finish(late, side)
    assert (found == [floats([2] * 4).tobytes()]) == is_recorded
    # Now it serves again.
    del following
    gc.collect()
    addresses = set()
    kept = []
    for _ in range(2):
        kept.append(make())
        addresses.add(kept[-1].arena.block.address)
    assert arena in addresses


def test_a_pool_that_goes_waits_for_the_stream(late: CudaOnHost, side: tg.Stream) -> None:
    replay = make_cuda_replay(late, STATE)
    state = call(replay, 1)
    state.record_stream(side)
    found = read_on(late, side, state.data_ptr())
    del replay, state
    gc.collect()
    assert found == [floats([2] * 4).tobytes()]
    assert late.allocator.statistics.all.reserved_bytes.current == 0


def test_scratch_waits_like_the_kept_part(late: CudaOnHost, side: tg.Stream) -> None:
    pool = PrivatePool(new_pool_id(), late.allocator)
    scratch = pool.allocate(512)
    replay = Replay(DOUBLE, late, pool, ArrayState.STATIC)
    replay.arena._scratch = scratch
    number = late.number_stream(side)
    replay.arena.record_stream(scratch.address, number)
    assert (scratch.stream_uses, replay.arena.block.stream_uses) == ({number}, None)
    replay.arena.record_stream(replay.arena.block.address, number)
    assert replay.arena.block.stream_uses == {number}


def test_from_another_thread_and_inside_a_cycle(late: CudaOnHost, side: tg.Stream) -> None:
    result = call(make_cuda_replay(late, DOUBLE), 1)
    result.record_stream(side)
    read_on(late, side, result.data_ptr())
    cycle: list[Any] = [result]
    cycle.append(cycle)
    del result, cycle
    gc.collect()
    late.context.held.poll()
    assert len(late.context.held) == 1


def test_a_deleted_array_is_refused(late: CudaOnHost, side: tg.Stream) -> None:
    result = call(make_cuda_replay(late, DOUBLE), 1)
    result.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        result.record_stream(side)


WRONG = (None, 0, 7, "side", tg.Event(), object())


@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: type(value).__name__)
def test_only_streams_are_recorded(wrong: Any) -> None:
    captured = tg.capture(lambda s, x: (s + 1, x * 2), donate_argnums=0)
    for array in captured(ones(3), ones(3)):
        if not isinstance(array, Array):
            continue
        at = error_lines.line() + 2
        with pytest.raises(tg.ConfigError) as raised:
            array.record_stream(wrong)
        place = f"tests/public/memory/test_record_stream.py:{at}"
        where = f"record_stream at {place} in test_only_streams_are_recorded"
        error_lines.match(raised.value, f"`stream` is {wrong!r}", where, "streams", "pass a tg.")


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_on_the_host_there_is_nothing_to_do(outputs: Any, side: tg.Stream) -> None:
    captured = tg.capture(lambda s, x: (s + 1, x * 2, x), donate_argnums=0, outputs=outputs)
    results = captured(ones(3), ones(3))
    arrays = [each for each in results if isinstance(each, Array)]
    assert arrays
    for array in arrays:
        array.record_stream(side)
        array.record_stream(tg.default_stream())
    values = [np.asarray(each).tolist() for each in results]
    assert values == [[2.0] * 3, [2.0] * 3, [1.0] * 3]
