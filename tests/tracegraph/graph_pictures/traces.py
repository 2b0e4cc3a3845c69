"""The recorded trace, changed events of it, and what was labelled."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import pathlib
import tempfile
from typing import Any

import pytest

from tests.fakes.trace_recordings import GRAPHS, TRACE
from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.runtime.errors import ConfigError

SIMPLE, BIG, LOOP = (GRAPHS[name] for name in ("simple", "big", "loop"))
IDS = {"simple": 4, "big": 18, "loop": 34}
RECORDED: dict[str, Any] = json.loads(gzip.decompress(TRACE.read_bytes()))


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]


def write(folder: pathlib.Path, events: list[dict[str, Any]]) -> pathlib.Path:
    path = folder / "host.trace.json"
    path.write_text(json.dumps({**RECORDED, "traceEvents": events}))
    return path


def copy_events() -> list[dict[str, Any]]:
    return copy.deepcopy(RECORDED["traceEvents"])


def split_id(event: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of executable graph and node; zeros for other events."""
    return divmod(int(event.get("args", {}).get("cuda_graph_node_id", 0)), 1 << 32)


def pick(events: list[dict[str, Any]], graph_id: int) -> list[dict[str, Any]]:
    return [event for event in events if split_id(event)[0] == graph_id]


def move_to(event: dict[str, Any], graph_id: int) -> dict[str, Any]:
    """Returns the event as one of another executable graph."""
    number = split_id(event)[1]
    arguments = {**event["args"], "cuda_graph_node_id": str((graph_id << 32) + number)}
    return {**event, "args": arguments}


def change_node(data: GraphData, index: int, **changes: Any) -> GraphData:
    nodes = list(data.nodes)
    nodes[index] = dataclasses.replace(nodes[index], **changes)
    return dataclasses.replace(data, nodes=tuple(nodes))


def label(data: GraphData, path: pathlib.Path, tmp_path: pathlib.Path, **named: Any) -> Any:
    """Returns what was labelled, and the node of each event of the graph by the event's number."""
    done = data.label_trace(path, tmp_path / "labelled.json", **named)
    events = [e for i in done.graph_ids for e in pick(read(tmp_path / "labelled.json"), i)]
    nodes = {split_id(event)[1]: event["args"].get("node") for event in events}
    return done, nodes


def fails(data: GraphData, path: Any, **named: Any) -> str:
    """Returns the text of the error; the file is as it was."""
    is_file = isinstance(path, pathlib.Path) and path.is_file()
    before = path.read_bytes() if is_file else b""
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ConfigError) as raised:
        # What wrongly raises nothing must not change the recording.
        data.label_trace(path, pathlib.Path(folder, "out.json") if path == TRACE else None, **named)
    assert raised.value.anchor == "trace-labels"
    assert not is_file or path.read_bytes() == before
    return str(raised.value)
