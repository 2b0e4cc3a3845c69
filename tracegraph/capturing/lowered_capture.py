"""LoweredCapture: a function lowered for one signature, before any memory is taken."""

from __future__ import annotations

from collections.abc import Callable

from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.planning.memory_plan import MemoryPlan
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.tracing.checked_graph import CheckedGraph


class LoweredCapture:
    """A function lowered for one signature: everything is known, nothing is allocated.

    Attributes:
        checked: the traced and optimised graph.
        lowered: device program, memory plan and graph definition.
    """

    def __init__(
        self,
        checked: CheckedGraph,
        lowered: Lowered,
        instantiate: Callable[[CheckedGraph, Lowered], CapturedGraph],
    ) -> None:
        self.checked, self.lowered, self._instantiate = checked, lowered, instantiate

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan."""
        return self.lowered.plan

    @property
    def pool_bytes(self) -> int:
        """Bytes that the graph takes from the device, known before the first run.

        That is what a pool of its own reserves, to the byte. In a shared pool it is less where a
        part finds room: scratch in that of another graph, or anything in what dropped graphs left.
        Allocators without a cache do not round.
        """
        return self.lowered.definition.arena_size.reserved_bytes

    def instantiate(self) -> CapturedGraph:
        """Allocates the arena and returns the graph; it is called like the function.

        Raises:
            OutOfMemoryError: the pool cannot hold the arena.
        """
        return self._instantiate(self.checked, self.lowered)

    def __str__(self) -> str:
        return f"{self.lowered.definition}\n\n{self.lowered.plan}"
