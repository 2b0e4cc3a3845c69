"""Early loads: what a kernel may read before it waits for the kernels ahead of it.

Note [Early loads]
A kernel that is started early can ask for the weights that it needs while the kernel before it
still runs: that hides most of the time that memory takes to answer. What it reads ahead of its wait
must be there already. It is, if no node of the whole program writes any of those bytes: then it was
there when the graph was launched, as what came before it on its stream had completed by then. A
kernel with other early loads gets full edges, and its wait returns at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tracegraph.runtime.nodes import BufferUse


def find_settled(
    early: Iterable[BufferUse], written: Iterable[str], places: Mapping[str, range]
) -> frozenset[BufferUse]:
    """Returns the early loads of bytes that no node writes, see Note [Early loads].

    Args:
        early: what kernels read before they wait.
        written: names of the buffers that any node writes into.
        places: the bytes of the arena that each buffer takes.

    Example:
        >>> places = {"w": range(0, 64), "y": range(64, 128), "z": range(32, 96)}
        >>> weight = BufferUse("w", 0, 64)
        >>> find_settled([weight], ["y"], places) == {weight}
        True
        >>> find_settled([weight], ["y", "z"], places)
        frozenset()
    """
    taken = [places[name] for name in dict.fromkeys(written)]
    return frozenset(use for use in early if not any(_meets(use, places, each) for each in taken))


def _meets(use: BufferUse, places: Mapping[str, range], other: range) -> bool:
    start = places[use.buffer].start + use.offset
    return max(start, other.start) < min(start + use.nbytes, other.stop)
