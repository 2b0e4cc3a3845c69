"""Nodes that hold nodes, and what each kind of graph may hold."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from tracegraph.runtime.definition.collective_nodes import (
    CollectiveNode,
    JointCollectiveNode,
    NumberNode,
)
from tracegraph.runtime.definition.event_nodes import EventNode
from tracegraph.runtime.definition.library_nodes import (
    CudnnNode,
    FfiCallNode,
    LibraryCallNode,
    MatmulNode,
)
from tracegraph.runtime.definition.nodes import BufferUse, CallNode, CopyNode, FillNode, KernelNode

DeviceNode: TypeAlias = (
    KernelNode
    | CopyNode
    | FillNode
    | MatmulNode
    | FfiCallNode
    | LibraryCallNode
    | CudnnNode
    | EventNode
    | CollectiveNode
    | JointCollectiveNode
    | NumberNode
)


class Construct(enum.Enum):
    """What a conditional node does with the value of its handle; the names are CUDA's."""

    IF = "if"  # runs the first body if it is not 0, else the second
    WHILE = "while"  # runs its body as long as it is not 0
    SWITCH = "switch"  # runs the body of that number


class Turn(NamedTuple):
    """What one turn of a loop does.

    Attributes:
        iterations: how many of XLA's loop.
        is_guarded: True where the loop may end before the last of them.
    """

    iterations: int
    is_guarded: bool = False

    def __str__(self) -> str:
        guarded = " guarded" * self.is_guarded
        return f"{self.iterations}{guarded} iteration{'s' * (self.iterations > 1)} per turn"


@dataclasses.dataclass(frozen=True)
class Body:
    """The nodes inside of a conditional node, and their order.

    Attributes:
        nodes: in program order.
        edges: pairs of node indices; the first must finish before the second.
        programmatic: those of the edges at which the second kernel may be started early.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]
    programmatic: frozenset[tuple[int, int]] = frozenset()


@dataclasses.dataclass(frozen=True)
class ConditionalNode:
    """Runs one of its bodies, or its only body again and again, as the device decides.

    Attributes:
        name: of the instruction that it computes.
        construct: how the value of its handle is used.
        bodies: in the order of their numbers.
        setter: the kernel that sets the handle, launched right before the node. What a loop does
            next, its body sets.
        turn: what one turn of a loop does.
    """

    name: str
    construct: Construct
    bodies: tuple[Body, ...]
    setter: KernelNode
    turn: Turn | None = None

    @property
    def kind(self) -> str:
        """CUDA's word for the construct."""
        return self.construct.value

    @functools.cached_property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it or a node inside of it names."""
        return tuple(dict.fromkeys(use for node in self._list_inner() for use in node.ranges))

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the buffers that nodes inside of it read, or may read, each once."""
        return tuple(dict.fromkeys(name for node in self._list_inner() for name in node.arguments))

    @functools.cached_property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that nodes inside of it write, each once."""
        return tuple(dict.fromkeys(name for node in self._list_inner() for name in node.results))

    def _list_inner(self) -> list[GraphNode]:
        return [self.setter, *(node for body in self.bodies for node in body.nodes)]


# What a CUDA graph holds.
GraphNode: TypeAlias = DeviceNode | ConditionalNode
Node: TypeAlias = CallNode | GraphNode


def list_nested(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yields nodes, each followed by those inside of it, setters included.

    Example:
        >>> fill = FillNode("zero", BufferUse("a", 0, 8))
        >>> code, shape = KernelCode("set", b""), LaunchShape((1, 1, 1), (1, 1, 1))
        >>> setter = KernelNode("set", code, shape, (ConditionHandle.OWN,), (False,))
        >>> loop = ConditionalNode("loop", Construct.WHILE, (Body((fill,), ()),), setter)
        >>> [node.kind for node in list_nested([loop])]
        ['while', 'kernel', 'memset']
    """
    for node in nodes:
        yield node
        if isinstance(node, ConditionalNode):
            yield from list_nested(node._list_inner())
