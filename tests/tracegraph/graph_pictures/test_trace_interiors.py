"""Which node a number in a trace is of, inside of branches, loops and calls of libraries."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from tests.fakes.trace_recordings import TRACE
from tests.tracegraph.graph_pictures.traces import (
    BIG,
    IDS,
    LOOP,
    SIMPLE,
    change_node,
    copy_events,
    fails,
    label,
    move_to,
    pick,
    split_id,
    write,
)
from tracegraph.graph_pictures.records import EdgeData
from tracegraph.graph_pictures.trace_executions import Execution, LaunchedGraph
from tracegraph.graph_pictures.trace_interiors import number_inside


def make_launched(kinds: str, *times: tuple[int, float]) -> tuple[LaunchedGraph, Execution]:
    """Returns a chain, with events by number and time: Matmuls, Kernels, a Loop around a matmul."""
    names = {"M": "matmul", "K": "kernel", "L": "while"}
    plain = dataclasses.replace(SIMPLE.nodes[0], kind="matmul")
    nodes = tuple(
        dataclasses.replace(SIMPLE.nodes[letter == "K"], index=index, kind=names[letter])
        for index, letter in enumerate(kinds)
    )
    edges = tuple(EdgeData(index, index + 1) for index in range(len(nodes) - 1))
    bodies = {node.index: (plain,) for node in nodes if node.kind == "while"}
    events = {
        number: [{"ts": time, "name": "wrapped_tanh", "args": {"correlation_id": "1"}}]
        for number, time in times
    }
    return LaunchedGraph(nodes, edges, bodies), Execution(1, events)


@pytest.mark.parametrize(
    ("kinds", "times", "owners"),
    [
        # Each call of a library runs something.
        ("KMM", [(0, 0.0), (3, 1.0), (4, 2.0)], {3: 1, 4: 2}),
        ("KMM", [(0, 0.0), (3, 1.0), (4, 2.0), (5, 3.0)], {3: 1, 5: 2}),
        ("MK", [(1, 9.0), (2, 1.0), (3, 2.0)], {2: 0, 3: 0}),
        # What has run before the loop is not inside of it.
        ("MKL", [(1, 9.0), (3, 1.0), (4, 2.0), (5, 10.0)], {3: 0, 4: 0}),
        ("MKL", [(1, 9.0), (3, 10.0), (4, 11.0)], None),
        ("KM", [(0, 5.0), (2, 4.0)], None),
        ("K", [(0, 5.0)], {}),
        ("K", [(0, 5.0), (1, 6.0)], None),
    ],
)
def test_numbers_are_dealt_out_by_time(
    kinds: str, times: list[tuple[int, float]], owners: dict[int, int] | None
) -> None:
    found = number_inside(*make_launched(kinds, *times))
    assert owners == (None if found is None else {n: node.index for n, node in found.items()})


def test_what_is_inside_of_calls_of_libraries_branches_and_loops(tmp_path: pathlib.Path) -> None:
    assert label(BIG, TRACE, tmp_path)[1] == {
        **{number: number for number in (2, 4, 5, 6, 7)},
        **{9: 0, 10: 1, 11: 3, 12: 3, 13: 3, 14: 3, 15: 8},
    }
    nodes = label(LOOP, TRACE, tmp_path)[1]
    # The loop has had no turn: its body's four numbers are not in the trace.
    assert {number: nodes[number] for number in nodes if number > 9} == {
        **{15: 6, 17: 16, 18: 17, 19: 18}
    }


def test_a_number_that_may_be_of_two_calls_is_not_guessed(tmp_path: pathlib.Path) -> None:
    """With a further node in one of both matmuls, nothing tells in which."""
    events = copy_events()
    own = pick(events, IDS["big"])
    for event in own:
        number = split_id(event)[1]
        if number > 9:
            event["args"]["cuda_graph_node_id"] = str((IDS["big"] << 32) + number + 1)
    more = [
        move_to(event, IDS["big"]) | {"ts": event["ts"] + 0.001}
        for event in own
        if split_id(event)[1] == 9
    ]
    for event in more:
        event["args"]["cuda_graph_node_id"] = str((IDS["big"] << 32) + 10)
    done, nodes = label(BIG, write(tmp_path, [*events, *more]), tmp_path)
    assert [nodes[number] for number in range(9, 17)] == [0, None, 1, 3, 3, 3, 3, 8]
    assert (done.events, done.unlabelled) == (24, 2)


def test_times_that_contradict_the_edges(tmp_path: pathlib.Path) -> None:
    events = copy_events()
    for event in pick(events, IDS["big"]):
        if split_id(event)[1] == 9:
            event["ts"] += 5000
    path = write(tmp_path, events)
    assert "its nodes from 9 on are not inside of the nodes here" in fails(BIG, path)
    done, nodes = label(BIG, path, tmp_path, graph_id=IDS["big"])
    assert all(nodes[number] is None for number in range(9, 16))
    assert done.unlabelled == 14


def test_another_kernel_in_a_body(tmp_path: pathlib.Path) -> None:
    assert LOOP.nodes[18].kernel is not None
    kernel = dataclasses.replace(LOOP.nodes[18].kernel, symbol="other")
    data = change_node(LOOP, 18, kernel=kernel)
    assert "its nodes from 10 on are not inside of the nodes here" in fails(data, TRACE)
    done, nodes = label(data, TRACE, tmp_path, graph_id=IDS["loop"])
    assert [nodes[number] for number in (15, 17, 18, 19)] == [None] * 4
    assert done.unlabelled == 8


def test_what_is_deeper_is_not_guessed(tmp_path: pathlib.Path) -> None:
    """A call of a library in the loop's body: from its first number on, all may be anything's."""
    data = change_node(LOOP, 11, kind="matmul", kernel=None)
    done, nodes = label(data, TRACE, tmp_path)
    assert [nodes[number] for number in (15, 17, 18, 19)] == [None] * 4
    assert (done.events, done.unlabelled) == (14, 8)
    # Behind what is known, it stays known.
    done, nodes = label(change_node(LOOP, 17, kind="matmul", kernel=None), TRACE, tmp_path)
    assert [nodes[number] for number in (15, 17, 18, 19)] == [6, None, None, None]
