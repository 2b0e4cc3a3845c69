"""Labels in a recorded trace of three graphs: events with their nodes, and rows of scopes."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

import pytest

from tests.fakes.trace_recordings import GRAPHS, TRACE
from tests.tracegraph.graph_pictures.traces import (
    BIG,
    IDS,
    SIMPLE,
    change_node,
    copy_events,
    label,
    pick,
    read,
    split_id,
    write,
)
from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.trace_rows import split_scope


@pytest.mark.parametrize("data", GRAPHS.values(), ids=GRAPHS.keys())
def test_each_event_has_its_node(data: GraphData, tmp_path: pathlib.Path) -> None:
    done = data.label_trace(TRACE, tmp_path / "out.json.gz")
    assert (done.graph_ids, done.replays, done.unlabelled) == ((IDS[data.name],), 2, 0)
    events = read(tmp_path / "out.json.gz")
    own = pick(events, IDS[data.name])
    assert done.events == len(own) > 10
    for event in own:
        node = data.nodes[event["args"]["node"]]
        assert event["args"]["bytes"] == node.nbytes
        assert event["args"].get("where", "") == node.where
        assert event["args"].get("scope", "") == node.scope
        assert node.kernel is None or node.kernel.symbol == event["name"]
    others = [event for event in events if split_id(event)[0] not in (0, IDS[data.name])]
    assert others
    assert not any("node" in event["args"] for event in others)


def test_rows_of_scopes(tmp_path: pathlib.Path) -> None:
    BIG.label_trace(TRACE, tmp_path / "out.json")
    events = read(tmp_path / "out.json")
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name"
    }
    rows = {names[key]: key for key in names if names[key].startswith("scopes of `big` on Stream")}
    assert len(names) == len({*names.values()}) == len(rows) + 6
    slices = {
        title.partition("#")[2]: [
            (event["name"], event["args"]["scope"])
            for event in events
            if event.get("ph") == "X" and (event["pid"], event["tid"]) == key
        ]
        for title, key in rows.items()
    }
    each = [(name, name) for name in ("one", "two", "three")]
    assert slices == {"14(Memset,MemcpyD2D,Compute)": each * 2, "74(Compute)": each[2:] * 2}


def test_nested_slices_lie_in_one_another(tmp_path: pathlib.Path) -> None:
    scopes = ["a/b", "a/b", "a/c", "", "a/c/d", "a/c/d"]
    data = SIMPLE
    for index, scope in enumerate(scopes):
        data = change_node(data, index, scope=f"jit(f)/{scope}/add" if scope else "")
    data.label_trace(TRACE, tmp_path / "out.json")
    slices = [
        (round(event["ts"] * 1000), -round(event["dur"] * 1000), event["args"]["scope"])
        for event in read(tmp_path / "out.json")
        if event.get("ph") == "X" and "correlation_id" not in event["args"]
    ]
    slices.sort()
    assert [path for *_, path in slices] == ["a", "a/b", "a/c", "a", "a/c", "a/c/d"] * 2
    for (start, duration, _), (later, other, _) in itertools.combinations(slices, 2):
        assert later >= start - duration or later - other <= start - duration


def test_a_slice_lasts_as_long_as_what_ends_last(tmp_path: pathlib.Path) -> None:
    events = copy_events()
    (first, _) = [event for event in pick(events, 4) if event["name"] == "loop_add_fusion"]
    first["dur"] = 100.0
    SIMPLE.label_trace(write(tmp_path, events), tmp_path / "out.json")
    slices = [event for event in read(tmp_path / "out.json") if event.get("name") == "decoder"]
    assert [event["dur"] for event in slices] == [100.0, 46.721]


def test_a_trace_is_replaced_and_may_be_labelled_again(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "plugins" / "profile"
    folder.mkdir(parents=True)
    path = folder / "host.trace.json.gz"
    path.write_bytes(TRACE.read_bytes())
    assert SIMPLE.label_trace(tmp_path).path == str(path)
    once = read(path)
    assert SIMPLE.label_trace(str(path)) == SIMPLE.label_trace(path)
    assert read(path) == once
    BIG.label_trace(path)
    titles = [e["args"]["name"] for e in read(path) if e.get("name") == "thread_name"]
    assert [sum(f"`{name}`" in title for title in titles) for name in IDS] == [1, 2, 0]
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize(
    ("scope", "parts"),
    [
        ("jit(region0)/layer/head/dot_general", ("layer", "head")),
        ("jit(f)/transpose(jvp(a/b))/mul", ("transpose(jvp(a/b))",)),
        ("layer/add", ("layer",)),
        ("jit(f)/add", ()),
        ("add", ()),
        ("", ()),
    ],
)
def test_scopes(scope: str, parts: tuple[str, ...]) -> None:
    assert split_scope(scope) == parts


def test_a_kernel_of_cpp_has_its_demangled_name(tmp_path: pathlib.Path) -> None:
    events = copy_events()
    for event in pick(events, IDS["simple"]):
        if event["name"] == "wrapped_tanh":
            event["name"] = "void ns::tanh<4>(float*)"
    assert SIMPLE.nodes[1].kernel is not None
    kernel = dataclasses.replace(SIMPLE.nodes[1].kernel, symbol="_ZN2ns4tanhILi4EEEvPf")
    data = change_node(SIMPLE, 1, kernel=kernel)
    assert label(data, write(tmp_path, events), tmp_path)[0].events == 12
