"""Captures → `GraphData`, and `GraphData` → files."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

from tracegraph.graph_pictures.dot import draw_dot
from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.lines import NodeLines, find_buffer_lines
from tracegraph.graph_pictures.read_graph import read_graph
from tracegraph.graph_pictures.svg import draw_svg
from tracegraph.lowering.lower import Lowered
from tracegraph.runtime.errors import ConfigError
from tracegraph.tracing.checked_graph import CheckedGraph

_DRAWERS: dict[str, Callable[[GraphData], str]] = {".dot": draw_dot, ".svg": draw_svg}


def describe_graph(checked: CheckedGraph, lowered: Lowered) -> GraphData:
    """Returns what was captured, as records; needs no device.

    Args:
        checked: the traced graph.
        lowered: its lowering.
    """
    buffer_lines = find_buffer_lines(checked)
    lines = NodeLines(checked, lowered, buffer_lines)
    return read_graph(
        lowered.definition, lines.find, buffer_lines, lambda node: lines.find_place(node)[0]
    )


def find_drawer(path: str | os.PathLike[str]) -> Callable[[GraphData], str]:
    """Returns what draws a file of this name.

    Args:
        path: ends in ``.dot`` or ``.svg``.

    Raises:
        ConfigError: it ends in something else, or is no path.
    """
    is_path = isinstance(path, str | os.PathLike)
    drawer = _DRAWERS.get(pathlib.Path(path).suffix.lower()) if is_path else None
    if drawer is not None:
        return drawer
    raise ConfigError(
        f"`path` is {(os.fspath(path) if is_path else path)!r}",
        where="argument `path` of debug_dump",
        why="the end of the name says what is written: .dot for Graphviz, .svg for a picture",
        fix='pass a name like "graph.svg" or "graph.dot"',
        anchor="config",
    )
