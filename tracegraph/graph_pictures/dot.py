"""`GraphData` → text in the language DOT, for Graphviz and what reads it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.records import NodeData, PartData


def draw_dot(data: GraphData) -> str:
    """Returns a graph as DOT text; critical paths are red, programmatic edges dashed.

    Args:
        data: the graph.
    """
    return "\n".join(["digraph {", *(f"  {line}" for line in _list_lines(data)), "}", ""])


def _list_lines(data: GraphData) -> Iterator[str]:
    yield f"label={_quote(data.name)};"
    yield 'node [shape=box, fontname="sans-serif", fontsize=10];'
    for part in data.parts:
        yield from _list_part(data, part)
    for part in data.parts:
        nodes = data.list_nodes(part.number)
        if part.owner is not None and nodes:
            yield f"n{part.owner} -> n{nodes[0].index} [style=dotted, arrowhead=none];"


def _list_part(data: GraphData, part: PartData) -> Iterator[str]:
    path = data.critical_path(part.number)
    steps = {*itertools.pairwise(path)}
    yield f"subgraph cluster_{part.number} {{"
    yield f"  label={_quote(data.describe_part(part))};"
    for node in data.list_nodes(part.number):
        color = ", color=red" if node.index in path else ""
        yield f"  n{node.index} [label={_quote(_label(node))}{color}];"
        for edge in data.edges_into(node.index):
            style = "dashed" if edge.port == "programmatic" else "solid"
            color = ", color=red" if (edge.first, edge.second) in steps else ""
            yield f"  n{edge.first} -> n{edge.second} [style={style}{color}];"
    yield "}"


def _label(node: NodeData) -> str:
    return f"{node}\n{node.where}".rstrip("\n")


def _quote(text: str) -> str:
    # DOT and JSON agree on quotes, backslashes and line ends.
    return json.dumps(text, ensure_ascii=False)
