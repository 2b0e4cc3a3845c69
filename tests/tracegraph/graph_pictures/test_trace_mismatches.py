"""What must not be labelled in a trace, and what the errors say."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from tests.fakes.trace_recordings import TRACE
from tests.tracegraph.graph_pictures.traces import (
    IDS,
    SIMPLE,
    change_node,
    copy_events,
    fails,
    label,
    move_to,
    pick,
    read,
    split_id,
    write,
)
from tracegraph.graph_pictures.graph_data import GraphData


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"symbol": "wrapped_sine"}, "its node 1 is wrapped_tanh, and wrapped_sine here"),
        ({"symbol": "_Z4tanhPf"}, "its node 1 is wrapped_tanh, and _Z4tanhPf here"),
        ({"block": (64, 1, 1)}, "its node 1 is wrapped_tanh of grid:2048,1,1 block:128,1,1"),
    ],
)
def test_another_kernel(change: dict[str, Any], why: str) -> None:
    assert SIMPLE.nodes[1].kernel is not None
    kernel = dataclasses.replace(SIMPLE.nodes[1].kernel, **change)
    text = fails(change_node(SIMPLE, 1, kernel=kernel), TRACE)
    assert "no replay of `simple` is in" in text
    assert f"4 (2 replays): {why}" in text
    assert "tg.synchronize()" in text


@pytest.mark.parametrize(
    ("index", "changes", "why"),
    [
        (3, {"kernel": None, "kind": "memcpy"}, "its node 3 is loop_reduce_window_fusion, and mem"),
        (3, {"kernel": None, "kind": "matmul"}, "its node 3 is loop_reduce_window_fusion, and mat"),
        (0, {"kernel": SIMPLE.nodes[1].kernel, "kind": "kernel"}, "its node 6 is more than the 6"),
    ],
)
def test_another_kind(index: int, changes: dict[str, Any], why: str) -> None:
    assert why in fails(change_node(SIMPLE, index, **changes), TRACE)


def test_a_graph_of_fewer_and_of_more_nodes() -> None:
    # What comes after it could be inside of its matmul, but for the times.
    fewer = dataclasses.replace(SIMPLE, nodes=SIMPLE.nodes[:5], edges=SIMPLE.edges[:4])
    assert "its nodes from 5 on are not inside of the nodes here" in fails(fewer, TRACE)
    more = (*SIMPLE.nodes, dataclasses.replace(SIMPLE.nodes[5], index=6))
    text = fails(dataclasses.replace(SIMPLE, nodes=more), TRACE)
    assert "its node 6 is sm90_xmma_gemm" in text


def test_a_kernel_that_is_in_no_replay(tmp_path: pathlib.Path) -> None:
    events = [event for event in copy_events() if event.get("name") != "sort_7_1"]
    assert "it has no kernel at node 5, fusion.1" in fails(SIMPLE, write(tmp_path, events))


def test_a_trace_without_replays(tmp_path: pathlib.Path) -> None:
    events = [event for event in copy_events() if not split_id(event)[0]]
    text = fails(SIMPLE, write(tmp_path, events))
    assert "it has no work of CUDA graphs" in text
    assert "call `simple` with these arguments inside of jax.profiler.trace" in text


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"traceEvents": [1]}', b"\x1f\x8b\x00"])
def test_a_broken_file(data: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "host.trace.json.gz"
    path.write_bytes(data)
    assert "is no trace of a profiler" in fails(SIMPLE, path)


def test_a_truncated_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "host.trace.json.gz"
    path.write_bytes(TRACE.read_bytes()[:500])
    assert "is no trace of a profiler" in fails(SIMPLE, path)


def test_paths(tmp_path: pathlib.Path) -> None:
    assert "there is no trace at" in fails(SIMPLE, tmp_path / "nowhere.json.gz")
    assert "has 0 traces" in fails(SIMPLE, tmp_path)
    assert "`path` is 3" in fails(SIMPLE, 3)
    for name in ("a.trace.json.gz", "b.trace.json"):
        (tmp_path / name).write_bytes(b"")
    assert "a.trace.json.gz, b.trace.json" in fails(SIMPLE, tmp_path)


def test_two_executables_that_fit(tmp_path: pathlib.Path) -> None:
    events = copy_events()
    events += [move_to(event, 99) for event in pick(events, IDS["simple"])]
    path = write(tmp_path, events)
    text = fails(SIMPLE, path)
    assert "`simple` may be any of the executable graphs 4 (2 replays), 99 (2 replays)" in text
    assert "pass graph_id=4, if that is the one" in text
    done, nodes = label(SIMPLE, path, tmp_path, graph_id=99)
    assert (done.graph_ids, done.events, len(nodes)) == ((99,), 12, 6)
    assert not any("node" in e["args"] for e in pick(read(tmp_path / "labelled.json"), 4))


@pytest.mark.parametrize(
    ("graph_id", "what"),
    [
        (18, "its node 2 is input_transpose_fusion_1, and loop_slice_fusion here"),
        (5, "no event has it; in the trace are 4 (2 replays), 18 (2 replays), 34 (2 replays)"),
        ((4, 18), "`graph_id` is (4, 18), and `simple` is 1 graphs"),
        ([], "`graph_id` is [], and `simple` is 1 graphs"),
    ],
)
def test_a_graph_id_of_another_graph(graph_id: Any, what: str) -> None:
    assert what in fails(SIMPLE, TRACE, graph_id=graph_id)


def make_two_graphs() -> GraphData:
    """Returns a capture of two graphs: that of `simple`, and a second one after it."""
    count = len(SIMPLE.nodes)
    nodes = [dataclasses.replace(node, index=node.index + count, part=1) for node in SIMPLE.nodes]
    edges = [
        dataclasses.replace(edge, first=edge.first + count, second=edge.second + count)
        for edge in SIMPLE.edges
    ]
    return dataclasses.replace(
        SIMPLE,
        parts=(*SIMPLE.parts, dataclasses.replace(SIMPLE.parts[0], number=1)),
        nodes=(*SIMPLE.nodes, *nodes),
        edges=(*SIMPLE.edges, *edges),
    )


def test_two_graphs_of_one_capture(tmp_path: pathlib.Path) -> None:
    data = make_two_graphs()
    events = copy_events()
    assert "may be any of the executable graphs 4 (2 replays)" in fails(data, TRACE)
    events += [move_to(event, 99) for event in pick(events, IDS["simple"])]
    path = write(tmp_path, events)
    assert "graph_id=(...), one number for each of its 2 graphs" in fails(data, path)
    assert "pass 2 different numbers" in fails(data, path, graph_id=(4, 4))
    done = data.label_trace(path, tmp_path / "out.json", graph_id=(99, 4))
    assert (done.replays, done.events) == (2, 24)
    found = read(tmp_path / "out.json")
    assert {event["args"]["node"] for event in pick(found, 99)} == {*range(6)}
    assert {event["args"]["node"] for event in pick(found, 4)} == {*range(6, 12)}
    kernel = dataclasses.replace(SIMPLE.nodes[1], name="t", index=7, part=1)
    assert kernel.kernel is not None
    kernel = dataclasses.replace(kernel, kernel=dataclasses.replace(kernel.kernel, symbol="t"))
    events = [event | {"name": "t"} if split_id(event) == (99, 1) else event for event in events]
    other = change_node(data, 7, kernel=kernel.kernel)
    assert other.label_trace(write(tmp_path, events)).graph_ids == (4, 99)


def test_without_a_kernel_of_its_own_a_graph_must_be_named(tmp_path: pathlib.Path) -> None:
    data = dataclasses.replace(SIMPLE, nodes=SIMPLE.nodes[:1], edges=())
    events = [event for event in copy_events() if split_id(event) in ((0, 0), (4, 6))]
    for event in pick(events, 4):
        event["args"]["cuda_graph_node_id"] = str((4 << 32) + 1)
    path = write(tmp_path, events)
    assert "it has no kernel of XLA's, whose name would tell" in fails(data, path)
    assert label(data, path, tmp_path, graph_id=4)[1] == {1: 0}
    assert "may be any of the executable graphs 4 (2 replays), 18 (2 replays)" in fails(data, TRACE)
    calls = [event for event in events if not split_id(event)[0]]
    assert "no replay of `simple`" in fails(data, write(tmp_path, calls))


def test_a_capture_without_a_cuda_graph() -> None:
    call = dataclasses.replace(SIMPLE.nodes[1], index=0, kind="call", kernel=None)
    for nodes in ((), (call,)):
        text = fails(dataclasses.replace(SIMPLE, nodes=nodes, edges=()), TRACE)
        assert "`simple` launches no CUDA graph" in text
