"""External events as parts of a graph: a node on a GPU, a call on the host device."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from tracegraph.runtime.definition.nodes import BufferUse, Relocate

# Of the class in ``event.py``, which reaches JAX.
Event: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class EventNode:
    """Records an event, or waits for what was recorded last; touches no memory.

    Attributes:
        name: unique among the regions.
        event: which outlives the graph.
        is_wait: False for a record.
    """

    name: str
    event: Event
    is_wait: bool

    @property
    def kind(self) -> str:
        """As in CUDA's documentation."""
        return "event wait" if self.is_wait else "event record"

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """None: it only keeps others in order."""
        return ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def results(self) -> tuple[str, ...]:
        """None."""
        return ()

    def move(self, relocate: Relocate) -> EventNode:
        """Returns the node itself, which has no byte range to replace."""
        del relocate
        return self


@dataclasses.dataclass(frozen=True)
class HostEvent:
    """The same on the host device: a call without results, behind what its node reads.

    A wait has nothing to do: what was recorded on the host is over.
    """

    event: Event
    is_wait: bool

    def __call__(self) -> None:
        """Takes the time."""
        if not self.is_wait:
            self.event.pass_by()
