"""Priorities: kernels on the longest chains of a graph go first when the GPU has to choose.

A train step is a long chain of small kernels, with hundreds of others (an optimizer's, say) beside
it. What runs beside the chain takes room on the GPU, and delays it where the two meet. The slack of
a node is by how many nodes the longest chain through it is shorter than the longest of all; the
less slack, the higher the priority. Priorities change only the order among nodes that are ready,
never the edges. Measured on one H200, step of a GPT of 12 layers, 717 nodes: 1.1 % less time.
"""

from __future__ import annotations

from tracegraph.runtime.graph import Stage


def find_slacks(stage: Stage) -> list[int]:
    """Returns for each node by how much its longest chain is shorter than the longest of all.

    Args:
        stage: its edges lead from earlier nodes to later ones.

    Example:
        >>> from tracegraph.runtime.nodes import BufferUse, FillNode
        >>> nodes = tuple(FillNode(name, BufferUse(name, 0, 4)) for name in "abcd")
        >>> find_slacks(Stage(nodes, ((0, 1), (1, 2), (0, 3))))
        [0, 0, 0, 1]
    """
    count = len(stage.nodes)
    before, after = [0] * count, [0] * count
    edges = sorted(stage.edges)
    for first, second in edges:
        before[second] = max(before[second], before[first] + 1)
    for first, second in reversed(edges):
        after[first] = max(after[first], after[second] + 1)
    chains = [one + other for one, other in zip(before, after, strict=True)]
    longest = max(chains, default=0)
    return [longest - chain for chain in chains]


def find_priorities(stage: Stage, least: int, greatest: int) -> list[int]:
    """Returns a priority for each node: the greatest without slack, one less each time it doubles.

    Args:
        stage: its edges lead from earlier nodes to later ones.
        least: the driver's least priority, the higher number.
        greatest: the driver's greatest priority, the lower number.

    Example:
        >>> find_priorities(Stage((), ()), 0, -5)
        []
    """
    return [min(greatest + (slack + 1).bit_length() - 1, least) for slack in find_slacks(stage)]
