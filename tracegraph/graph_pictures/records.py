"""GraphData: the nodes, edges and buffers of a captured graph, as records."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from tracegraph.runtime.nodes import BufferUse

# What reading a node takes beside its work, in bytes that an H200 moves in that time.
NODE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class KernelData:
    """What a kernel node launches.

    Attributes:
        symbol: the kernel's name in its image.
        grid: blocks in x, y and z.
        block: threads of a block in x, y and z.
        cluster: blocks of a cluster in x, y and z.
        shared_bytes: dynamic shared memory of a block.
    """

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class BufferData:
    """A buffer that nodes read and write.

    Attributes:
        name: unique in its graph.
        shape: of its value.
        dtype: NumPy's name of it; temporaries of XLA are bytes.
        nbytes: of its value.
        offset: bytes from the start of the arena.
        where: the user's line that makes the value, or an empty text.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    offset: int
    where: str = ""


@dataclasses.dataclass(frozen=True)
class NodeData:
    """A node.

    More than six fields because a node is all that a tool may want to know of it.

    Attributes:
        index: its place in `GraphData.nodes`.
        part: the number of the part that it is in.
        kind: what it does: ``kernel``, ``memcpy``, ``memset``, the name of a library's call as
            ``matmul``, ``if``, ``while``, ``switch``, or ``call`` of a compiled region.
        name: of XLA's instruction, or of the region.
        where: the user's lines that it computes, as far as they are known.
        kernel: what it launches, if it is a kernel.
        reads: the byte ranges that it only reads.
        writes: those that it writes; it may read them too.
    """

    index: int
    part: int
    kind: str
    name: str
    where: str
    kernel: KernelData | None
    reads: tuple[BufferUse, ...]
    writes: tuple[BufferUse, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it reads and writes."""
        return sum(use.nbytes for use in (*self.reads, *self.writes))

    def __str__(self) -> str:
        text = f"{self.index}: {self.kind} {self.name}"
        if self.kernel is not None and self.kernel.symbol != self.name:
            text += f" ({self.kernel.symbol})"
        if self.kernel is not None:
            grid, block = (_format_dims(each) for each in (self.kernel.grid, self.kernel.block))
            text += f", {grid} blocks of {block} threads"
        return f"{text}, {self.nbytes:,} bytes"


@dataclasses.dataclass(frozen=True)
class EdgeData:
    """An edge: the first node must finish before the second.

    Attributes:
        first: index of a node.
        second: index of another one of the same part.
        port: ``complete``, or ``programmatic`` where the second kernel may be started before the
            first has ended, and waits for it itself.
    """

    first: int
    second: int
    port: str = "complete"


@dataclasses.dataclass(frozen=True)
class PartData:
    """What nodes and edges are together in: a graph, an eager part, or the body of a node.

    Attributes:
        number: its place in `GraphData.parts`.
        kind: ``graph``, ``eager`` or ``body``.
        owner: of a body, the index of the branch or loop that it is in.
        body: of a body, its number there.
    """

    number: int
    kind: str
    owner: int | None = None
    body: int = 0


@dataclasses.dataclass(frozen=True)
class GraphData:
    """A captured graph.

    Attributes:
        name: of the captured function.
        parts: graphs and eager parts in the order in which they run, each followed by the bodies
            of its branches and loops.
        nodes: in program order, part by part.
        edges: of all parts.
        buffers: by place in the arena.
    """

    name: str
    parts: tuple[PartData, ...]
    nodes: tuple[NodeData, ...]
    edges: tuple[EdgeData, ...]
    buffers: tuple[BufferData, ...]

    def list_nodes(self, part: int) -> list[NodeData]:
        """Returns the nodes of a part."""
        return [node for node in self.nodes if node.part == part]

    def dependencies(self, index: int) -> tuple[int, ...]:
        """Returns the indices of the nodes that a node waits for."""
        return tuple(edge.first for edge in self._into[index])

    def dependents(self, index: int) -> tuple[int, ...]:
        """Returns the indices of the nodes that wait for a node."""
        return tuple(edge.second for edge in self.edges if edge.first == index)

    def edges_into(self, index: int) -> tuple[EdgeData, ...]:
        """Returns the edges that end at a node."""
        return tuple(self._into[index])

    def critical_path(self, part: int = 0) -> tuple[int, ...]:
        """Returns the chain of nodes that takes longest, by an estimate.

        A node counts as its bytes and four MiB, which is what an H200 moves in the time that a
        node costs at least. Loops count as one node.

        Args:
            part: its number.
        """
        best: dict[int, tuple[int, int | None]] = {}
        for node in self.list_nodes(part):
            before = max(self.dependencies(node.index), key=lambda i: best[i][0], default=None)
            so_far = 0 if before is None else best[before][0]
            best[node.index] = so_far + node.nbytes + NODE_BYTES, before
        last = max(best, key=lambda index: best[index][0], default=None)
        path: list[int] = []
        while last is not None:
            path.append(last)
            last = best[last][1]
        return tuple(reversed(path))

    @functools.cached_property
    def _into(self) -> list[list[EdgeData]]:
        into: list[list[EdgeData]] = [[] for _ in self.nodes]
        for edge in self.edges:
            into[edge.second].append(edge)
        return into

    def describe_part(self, part: PartData) -> str:
        """Returns what a picture calls a part, as ``body 0 of 5: while loop``."""
        if part.owner is None:
            return f"{part.kind} of `{self.name}`"
        owner = self.nodes[part.owner]
        return f"body {part.body} of {owner.index}: {owner.kind} {owner.name}"

    def __str__(self) -> str:
        return "\n".join(self._list_lines())

    def _list_lines(self) -> Iterator[str]:
        yield f"`{self.name}`: {len(self.nodes)} nodes, {len(self.edges)} edges"
        for part in self.parts:
            yield self.describe_part(part)
            for node in self.list_nodes(part.number):
                waits = [
                    f"{edge.first}{'~' if edge.port == 'programmatic' else ''}"
                    for edge in self._into[node.index]
                ]
                after = f"  after {', '.join(waits)}" if waits else ""
                where = f"  # {node.where}" if node.where else ""
                yield f"  {node}{after}{where}"


def _format_dims(dims: tuple[int, int, int]) -> str:
    count = max((i + 1 for i, dim in enumerate(dims) if dim != 1), default=1)
    return "x".join(map(str, dims[:count]))
