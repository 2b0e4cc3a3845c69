"""Workspaces: the temporaries that CUDA libraries need, as part of a graph's arena."""

from __future__ import annotations

import dataclasses

from tracegraph.runtime.graph import GraphDefinition
from tracegraph.runtime.graph_nodes import list_nested
from tracegraph.runtime.library_nodes import MatmulNode


@dataclasses.dataclass(frozen=True)
class Workspaces:
    """The workspaces of one graph.

    Attributes:
        count: matmuls that have one.
        largest_bytes: of one matmul.
        arena_bytes: bytes of the arena that hold one at some time; matmuls that do not run side by
            side share them, and other temporaries have them before and after.
    """

    count: int
    largest_bytes: int
    arena_bytes: int

    def __str__(self) -> str:
        if not self.count:
            return "no workspace"
        matmuls = "matmul" if self.count == 1 else "matmuls"
        return (
            f"workspace of {self.count} {matmuls}: {self.largest_bytes:,} bytes at most, together "
            f"{self.arena_bytes:,} bytes of the arena"
        )


def measure_workspaces(definition: GraphDefinition) -> Workspaces:
    """Returns what the matmuls of a graph hold as workspace; all of it is in the arena.

    ``CUBLAS_WORKSPACE_CONFIG`` limits it when a capture is lowered.

    Args:
        definition: a lowered capture.
    """
    offsets = {slot.name: slot.offset for slot in definition.slots}
    ranges = [
        (offsets[use.buffer] + use.offset, use.nbytes)
        for stage in definition.stages
        for node in list_nested(stage.nodes)
        if isinstance(node, MatmulNode)
        for role, use in node.operands
        if role == "workspace" and use.nbytes
    ]
    largest_bytes = max((nbytes for _, nbytes in ranges), default=0)
    return Workspaces(len(ranges), largest_bytes, _count_covered(ranges))


def _count_covered(ranges: list[tuple[int, int]]) -> int:
    """Returns how many bytes lie in at least one of some ranges (start, bytes)."""
    covered_bytes = end = 0
    for start, nbytes in sorted(ranges):
        covered_bytes += max(start + nbytes - max(start, end), 0)
        end = max(end, start + nbytes)
    return covered_bytes
