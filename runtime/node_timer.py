"""What a device measures for a profile: each node at its place in a replay, on bytes of its own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.definition.graph import ExecutableGraph, GraphDefinition, ReplayClock
from tracegraph.runtime.definition.graph_nodes import Node
from tracegraph.runtime.definition.nodes import BufferUse


@dataclasses.dataclass(frozen=True)
class TimedGraph:
    """An instance of a graph that is there to be timed; no user has results in it.

    Attributes:
        definition: what is timed.
        arena: where its buffers are.
        buffers: by name, filled with the arguments.
        stages: the executable graphs and the eager calls between them.
        clock: of its replays.
        saved_bytes: the most bytes that one of its nodes writes.
    """

    definition: GraphDefinition
    arena: Arena
    buffers: Mapping[str, Any]
    stages: Sequence[ExecutableGraph]
    clock: ReplayClock
    saved_bytes: int


@dataclasses.dataclass(frozen=True)
class NodeTime:
    """How long a node takes when nothing runs beside it.

    Attributes:
        warm_us: microseconds with what it touches in the caches as far as it fits; None if it was
            not timed.
        cold_us: microseconds after the caches were filled with other bytes; None where that was not
            measured.
        note: how it was timed if in another way than most, or why it was not.
    """

    warm_us: float | None
    cold_us: float | None = None
    note: str = ""


class NodeTimer(Protocol):
    """Times the nodes of one graph, one after another in their order.

    It follows the replay: when a node is timed, all nodes before it have run once, and afterwards
    its results are those of one run. So each node gets the values that it gets in a replay.
    """

    @property
    def floor_us(self) -> float | None:
        """What a node that does nothing takes in a chain; None where that has no meaning."""
        ...

    def time_stage(self, index: int) -> float:
        """Returns the microseconds of one launch of a stage, on what is in the buffers."""
        ...

    def start(self) -> None:
        """Begins with the first node: the arguments have just been copied into the buffers."""
        ...

    def time(self, node: Node, written: Sequence[BufferUse], *, is_captured: bool) -> NodeTime:
        """Times the next node, and leaves what one run of it leaves.

        Args:
            node: of a stage, or of a body inside `visit`.
            written: the byte ranges that it writes.
            is_captured: False for eager work, which runs once only.
        """
        ...

    def run(self, node: Node) -> None:
        """Runs the next node, a captured one, without timing it."""
        ...

    def visit(self, written: Sequence[BufferUse]) -> contextlib.AbstractContextManager[None]:
        """Returns a block in which nodes inside a branch or a loop are timed.

        Args:
            written: what they write; it is as before when the block ends.
        """
        ...
