"""The records that `GraphData` holds: nodes, edges, buffers and parts."""

from __future__ import annotations

import dataclasses

from tracegraph.runtime.definition.graph import format_dims
from tracegraph.runtime.definition.nodes import BufferUse


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
        scope: JAX's name stack, as ``jit(step)/layer/dot_general``; of a region,
            the scopes of its ops.
    """

    index: int
    part: int
    kind: str
    name: str
    where: str
    kernel: KernelData | None
    reads: tuple[BufferUse, ...]
    writes: tuple[BufferUse, ...]
    scope: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that it reads and writes."""
        return sum(use.nbytes for use in (*self.reads, *self.writes))

    def __str__(self) -> str:
        text = f"{self.index}: {self.kind} {self.name}"
        if self.kernel is not None and self.kernel.symbol != self.name:
            text += f" ({self.kernel.symbol})"
        if self.kernel is not None:
            grid, block = (format_dims(each) for each in (self.kernel.grid, self.kernel.block))
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
