"""What may follow a read is loaded while the device still computes what is read.

Note [Loading ahead]
Between a value that Python waits for and the next kernel, the host looks at the arguments of the
next part and points its graph at them. In the step of `benchmarks/graphed_callables.py` that took
60 of the 80 us between the value and the launch, by the clock of an H200's host. Before the value
is there the host only waits. What may follow is known by then: the parts that followed before. They
are loaded, the most frequent first, until the value is there, and the one that follows is only
launched. What is loaded holds no lock. It is loaded again if the graph, or one that shares its
state, was called in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from tracegraph.breaks.node import LoadedPart, PartNode, Read
from tracegraph.runtime.arrays.array import Array, ArrayState

LoadedNodes: TypeAlias = dict[PartNode, LoadedPart]


def begin_read(levels: Sequence[Sequence[Any]], read: Read) -> Array | None:
    """Begins to copy what is read to the host; returns it, or None where that takes no time."""
    level, place = read.source
    value = levels[level][place]
    if type(value) is not Array or value.state is not ArrayState.FRESH or read.kind == "array":
        return None
    value.copy_to_host_async()
    return value


def load_parts(
    loaded: LoadedNodes,
    nodes: Sequence[PartNode],
    levels: Sequence[Sequence[Any]],
    donated: Sequence[Any],
    value: Array,
) -> None:
    """Loads the parts that may follow a read, see Note [Loading ahead].

    Args:
        loaded: gets those that could be loaded.
        nodes: that followed before, the most frequent first.
        levels: the values so far.
        donated: the trees of the donated arguments, for a last part.
        value: that is read; once it is there, nothing more is loaded.
    """
    for node in nodes:
        if value.is_ready():
            return
        if node.part is None:
            continue
        part = node.part.load(levels, donated if node.read is None else ())
        if part is not None:
            loaded[node] = part


def drop_parts(loaded: LoadedNodes) -> None:
    """Forgets what was loaded and is not called."""
    while loaded:
        _, part = loaded.popitem()
        part.graph.ahead.drop(part.args)
