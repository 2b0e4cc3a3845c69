"""What runs before what inside a capture, stream by stream."""

from __future__ import annotations

import random

import pytest

from tests.oracles import error_lines
from tracegraph.runtime.errors import CaptureError
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder


def join(order: CaptureOrder, stream: int, into: int) -> None:
    """Lets ``into`` wait for all that ``stream`` has launched."""
    order.record(("join", stream, into), stream)
    order.wait(("join", stream, into), into)


def test_work_of_one_stream_runs_in_order() -> None:
    order = CaptureOrder(1)
    nodes = [order.launch(1) for _ in range(3)]
    assert nodes == [0, 1, 2]
    assert order.get_terminals(1) == {2}
    assert order.has_passed(nodes, 1)


def test_a_stream_joins_the_capture_by_waiting_for_one_of_its_events() -> None:
    order = CaptureOrder(1)
    assert not order.has_stream(2)
    join(order, 1, into=2)
    assert order.has_stream(2)
    assert order.streams == (1, 2)


def test_the_branches_of_a_fork_have_not_joined() -> None:
    order = CaptureOrder(1)
    first = order.launch(1)
    join(order, 1, into=2)
    side = order.launch(2)
    main = order.launch(1)
    assert order.has_passed([first], 2)
    assert not order.has_passed([side], 1)
    assert not order.has_passed([main], 2)
    assert not order.has_joined([2], into=1)


def test_a_join_orders_one_way_only() -> None:
    order = CaptureOrder(1)
    order.launch(1)
    join(order, 1, into=2)
    order.launch(2)
    order.launch(1)
    join(order, 2, into=1)
    assert order.has_joined([2], into=1)
    assert not order.has_joined([1], into=2)
    assert len(order.get_terminals(1)) == 2


def test_work_after_the_record_is_not_waited_for() -> None:
    order = CaptureOrder(1)
    order.launch(1)
    join(order, 1, into=2)
    order.launch(2)
    order.record("early", 2)
    late = order.launch(2)
    order.wait("early", 1)
    assert not order.has_passed([late], 1)


def test_an_event_that_is_recorded_again_stands_for_the_later_place() -> None:
    order = CaptureOrder(1)
    order.launch(1)
    join(order, 1, into=2)
    order.record("event", 2)
    late = order.launch(2)
    order.record("event", 2)
    order.wait("event", 1)
    assert order.has_passed([late], 1)


def test_a_join_reaches_through_a_third_stream() -> None:
    order = CaptureOrder(1)
    order.launch(1)
    join(order, 1, into=2)
    join(order, 1, into=3)
    deep = order.launch(3)
    join(order, 3, into=2)
    join(order, 2, into=1)
    assert order.has_passed([deep], 1)
    assert order.has_joined([2, 3], into=1)


def test_what_has_passed_stays_so_when_more_is_launched() -> None:
    order = CaptureOrder(1)
    first = order.launch(1)
    assert order.has_passed([first], 1)
    second = order.launch(1)
    assert order.has_passed([first, second], 1)


def test_before_the_first_node_nothing_has_passed() -> None:
    order = CaptureOrder(1)
    assert order.get_terminals(1) == frozenset()
    assert not order.has_passed([0], 1)


@pytest.mark.parametrize("ask", ["launch", "get_terminals"])
def test_a_stream_outside_of_the_capture_is_refused(ask: str) -> None:
    order = CaptureOrder(1)
    with pytest.raises(CaptureError) as raised:
        getattr(order, ask)(7)
    error_lines.match(
        raised.value,
        what="stream 7 takes no part in this capture",
        where="capture of the streams 1",
        why="a stream is captured from when it waits",
        fix="let stream 7 wait",
    )
    assert not order.has_stream(7)


def test_an_event_from_outside_of_the_capture_is_refused() -> None:
    order = CaptureOrder(1)
    with pytest.raises(CaptureError) as raised:
        order.wait("foreign", 2)
    error_lines.match(
        raised.value,
        what="stream 2 waits for an event that was not recorded in this capture",
        where="event 'foreign', capture of the streams 1",
        why="a graph can wait only for its own nodes",
        fix="record the event on a stream of the capture",
    )
    assert not order.has_stream(2)


def test_an_event_that_is_forgotten_was_not_recorded() -> None:
    order = CaptureOrder(1)
    order.record("event", 1)
    assert order.has_event("event")
    order.forget("event")
    order.forget("event")
    assert not order.has_event("event")
    with pytest.raises(CaptureError, match="was not recorded"):
        order.wait("event", 2)


@pytest.mark.parametrize("seed", range(10))
def test_random_captures_agree_with_all_paths(seed: int) -> None:
    # The slow way: the ancestors of a stream's terminals, found anew for every question.
    generator = random.Random(seed)
    order = CaptureOrder(0)
    parents: dict[int, set[int]] = {}
    before: dict[int, set[int]] = {0: set()}
    for stream in (1, 2, 3):
        join(order, 0, into=stream)
        before[stream] = set()
    for _ in range(60):
        stream, other = generator.sample(range(4), 2)
        if generator.random() < 0.6:
            node = order.launch(stream)
            parents[node] = before[stream]
            before[stream] = {node}
        else:
            join(order, stream, into=other)
            before[other] = before[other] | before[stream]
        asked = generator.randrange(4)
        ancestors = _find_ancestors(parents, before[asked])
        for node in parents:
            assert order.has_passed([node], asked) == (node in ancestors)


def _find_ancestors(parents: dict[int, set[int]], nodes: set[int]) -> set[int]:
    return nodes.union(*(_find_ancestors(parents, parents[node]) for node in nodes))
