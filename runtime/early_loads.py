"""Early loads: what a kernel may read before it waits for the kernels ahead of it.

Note [Early loads]
A kernel that is started early can ask for the weights that it needs while the kernel before it
still runs: that hides most of the time that memory takes to answer. What it reads ahead of its wait
must be there already. It is, if no other node of the whole program writes any of those bytes: then
it was there when the graph was launched, as what came before it on its stream had completed by
then. A kernel that writes into what it has loaded early, as the one that adds a position to a
cache, does so after its wait, and knows itself which of the bytes it may use; inside of a loop the
turn before is another node in this sense. A kernel with other early loads gets full edges, and its
wait returns at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tracegraph.runtime.nodes import BufferUse, KernelNode


def find_settled(
    kernels: Iterable[KernelNode],
    writes: Iterable[tuple[object, str]],
    places: Mapping[str, range],
) -> frozenset[int]:
    """Returns the kernels that load early what is there, by identity: see Note [Early loads].

    Args:
        kernels: of a program; those without early loads are among the results.
        writes: nodes, and the name of a buffer that each writes into; for what a branch or a loop
            writes, any other object.
        places: the bytes of the arena that each buffer takes.
    """
    owners: dict[str, list[object]] = {}
    for owner, name in writes:
        owners.setdefault(name, []).append(owner)
    return frozenset(
        id(kernel)
        for kernel in kernels
        if not any(_is_written(use, kernel, owners, places) for use in kernel.early_loads)
    )


def _is_written(
    use: BufferUse,
    kernel: KernelNode,
    owners: Mapping[str, list[object]],
    places: Mapping[str, range],
) -> bool:
    """True if another node than a kernel writes into bytes that it loads."""
    return any(
        any(writer is not kernel for writer in writers)
        for name, writers in owners.items()
        if _meets(use, places, places[name])
    )


def _meets(use: BufferUse, places: Mapping[str, range], other: range) -> bool:
    start = places[use.buffer].start + use.offset
    return max(start, other.start) < min(start + use.nbytes, other.stop)
