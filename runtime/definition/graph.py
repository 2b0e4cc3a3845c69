"""GraphDefinition: what lowering passes to a device. Nodes, edges and a place for every buffer."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Node
from tracegraph.runtime.definition.nodes import CallNode, CopyNode, FillNode, KernelNode
from tracegraph.runtime.definition.packing import count_packed_bytes
from tracegraph.runtime.memory.sizes import round_exact

# A changed parameter costs half a microsecond, a copy of a small array as much as nine of them.
MAX_PATCHED_NODES = 8


@dataclasses.dataclass(frozen=True)
class BufferSlot:
    """A buffer and its place in the arena.

    Attributes:
        name: unique in its definition.
        offset: bytes from the start of the arena; what is lent is behind its end.
        shape: static shape.
        dtype: NumPy dtype.
        weak_type: JAX's weak type of the value.
        is_resident: True when the value stays from one replay to the next (state, constants).
        content: the bytes of a constant of the compiled program; None for every other buffer.
        is_packed: True where elements of less than a byte share bytes.
        is_lent: True for an input that only kernels read, and that has memory only where a call
            can't have it read in the caller's: Note [Lent inputs] in
            `lowering/planning/lent_inputs.py`.
        is_host: True for a temporary in page-locked host memory: Note [Host memory] in
            `lowering/planning/memory_plan.py`.

    More than six fields because a slot is all that a device knows of a buffer.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False
    is_resident: bool = False
    content: bytes | None = dataclasses.field(default=None, repr=False)
    is_packed: bool = False
    is_lent: bool = False
    is_host: bool = False

    @property
    def is_outside(self) -> bool:
        """True for what has no bytes in the arena."""
        return self.is_lent or self.is_host

    @property
    def nbytes(self) -> int:
        """Bytes of its value."""
        if self.is_packed:
            return count_packed_bytes(self.shape, self.dtype)
        return self.dtype.itemsize * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Nodes that become one graph, or one eager call between two graphs.

    Attributes:
        nodes: in program order.
        edges: pairs of node indices of this stage; the first must finish before the second.
        is_captured: False for eager work, which no graph replays.
        programmatic: those of the edges at which the second kernel may be started early, because
            it waits for the first itself.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    is_captured: bool = True
    programmatic: frozenset[tuple[int, int]] = frozenset()

    @functools.cached_property
    def users(self) -> Mapping[str, Sequence[int]]:
        """The indices of the nodes that name each buffer, in order."""
        users: defaultdict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            # A call takes whole buffers, and names no ranges of them.
            is_call = isinstance(node, CallNode)
            names = (*node.arguments, *node.results) if is_call else [u.buffer for u in node.ranges]
            for name in dict.fromkeys(names):
                users[name].append(index)
        return dict(users)


@dataclasses.dataclass(frozen=True)
class ArenaSize:
    """Bytes of the two parts of an arena, in the order of their offsets.

    Attributes:
        kept_bytes: what holds values between two replays.
        scratch_bytes: what holds nothing between two replays, and is shared in a pool.
    """

    kept_bytes: int
    scratch_bytes: int = 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes that both parts take from a pool in which nothing is free, rounding included.

        Example:
            >>> ArenaSize(1000).reserved_bytes, ArenaSize(1000, 100).reserved_bytes
            (1024, 1536)
        """
        scratch_bytes = round_exact(self.scratch_bytes) if self.scratch_bytes else 0
        return round_exact(self.kept_bytes) + scratch_bytes


@dataclasses.dataclass(frozen=True)
class GraphDefinition:
    """Everything that a device needs to make a capture executable.

    Attributes:
        name: the captured function's name.
        arena_size: of the arena that holds every slot.
        slots: every buffer, with its offset in the arena.
        stages: in order; one for a whole capture, more around eager work.
        inputs: names of the static inputs, in order of the flat arguments, then the constants.
        outputs: names of the buffers that hold the flat results.
    """

    name: str
    arena_size: ArenaSize
    slots: tuple[BufferSlot, ...]
    stages: tuple[Stage, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena."""
        return self.arena_size.kept_bytes + self.arena_size.scratch_bytes

    @property
    def has_scratch_inputs(self) -> bool:
        """True where the bytes of an input hold nothing between two replays."""
        kept_bytes, inputs = self.arena_size.kept_bytes, set(self.inputs)
        return any(
            slot.name in inputs and slot.nbytes > 0 and slot.offset >= kept_bytes
            for slot in self.slots
            if not slot.is_lent
        )

    @property
    def node_count(self) -> int:
        """Nodes of all graphs together."""
        return sum(len(stage.nodes) for stage in self.stages if stage.is_captured)

    @property
    def edge_count(self) -> int:
        """Edges of all graphs together."""
        return sum(len(stage.edges) for stage in self.stages if stage.is_captured)

    def __str__(self) -> str:
        lines = [
            f"graph definition `{self.name}`: nodes {self.node_count}, edges {self.edge_count}, "
            f"arena of {self.arena_bytes:,} bytes"
        ]
        for number, stage in enumerate(self.stages):
            lines.append(f"  stage {number}: {'graph' if stage.is_captured else 'eager'}")
            lines += _format_nodes(stage, "    ")
        return "\n".join(lines)


def _format_nodes(part: Stage | Body, indent: str) -> list[str]:
    """Returns a line for each node, and behind a branch or a loop those of its bodies."""
    lines: list[str] = []
    waits = _group_waits(part)
    for index, node in enumerate(part.nodes):
        lines.append(f"{indent}node {index}: {_format_node(node)}{waits[index]}")
        bodies = node.bodies if isinstance(node, ConditionalNode) else ()
        for number, body in enumerate(bodies):
            lines.append(f"{indent}  body {number}:")
            lines += _format_nodes(body, f"{indent}    ")
    return lines


def _group_waits(stage: Stage | Body) -> list[str]:
    """Returns for each node the nodes that it waits for; ``~`` marks those that it may overtake."""
    waits: list[list[str]] = [[] for _ in stage.nodes]
    for first, second in stage.edges:
        mark = "~" if (first, second) in stage.programmatic else ""
        waits[second].append(f"{first}{mark}")
    return [f"  after {', '.join(firsts)}" if firsts else "" for firsts in waits]


def _format_node(node: Node) -> str:
    text = f"{node.kind} {node.name}({', '.join(node.arguments)}) -> {', '.join(node.results)}"
    if isinstance(node, KernelNode):
        grid, block = node.shape.grid, node.shape.block
        return f"{text}  {format_dims(grid)} blocks of {format_dims(block)} threads"
    if isinstance(node, FillNode):
        return f"{text}  {node.target.nbytes:,} bytes, value {node.value}"
    if isinstance(node, CopyNode):
        return f"{text}  {node.target.nbytes:,} bytes"
    if isinstance(node, ConditionalNode) and node.turn is not None:
        return f"{text}  {node.turn}"
    return text


def format_dims(dims: tuple[int, int, int]) -> str:
    """Returns ``4x2`` for (4, 2, 1)."""
    count = max((i + 1 for i, dim in enumerate(dims) if dim != 1), default=1)
    return "x".join(map(str, dims[:count]))


class UnfinishedBuffer(Protocol):
    """A buffer whose contents may still be computed when a launch has returned."""

    def wait(self) -> None:
        """Waits for them; to be called without the lock."""
        ...


class ReplayClock:
    """Counts the replays of one captured function and serialises access to its arena.

    Attributes:
        generation: number of the last replay that was begun.
        lock: held while the arena is read or written; one for all graphs that share scratch.
        dropped_leaves: how many resident leaves were deleted by others than this graph's replays;
            no tree with such a leaf may be taken for unchanged.
        has_copied: True when an input was copied into the arena since the last launch.
        stage: index of the stage that was launched last.
        unfinished: the buffers whose contents may still be computed after a launch.
    """

    __slots__ = ("dropped_leaves", "generation", "has_copied", "lock", "stage", "unfinished")

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self.generation = 0
        self.dropped_leaves = 0
        self.has_copied = False
        self.stage = 0
        self.unfinished: list[weakref.ref[UnfinishedBuffer]] = []
        self.lock = lock if lock is not None else threading.RLock()

    def wait(self) -> None:
        """Waits for what the last launch computes.

        To be called before the lock is taken to read: what is computed may depend on a callback
        into Python that takes it.
        """
        for reference in self.unfinished:
            buffer = reference()
            if buffer is not None:
                buffer.wait()


class ExecutableGraph(Protocol):
    """An instantiated stage: ready to be launched, bound to fixed addresses."""

    @property
    def launch(self) -> Callable[[], None]:
        """Enqueues every node once."""
        ...

    @property
    def handles(self) -> tuple[int, int] | None:
        """The driver's handles of the graph and the executable graph; None where there are none."""
        ...


class ConsumedBuffer(Protocol):
    """A buffer whose memory a launch consumes, so that a failed launch may lose the value."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def restore(self) -> bool:
        """Makes the buffer usable after a failed launch; True if its value was lost."""
        ...


@dataclasses.dataclass(frozen=True)
class Instance:
    """A graph definition that a device has made executable.

    Attributes:
        stages: one executable graph per stage, to be launched in order.
        takers: for each result that leaves the graph in memory of its own the function that returns
            it, a plain JAX array or an `Array`, once per launch; by the name of its buffer.
        consumed: buffers that a failed launch may lose.
        lock_free_call: computes all results from all inputs and touches no buffer, where the device
            has such a call. It takes the inputs in their order; its one result comes bare, several
            come as a tuple.
        waits: True when a launch may wait for its inputs: a caller waits before it takes the lock.
    """

    stages: tuple[ExecutableGraph, ...]
    takers: Mapping[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    consumed: tuple[ConsumedBuffer, ...] = ()
    lock_free_call: Callable[..., Any] | None = None
    waits: bool = False
