"""Early loads: what a kernel may read before it waits for the kernels ahead of it.

Note [Early loads]
A kernel that is started early can ask for the weights that it needs while the kernel before it
still runs: that hides most of the time that memory takes to answer. What it reads ahead of its wait
must be there already. It is, if no node ahead of it writes any of those bytes: then it was there
when the graph was launched, as what came before it on its stream had completed by then. A node
behind it may write them, as the optimizer does with weights: it waits until the kernel has ended,
as for any bytes that are read before they are overwritten. Inside of a branch or a loop no node at
all may, for the turn before is ahead of each. A kernel that writes into what it has loaded early,
as the one that adds a position to a cache, does so after its wait, and knows itself which of the
bytes it may use; inside of a loop the turn before is another node in this sense.

Nor does a node matter that has completed by the time when the kernel is started. It is started when
each node with an edge to it has completed or, by a programmatic edge, has at least begun; and what
has a full edge has begun only when all that it comes after had completed. So behind a full edge all
that comes before it is there: the first iteration of a loop waits for a matrix that is cut out
ahead of the loop, and the others are started early. A kernel with other early loads gets full
edges, and its wait returns at once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

from tracegraph.runtime.definition.nodes import BufferUse, KernelNode


def find_settled(writers: Mapping[int, Collection[int]]) -> frozenset[int]:
    """Returns the kernels that load early what is there when the graph is launched, by identity.

    Args:
        writers: see `find_writers`.
    """
    return frozenset(kernel for kernel, found in writers.items() if not found)


def find_writers(
    kernels: Iterable[KernelNode],
    order: Sequence[object],
    writes: Iterable[tuple[object, str]],
    places: Mapping[str, range],
) -> dict[int, frozenset[int]]:
    """Returns for each kernel the nodes ahead of it that write what it loads early, by identity.

    Args:
        kernels: of a program; those without early loads are among the results.
        order: its nodes, each behind those that it waits for, and for a branch or a loop any other
            object; kernels inside of these are not among them.
        writes: nodes or objects of ``order``, and the name of a buffer that each writes into.
        places: the bytes of the arena that each buffer takes.
    """
    turns = {id(each): turn for turn, each in enumerate(order)}
    owners: dict[str, set[int]] = {}
    for owner, name in writes:
        owners.setdefault(name, set()).add(id(owner))

    # Kernels of one loop load the same weights.
    @functools.cache
    def list_owners(use: BufferUse) -> set[int]:
        met = (found for name, found in owners.items() if _meets(use, places, places[name]))
        return set().union(*met)

    def find_ahead(kernel: KernelNode) -> frozenset[int]:
        if not kernel.early_loads:
            return frozenset()
        turn = turns.get(id(kernel), len(turns))
        found = set().union(*map(list_owners, kernel.early_loads)) - {id(kernel)}
        return frozenset(each for each in found if turns[each] < turn)

    return {id(kernel): find_ahead(kernel) for kernel in kernels}


class CompletedNodes:
    """Which nodes of a graph have completed by the time when each of them starts, as bits.

    Nodes are added one after the other, each behind those that it waits for. Of one that was not
    added nothing is known.

    Args:
        edges: pairs of nodes, by their numbers.
    """

    def __init__(self, edges: Iterable[tuple[int, int]]) -> None:
        self._ahead: dict[int, list[int]] = {}
        for first, second in edges:
            self._ahead.setdefault(second, []).append(first)
        self._at_start: dict[int, int] = {}
        self._at_end: dict[int, int] = {}

    def list_ahead(self, node: int) -> list[int]:
        """Returns the nodes that have an edge to a node."""
        return self._ahead.get(node, [])

    def find(self, node: int, programmatic: Collection[int]) -> int:
        """Returns what has completed when a node starts.

        Args:
            node: whose nodes ahead were added.
            programmatic: those of them whose edges to it are programmatic.
        """
        found = 0
        for first in self.list_ahead(node):
            known = self._at_start if first in programmatic else self._at_end
            found |= known.get(first, 0)
        return found

    def add(self, node: int, programmatic: Collection[int]) -> None:
        """Adds a node; for the arguments see `find`."""
        self._at_start[node] = self.find(node, programmatic)
        self._at_end[node] = self.find(node, ()) | 1 << node


def _meets(use: BufferUse, places: Mapping[str, range], other: range) -> bool:
    start = places[use.buffer].start + use.offset
    return max(start, other.start) < min(start + use.nbytes, other.stop)
