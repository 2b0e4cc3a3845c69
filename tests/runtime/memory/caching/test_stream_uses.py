"""Freed blocks that other streams may still use: events, captures, joins inside of a capture."""

from __future__ import annotations

import pytest

from tests.fakes.bytes_provider import ManualEvents
from tests.oracles import error_lines
from tracegraph.runtime.errors import InternalError
from tracegraph.runtime.memory.caching.block import Block, Pool
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.pool_id import DEFAULT_POOL_ID, PoolId
from tracegraph.runtime.memory.providers.segment import Segment
from tracegraph.runtime.memory.statistics import Statistics

MAIN, SIDE, OTHER = 1, 2, 3
CAPTURE, SECOND_CAPTURE = PoolId(7), PoolId(8)


class Setup:
    """A `StreamUses` that puts its blocks into a list."""

    def __init__(self) -> None:
        self.events = ManualEvents()
        self.back: list[Block] = []
        self.uses = StreamUses(self.events, self.back.append)
        self.pool = Pool(DEFAULT_POOL_ID, Statistics())

    def free(self, *streams: int, own: int = MAIN, pool: Pool | None = None) -> Block:
        """Frees a new block of stream ``own`` that ``streams`` used."""
        block = self.make(own, pool)
        for stream in streams:
            self.uses.record(block, stream)
        self.uses.defer(block)
        return block

    def make(self, own: int = MAIN, pool: Pool | None = None) -> Block:
        return Block(Segment(4096, 512, None), 4096, 512, own, (pool or self.pool).small)


def join(order: CaptureOrder, stream: int, into: int) -> None:
    order.record((stream, into), stream)
    order.wait((stream, into), into)


def fork(*streams: int) -> CaptureOrder:
    """Returns a capture that begins on MAIN and has forked to ``streams``, each with a node."""
    order = CaptureOrder(MAIN)
    order.launch(MAIN)
    for stream in streams:
        join(order, MAIN, into=stream)
        order.launch(stream)
    return order


# Outside of captures ------------------------------------------------------------------------


def test_a_use_on_the_own_stream_needs_no_event() -> None:
    setup = Setup()
    block = setup.make(own=MAIN)
    setup.uses.record(block, MAIN)
    assert not block.stream_uses


def test_a_block_comes_back_when_all_of_its_events_are_over() -> None:
    setup = Setup()
    block = setup.free(SIDE, OTHER, SIDE)
    assert block.event_count == 2
    setup.events.finish(SIDE)
    setup.uses.poll()
    assert setup.back == []
    assert block.event_count == 1
    setup.events.finish(OTHER)
    setup.uses.poll()
    assert setup.back == [block]
    assert block.event_count == 0
    assert setup.events.live == set()
    assert setup.uses.blocks == ()


def test_a_slow_stream_holds_up_no_other() -> None:
    setup = Setup()
    slow, quick = setup.free(SIDE), setup.free(OTHER)
    setup.events.finish(OTHER)
    setup.uses.poll()
    assert setup.back == [quick]
    assert setup.uses.blocks == (slow,)


def test_events_of_one_stream_are_asked_in_turn() -> None:
    # The first that is not over ends the round: later ones cannot be over either.
    setup = Setup()
    first, second = setup.free(SIDE), setup.free(SIDE)
    setup.uses.poll()
    assert setup.events.asked == [1]
    setup.events.finish(SIDE, 1)
    setup.uses.poll()
    assert setup.events.asked == [1, 1, 2]
    assert (setup.back, setup.uses.blocks) == ([first], (second,))


def test_synchronize_waits_for_all_events() -> None:
    setup = Setup()
    blocks = [setup.free(SIDE), setup.free(OTHER, SIDE)]
    setup.uses.synchronize_all()
    assert setup.back == blocks
    assert len(setup.events.synchronized) == 3
    assert setup.events.live == set()


def test_synchronize_for_one_pool_leaves_the_others() -> None:
    setup = Setup()
    private = Pool(PoolId(3), Statistics())
    first, mine, last = setup.free(SIDE), setup.free(SIDE, pool=private), setup.free(SIDE)
    setup.uses.synchronize_all(private)
    assert setup.back == [mine]
    assert setup.uses.blocks == (first, last)
    # The wait reached the event before it as well, which the next poll sees.
    setup.uses.poll()
    assert setup.back == [mine, first]


# Captures -----------------------------------------------------------------------------------


def test_no_event_is_asked_while_a_capture_is_under_way() -> None:
    setup = Setup()
    block = setup.free(SIDE)
    setup.events.finish(SIDE)
    setup.uses.begin_capture(CAPTURE)
    setup.events.captured_streams = {None}
    setup.uses.poll()
    assert setup.back == []
    setup.events.captured_streams = set()
    setup.uses.end_capture(CAPTURE)
    setup.uses.poll()
    assert setup.back == [block]


def test_no_event_is_recorded_while_a_capture_is_under_way() -> None:
    setup = Setup()
    block = setup.make()
    setup.uses.record(block, SIDE)
    setup.uses.begin_capture(CAPTURE)
    setup.events.captured_streams = {None}
    setup.uses.defer(block)
    setup.events.captured_streams = set()
    assert block.stream_uses == {SIDE}
    setup.uses.end_capture(CAPTURE)
    assert setup.events.recorded == {}
    setup.uses.poll()
    # The use is from before the capture, so its end is not known without an event.
    assert setup.events.recorded == {SIDE: 1}
    assert setup.back == []
    setup.events.finish(SIDE)
    setup.uses.poll()
    assert setup.back == [block]


def test_uses_inside_of_the_capture_are_dropped_after_it() -> None:
    setup = Setup()
    setup.uses.begin_capture(CAPTURE)
    block = setup.free(SIDE)
    setup.uses.end_capture(CAPTURE)
    setup.uses.poll()
    assert setup.back == [block]
    assert setup.events.recorded == {}
    assert not block.stream_uses


def test_of_mixed_uses_only_those_before_the_capture_need_events() -> None:
    setup = Setup()
    block = setup.make()
    setup.uses.record(block, SIDE)
    setup.uses.begin_capture(CAPTURE)
    setup.uses.record(block, OTHER)
    setup.uses.defer(block)
    setup.uses.end_capture(CAPTURE)
    setup.uses.poll()
    assert setup.events.recorded == {SIDE: 1}


def test_the_last_of_several_captures_ends_the_wait() -> None:
    setup = Setup()
    setup.uses.begin_capture(CAPTURE)
    setup.uses.begin_capture(SECOND_CAPTURE)
    block = setup.free(SIDE)
    setup.uses.end_capture(CAPTURE)
    setup.uses.poll()
    assert setup.uses.is_capturing
    assert setup.back == []
    setup.uses.end_capture(SECOND_CAPTURE)
    setup.uses.poll()
    assert setup.back == [block]


def test_a_use_in_a_capture_counts_when_the_block_is_freed_after_it() -> None:
    # A replay of the graph may be under way by then.
    setup = Setup()
    block = setup.make()
    setup.uses.begin_capture(CAPTURE)
    setup.uses.record(block, SIDE)
    setup.uses.end_capture(CAPTURE)
    setup.uses.defer(block)
    assert setup.events.recorded == {SIDE: 1}
    assert setup.back == []


def test_waiting_inside_of_a_capture_is_refused() -> None:
    setup = Setup()
    setup.free(SIDE)
    setup.uses.begin_capture(CAPTURE)
    with pytest.raises(InternalError) as raised:
        setup.uses.synchronize_all()
    error_lines.match(
        raised.value,
        what="cannot wait for events while a capture is under way",
        where="capture into the pools (7, 0)",
        why="a capture records work without running it",
        fix="internal error in tracegraph",
    )
    assert setup.events.synchronized == []


@pytest.mark.parametrize("call", ["begin_capture", "end_capture"])
def test_captures_begin_and_end_once(call: str) -> None:
    setup = Setup()
    if call == "begin_capture":
        setup.uses.begin_capture(CAPTURE)
    with pytest.raises(InternalError) as raised:
        getattr(setup.uses, call)(CAPTURE)
    error_lines.match(
        raised.value,
        what="cannot begin or end a capture into the pool (7, 0)",
        where="allocator",
        why="a capture into" if call == "begin_capture" else "no capture into",
        fix="internal error in tracegraph",
    )


# Reuse inside of a capture ------------------------------------------------------------------


@pytest.mark.parametrize("sides", [(SIDE,), (SIDE, OTHER, 4)], ids=["2 streams", "4 streams"])
def test_a_block_is_reused_once_every_stream_has_joined(sides: tuple[int, ...]) -> None:
    setup = Setup()
    order = fork(*sides)
    setup.uses.begin_capture(CAPTURE, order)
    block = setup.free(*sides)
    for side in sides:
        setup.uses.find_reusable(MAIN)
        assert setup.back == []
        join(order, side, into=MAIN)
    setup.uses.find_reusable(MAIN)
    assert setup.back == [block]
    assert not block.stream_uses
    assert setup.uses.blocks == ()
    assert setup.events.recorded == {}


def test_the_allocating_stream_must_have_joined_not_another() -> None:
    setup = Setup()
    order = fork(SIDE, OTHER)
    setup.uses.begin_capture(CAPTURE, order)
    block = setup.free(SIDE)
    join(order, SIDE, into=OTHER)
    setup.uses.find_reusable(OTHER)
    setup.uses.find_reusable(MAIN)
    assert setup.back == []
    join(order, OTHER, into=MAIN)
    setup.uses.find_reusable(MAIN)
    assert setup.back == [block]


def test_a_join_of_the_owner_into_the_side_stream_is_not_enough() -> None:
    setup = Setup()
    order = fork(SIDE)
    setup.uses.begin_capture(CAPTURE, order)
    setup.free(SIDE)
    join(order, MAIN, into=SIDE)
    setup.uses.find_reusable(MAIN)
    assert setup.back == []


def test_work_after_the_free_need_not_have_joined() -> None:
    setup = Setup()
    order = fork(SIDE)
    setup.uses.begin_capture(CAPTURE, order)
    block = setup.free(SIDE)
    order.record("used", SIDE)
    order.launch(SIDE)
    order.wait("used", MAIN)
    setup.uses.find_reusable(MAIN)
    assert setup.back == [block]


@pytest.mark.parametrize(
    ("order", "streams"),
    [
        pytest.param(None, (SIDE,), id="reuse is off"),
        pytest.param(fork(SIDE), (SIDE, OTHER), id="a stream outside of the capture"),
        pytest.param(CaptureOrder(MAIN), (SIDE,), id="before the first node"),
    ],
)
def test_without_markers_a_block_waits_for_the_end(
    order: CaptureOrder | None, streams: tuple[int, ...]
) -> None:
    setup = Setup()
    setup.uses.begin_capture(CAPTURE, order)
    block = setup.free(*streams)
    if order is not None:
        for stream in order.streams[1:]:
            join(order, stream, into=MAIN)
    setup.uses.find_reusable(MAIN)
    assert setup.back == []
    setup.uses.end_capture(CAPTURE)
    setup.uses.poll()
    assert setup.back == [block]


def test_markers_of_one_capture_say_nothing_in_another() -> None:
    setup = Setup()
    first, second = fork(SIDE), CaptureOrder(MAIN)
    setup.uses.begin_capture(CAPTURE, first)
    setup.free(SIDE)
    setup.uses.begin_capture(SECOND_CAPTURE, second)
    setup.uses.end_capture(CAPTURE)
    for _ in range(5):
        second.launch(MAIN)
    setup.uses.find_reusable(MAIN)
    assert setup.back == []


# Failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 2])
def test_a_block_waits_on_where_recording_its_events_fails(failing: int) -> None:
    setup = Setup()
    setup.events.failing_records = {failing}
    block = setup.make()
    for stream in (SIDE, OTHER):
        setup.uses.record(block, stream)
    with pytest.raises(RuntimeError, match=f"record {failing} fails"):
        setup.uses.defer(block)
    assert setup.events.live == set()
    assert setup.uses.blocks == (block,)
    assert block.stream_uses == {SIDE, OTHER}
    setup.uses.poll()
    assert block.event_count == 2
    setup.uses.synchronize_all()
    assert setup.back == [block]
    assert setup.events.live == set()


def test_a_failing_question_loses_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    block = setup.free(SIDE)

    def fail(event: object) -> bool:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as broken:
        broken.setattr(setup.events, "is_done", fail)
        with pytest.raises(RuntimeError, match="the device is lost"):
            setup.uses.poll()
    setup.events.finish(SIDE)
    setup.uses.poll()
    assert setup.back == [block]
