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
bytes it may use; inside of a loop the turn before is another node in this sense. A kernel with
other early loads gets full edges, and its wait returns at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tracegraph.runtime.nodes import BufferUse, KernelNode


def find_settled(
    kernels: Iterable[KernelNode],
    order: Sequence[object],
    writes: Iterable[tuple[object, str]],
    places: Mapping[str, range],
) -> frozenset[int]:
    """Returns the kernels that load early what is there, by identity: see Note [Early loads].

    Args:
        kernels: of a program; those without early loads are among the results.
        order: its nodes, each behind those that it waits for, and for a branch or a loop any other
            object; kernels inside of these are not among them.
        writes: nodes or objects of ``order``, and the name of a buffer that each writes into.
        places: the bytes of the arena that each buffer takes.
    """
    turns = {id(each): turn for turn, each in enumerate(order)}
    owners: dict[str, list[object]] = {}
    for owner, name in writes:
        owners.setdefault(name, []).append(owner)

    def is_written(kernel: KernelNode, use: BufferUse) -> bool:
        turn = turns.get(id(kernel), len(turns))
        return any(
            _meets(use, places, places[name])
            and any(each is not kernel and turns[id(each)] < turn for each in writers)
            for name, writers in owners.items()
        )

    return frozenset(
        id(kernel)
        for kernel in kernels
        if not any(is_written(kernel, use) for use in kernel.early_loads)
    )


def _meets(use: BufferUse, places: Mapping[str, range], other: range) -> bool:
    start = places[use.buffer].start + use.offset
    return max(start, other.start) < min(start + use.nbytes, other.stop)
