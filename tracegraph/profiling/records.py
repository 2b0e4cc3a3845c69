"""The records of a profile: nodes, parts and lines with their times."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class NodeProfile:
    """A node with its time, when nothing runs beside it.

    More than six fields because it is all that is known of a node.

    Attributes:
        index: its place in the graph, as in `get_graph_data`.
        part: the number of the part that it is in.
        kind: as ``kernel``, ``memcpy``, ``matmul``, ``while``, ``call``.
        name: of XLA's instruction, or of the region.
        where: the user's lines that it computes, as far as they are known.
        scope: JAX's name stack, as ``jit(step)/layer/dot_general``.
        stream: number of the stream that its region was traced on.
        warm_us: microseconds with its bytes in the caches; None if it was not timed.
        cold_us: microseconds with other bytes in the caches; None if that was not measured.
        start_us: when it may start, counted from the start of its part.
        is_critical: on the critical path of its part.
        nbytes: of the ranges that it names, read and written; it may touch less.
        memory_share: these bytes in the cold time, of the memory's rate; None if not known.
        operations: of a matmul: multiplications and additions; 0 of others.
        tensor_share: these operations in the warm time, of the peak of the tensor cores; None if
            not known.
        measured: index of the node whose time it has: itself, or the first of the same launch.
        note: how it was timed if in another way than most, or why it was not.
    """

    index: int
    part: int
    kind: str
    name: str
    where: str = ""
    scope: str = ""
    stream: int = 0
    warm_us: float | None = None
    cold_us: float | None = None
    start_us: float = 0.0
    is_critical: bool = False
    nbytes: int = 0
    memory_share: float | None = None
    operations: int = 0
    tensor_share: float | None = None
    measured: int = 0
    note: str = ""

    def __str__(self) -> str:
        parts = [f"{self.index}: {self.kind} {self.name}"]
        if self.warm_us is not None:
            parts.append(f"{self.warm_us:.2f} us warm")
        if self.cold_us is not None:
            parts.append(f"{self.cold_us:.2f} us cold")
        parts.append(f"{self.nbytes:,} bytes")
        parts += [f"{self.memory_share:.0%} of the memory's rate"] if self.memory_share else []
        parts += [f"{self.tensor_share:.0%} of the tensor cores"] if self.tensor_share else []
        parts += ["critical"] * self.is_critical
        parts += [each for each in (self.note, self.where, self.scope) if each]
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class PartProfile:
    """A graph, an eager part, or the body of a branch or loop.

    More than six fields because a part is what the times of its nodes are held against.

    Attributes:
        number: as in `get_graph_data`.
        kind: ``graph``, ``eager`` or ``body``.
        title: what a report calls it.
        whole_us: microseconds of one launch; None of a body.
        path: the critical path: the longest chain of nodes by their warm times.
        path_us: the warm times along it.
        node_us: the warm times of all its nodes.
        node_count: how many nodes it has.
    """

    number: int
    kind: str
    title: str
    whole_us: float | None
    path: tuple[int, ...]
    path_us: float
    node_us: float
    node_count: int

    @property
    def beside_us(self) -> float:
        """The warm times of the nodes that are not on the critical path."""
        return max(self.node_us - self.path_us, 0.0)


@dataclasses.dataclass(frozen=True)
class LineProfile:
    """What one line of the user computes.

    More than six fields because it is a row of the table of `Profile.by_line`.

    Attributes:
        where: the line, or several of a fused kernel; empty where nothing tells.
        node_count: how many nodes compute it; those inside of loops are not counted.
        path_count: how many of them are on a critical path.
        warm_us: of all its nodes.
        path_us: of those on a critical path.
        cold_us: of all its nodes, their warm time where that is all that is known; None on the
            host device.
        nbytes: of all its nodes.
        memory_share: these bytes in the cold time, of the memory's rate; None if not known.
    """

    where: str
    node_count: int
    path_count: int
    warm_us: float
    path_us: float
    cold_us: float | None
    nbytes: int
    memory_share: float | None = None
