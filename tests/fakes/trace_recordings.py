"""Graphs and a trace of their replays, as `tests/data/traces/record.py` has written them."""

from __future__ import annotations

import json
from typing import Any

from tests.paths import DATA
from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.records import EdgeData, KernelData, NodeData, PartData
from tracegraph.runtime.definition.nodes import BufferUse

FOLDER = DATA / "traces"
TRACE = FOLDER / "replays.trace.json.gz"


def read_graph_data(found: dict[str, Any]) -> GraphData:
    """Returns the records of which `dataclasses.asdict` made plain values and JSON lists."""
    nodes = [_read_node(node) for node in found["nodes"]]
    parts = [PartData(**part) for part in found["parts"]]
    edges = [EdgeData(**edge) for edge in found["edges"]]
    return GraphData(found["name"], tuple(parts), tuple(nodes), tuple(edges), ())


def _read_node(found: dict[str, Any]) -> NodeData:
    kernel = found["kernel"]
    if kernel is not None:
        dims = {key: tuple(kernel[key]) for key in ("grid", "block", "cluster")}
        kernel = KernelData(**{**kernel, **dims})
    reads, writes = (tuple(BufferUse(*use) for use in found[key]) for key in ("reads", "writes"))
    return NodeData(**{**found, "kernel": kernel, "reads": reads, "writes": writes})


GRAPHS = {
    name: read_graph_data(found)
    for name, found in json.loads((FOLDER / "graphs.json").read_text()).items()
}
