"""Workspaces: the temporaries that CUDA libraries need, as part of a graph's arena."""

from __future__ import annotations

import dataclasses

from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.runtime.definition.library_nodes import LibraryCallNode, MatmulNode


@dataclasses.dataclass(frozen=True)
class Workspaces:
    """The workspaces of one graph.

    Attributes:
        count: matmuls, transforms and solves that have one.
        largest_bytes: of one of them.
        arena_bytes: bytes of the arena that hold one at some time; calls that do not run side by
            side share them, and other temporaries have them before and after.
        owner: what they are called: ``matmul`` where all are that.
    """

    count: int
    largest_bytes: int
    arena_bytes: int
    owner: str = "matmul"

    def __str__(self) -> str:
        if not self.count:
            return "no workspace"
        owners = self.owner if self.count == 1 else f"{self.owner}s"
        return (
            f"workspace of {self.count} {owners}: {self.largest_bytes:,} bytes at most, together "
            f"{self.arena_bytes:,} bytes of the arena"
        )


def measure_workspaces(definition: GraphDefinition) -> Workspaces:
    """Returns what the library calls of a graph hold as workspace; all of it is in the arena.

    ``CUBLAS_WORKSPACE_CONFIG`` limits that of matmuls and solves when a capture is lowered.

    Args:
        definition: a lowered capture.
    """
    offsets = {slot.name: slot.offset for slot in definition.slots}
    found = [
        (node.kind, offsets[use.buffer] + use.offset, use.nbytes)
        for stage in definition.stages
        for node in list_nested(stage.nodes)
        if isinstance(node, MatmulNode | LibraryCallNode)
        for role, use in node.operands
        if role == "workspace" and use.nbytes
    ]
    ranges = [(start, nbytes) for _, start, nbytes in found]
    largest_bytes = max((nbytes for _, nbytes in ranges), default=0)
    is_other = any(kind != MatmulNode.kind for kind, _, _ in found)
    owner = "library call" if is_other else MatmulNode.kind
    return Workspaces(len(ranges), largest_bytes, _count_covered(ranges), owner)


def _count_covered(ranges: list[tuple[int, int]]) -> int:
    """Returns how many bytes lie in at least one of some ranges (start, bytes)."""
    covered_bytes = end = 0
    for start, nbytes in sorted(ranges):
        covered_bytes += max(start + nbytes - max(start, end), 0)
        end = max(end, start + nbytes)
    return covered_bytes
