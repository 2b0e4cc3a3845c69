"""Hooks that write files: what a graph consists of, when it has become executable."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable

from tracegraph.graph_pictures.dump import find_drawer
from tracegraph.recording.cuda_graph import CUDAGraph


def export_dot(path: str | os.PathLike[str]) -> Callable[[CUDAGraph], None]:
    """Returns a hook that draws a graph into a file.

    Args:
        path: ends in ``.dot`` for Graphviz, or in ``.svg`` for a picture. Each graph that the hook
            is called with replaces the file.

    Returns:
        For ``g.register_post_instantiate_hook``, `tg.register_graph_instantiate_hook` and the like.

    Raises:
        ConfigError: the path ends in something else.

    Example:
        >>> import os, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "graph.dot"
        >>> g = tg.CUDAGraph()
        >>> handle = g.register_post_instantiate_hook(tg.export_dot(path))
        >>> with tg.graph(g):
        ...     y = jnp.arange(3) + 1
        >>> print(path.read_text().splitlines()[0])
        digraph {
    """
    find_drawer(path)

    def export(graph: CUDAGraph) -> None:
        graph.debug_dump(path)

    return export


def export_graph_data(path: str | os.PathLike[str]) -> Callable[[CUDAGraph], None]:
    """Returns a hook that writes the records of ``get_graph_data()`` into a file, as JSON.

    Args:
        path: of the file. Each graph that the hook is called with replaces it.

    Returns:
        For ``g.register_post_instantiate_hook``, `tg.register_graph_instantiate_hook` and the like.
    """

    def export(graph: CUDAGraph) -> None:
        text = json.dumps(dataclasses.asdict(graph.get_graph_data()), indent=1)
        pathlib.Path(path).write_text(text, "utf-8")

    return export
