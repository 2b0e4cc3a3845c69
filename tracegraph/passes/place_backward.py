"""Places backward ops on the stream of their forward op where JAX's scope has lost it.

JAX names the scopes that are opened inside of the differentiated function. One around the whole of
it, as in ``with tg.stream(s): loss, back = jax.vjp(f, x)``, is not among them. But a backward op
keeps the stack of Python frames of its forward op, so the two are found by it. Where one place in
the source ran on several streams, in a loop, say, the op stays on the stream that called it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from tracegraph.ir.graph import BACKWARD_SCOPE, Graph, Op
from tracegraph.jax_internals import read_frames
from tracegraph.runtime.source_lines import is_user_file
from tracegraph.runtime.streams.stream import SCOPE_PREFIX

_FORWARD_SCOPE = "jvp("


def place_backward(graph: Graph) -> Graph:
    """Returns the graph with its backward ops on the streams of their forward ops.

    Args:
        graph: with calls inlined.
    """
    if not graph.has_streams or not any(_is_unplaced(op) for op in graph.ops):
        return graph
    streams: dict[Hashable, set[int]] = {}
    for op in graph.ops:
        if op.origin.backward_on is None and _FORWARD_SCOPE in op.origin.scope:
            streams.setdefault(_read_place(op), set()).add(op.origin.stream)
    return dataclasses.replace(graph, ops=tuple(_place(op, streams) for op in graph.ops))


def _is_unplaced(op: Op) -> bool:
    inside = op.origin.scope.partition(BACKWARD_SCOPE)[2]
    return op.origin.backward_on is not None and SCOPE_PREFIX not in inside


def _place(op: Op, streams: dict[Hashable, set[int]]) -> Op:
    found = streams.get(_read_place(op), set()) if _is_unplaced(op) else set()
    return _move(op, *found) if len(found) == 1 else op


def _move(op: Op, stream: int) -> Op:
    """Returns the op on another stream, with the bodies that it holds."""
    subgraphs = tuple(
        (key, dataclasses.replace(body, ops=tuple(_move(inner, stream) for inner in body.ops)))
        for key, body in op.subgraphs
    )
    origin = dataclasses.replace(op.origin, stream=stream)
    return dataclasses.replace(op, subgraphs=subgraphs, origin=origin)


def _read_place(op: Op) -> Hashable:
    """Returns the frames that an op was traced in, without those of JAX and ours."""
    context = op.origin.equation_context
    frames = () if context is None else read_frames(context)
    return tuple(frame for frame in frames if is_user_file(frame[0].co_filename))
