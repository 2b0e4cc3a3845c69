"""Nodes of a graph: what one does, and to which bytes, before buffers have addresses.

This file is past 400 lines because nodes hold nodes: a node of each kind, with its own records.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from tracegraph.runtime.ffi.call import FfiCall


# A tuple: thousands are hashed in one capture, and sorted.
class BufferUse(NamedTuple):
    """A byte range of a buffer that a step or a node reads or writes."""

    buffer: str
    offset: int
    nbytes: int

    def overlaps(self, other: BufferUse) -> bool:
        """True when both name at least one common byte."""
        return self.buffer == other.buffer and max(self.offset, other.offset) < min(
            self.offset + self.nbytes, other.offset + other.nbytes
        )

    def fits(self, nbytes: int) -> bool:
        """True when it lies within a buffer of so many bytes.

        Example:
            >>> BufferUse("a", 32, 32).fits(64), BufferUse("a", 64, 0).fits(64)
            (True, True)
            >>> BufferUse("a", 32, 33).fits(64), BufferUse("a", -1, 1).fits(64)
            (False, False)
        """
        return self.offset >= 0 and self.nbytes >= 0 and self.offset + self.nbytes <= nbytes


Relocate: TypeAlias = Callable[[BufferUse], BufferUse]
Locate: TypeAlias = Callable[[BufferUse], int]


@dataclasses.dataclass(frozen=True)
class CallNode:
    """One call of a compiled region: reads buffers, defines buffers (both by name).

    Attributes:
        name: the region's name.
        executable: returns its one result, or a tuple of several.
        arguments: names of the buffers that it reads, in order.
        results: names of the buffers that it defines, in order.
        in_place: how many of the first arguments are donated to the executable; the result at the
            same place is the new value in the same buffer.
    """

    name: str
    executable: Callable[..., Any] = dataclasses.field(repr=False)
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    in_place: int = 0

    kind = "call"

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """None: it takes whole buffers, by their names."""
        return ()


@dataclasses.dataclass(frozen=True)
class CopyNode:
    """Copies a byte range of one buffer into one of another."""

    name: str
    source: BufferUse
    target: BufferUse

    kind = "memcpy"

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return (self.source, self.target)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The source."""
        return (self.source.buffer,)

    @property
    def results(self) -> tuple[str, ...]:
        """The target."""
        return (self.target.buffer,)

    def move(self, relocate: Relocate) -> CopyNode:
        """Returns the node with each of its byte ranges replaced."""
        return CopyNode(self.name, relocate(self.source), relocate(self.target))


@dataclasses.dataclass(frozen=True)
class FillNode:
    """Sets a byte range to a repeated value.

    Attributes:
        name: of the instruction that it belongs to.
        target: the byte range.
        value: one element, as an unsigned number.
        element_bytes: 1, 2 or 4; the range holds whole elements.
    """

    name: str
    target: BufferUse
    value: int = 0
    element_bytes: int = 1

    kind = "memset"
    arguments: tuple[str, ...] = dataclasses.field(default=(), init=False)

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return (self.target,)

    @property
    def results(self) -> tuple[str, ...]:
        """The target."""
        return (self.target.buffer,)

    def move(self, relocate: Relocate) -> FillNode:
        """Returns the node with its byte range replaced."""
        return FillNode(self.name, relocate(self.target), self.value, self.element_bytes)


@dataclasses.dataclass(frozen=True)
class KernelCode:
    """A compiled kernel: an image that the driver loads, and the symbol to look up in it."""

    symbol: str
    cubin: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class LaunchShape:
    """How many threads run a kernel, in x, y and z, and with how much dynamic shared memory."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0


class Swizzle(enum.IntEnum):
    """CUtensorMapSwizzle."""

    NONE = 0
    BYTES_32 = 1
    BYTES_64 = 2
    BYTES_128 = 3


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A kernel parameter of 128 bytes that describes a tiled array to the bulk copy engine.

    More than six fields because they are the parameters of ``cuTensorMapEncodeTiled``, one to one.

    Attributes:
        use: where the array is; the descriptor holds its address.
        element_bytes: 1, 2, 4 or 8.
        dims: elements per dimension, innermost first.
        strides: bytes between elements of the dimensions but the innermost.
        box: elements per dimension of one tile.
        element_strides: step per dimension inside a tile.
        interleave: CUtensorMapInterleave: 0 none, 1 16 bytes, 2 32 bytes.
        swizzle: how tiles lie in shared memory.
        l2_promotion: CUtensorMapL2promotion: 0 none, 1 64, 2 128, 3 256 bytes.
        fills_nan: True when reads out of bounds give NaN, not zero.
    """

    use: BufferUse
    element_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: Swizzle = Swizzle.NONE
    l2_promotion: int = 0
    fills_nan: bool = False


class ConditionHandle(enum.Enum):
    """A kernel parameter: the handle of the conditional node that the kernel decides for.

    It is the node whose body the kernel is in, or whose `ConditionalNode.setter` it is.
    """

    OWN = "own"


# A pointer to a byte range, a tensor map, a handle, or the bytes of a value.
KernelParameter: TypeAlias = BufferUse | TensorMap | ConditionHandle | bytes


@dataclasses.dataclass(frozen=True)
class KernelNode:
    """One launch of a kernel.

    Attributes:
        name: of the instruction that it computes.
        code: what runs.
        shape: on how many threads.
        parameters: in the order of the kernel's parameters.
        written: for each parameter whether the kernel writes through it.
        begins_with_wait: True when the kernel itself waits for the kernels before it before it
            touches memory; see Note [Programmatic edges] of ``lowering/build_graph.py``.
    """

    name: str
    code: KernelCode
    shape: LaunchShape
    parameters: tuple[KernelParameter, ...]
    written: tuple[bool, ...]
    begins_with_wait: bool = False

    kind = "kernel"

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return tuple([use for use, _ in self.uses])

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the buffers that it reads, or may read, each once."""
        return _name_once(use for use, _ in self.uses)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that it writes, each once."""
        return _name_once(use for use, is_written in self.uses if is_written)

    @functools.cached_property
    def uses(self) -> tuple[tuple[BufferUse, bool], ...]:
        """Every byte range, and whether it is written."""
        pairs = zip(self.parameters, self.written, strict=True)
        return tuple(
            (parameter.use if isinstance(parameter, TensorMap) else parameter, is_written)
            for parameter, is_written in pairs
            if not isinstance(parameter, bytes | ConditionHandle)
        )

    def bind(self, handle: int) -> KernelNode:
        """Returns the node with the handle of the conditional node that it decides for."""
        parameters = tuple(
            handle.to_bytes(8, "little") if each is ConditionHandle.OWN else each
            for each in self.parameters
        )
        return dataclasses.replace(self, parameters=parameters)

    def move(self, relocate: Relocate) -> KernelNode:
        """Returns the node with each of its byte ranges replaced."""
        parameters = tuple([_move_parameter(p, relocate) for p in self.parameters])
        return KernelNode(
            self.name, self.code, self.shape, parameters, self.written, self.begins_with_wait
        )


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """A matrix, or a batch of them, as cublasLt describes it.

    More than six fields because they are the attributes of a cublasLt matrix layout, one to one.

    Attributes:
        dtype: JAX's name, as ``bfloat16``.
        rows: of one matrix as stored.
        columns: of one matrix as stored.
        leading_stride: elements between columns (or rows, in row order).
        is_row_order: True when rows are contiguous.
        batch_count: number of matrices.
        batch_stride: elements between two of them; 0 repeats one.
        transpose: ``N``, ``T`` or ``C``: what the matmul does to it.
    """

    dtype: str
    rows: int
    columns: int
    leading_stride: int
    is_row_order: bool = False
    batch_count: int = 1
    batch_stride: int = 0
    transpose: str = "N"


@dataclasses.dataclass(frozen=True)
class Matmul:
    """D = epilogue(alpha * A @ B + beta * C + bias), as one cublasLt call.

    More than six fields because they are the arguments of ``cublasLtMatmul``, one to one.

    Attributes:
        a, b, c, d: layouts, after XLA's exchange of operands.
        alpha, beta: factors.
        compute_type: name after ``CUBLAS_COMPUTE_``, as ``32F_FAST_TF32``.
        scale_type: JAX's name of the dtype of alpha and beta.
        epilogue: name after ``CUBLASLT_EPILOGUE_``, as ``GELU_BIAS``.
        algorithm_index: which entry of cublasLt's list for this matmul.
        workspace_limit_bytes: the limit that the list is requested with.
        has_fast_accumulation: for operands of eight bits.
    """

    a: MatrixLayout
    b: MatrixLayout
    c: MatrixLayout
    d: MatrixLayout
    alpha: complex
    beta: float
    compute_type: str
    scale_type: str
    epilogue: str = "DEFAULT"
    algorithm_index: int = 0
    workspace_limit_bytes: int = 0
    has_fast_accumulation: bool = False


@dataclasses.dataclass(frozen=True)
class MatmulNode:
    """One cublasLt matmul.

    Attributes:
        name: of the instruction that it computes.
        matmul: what is computed.
        operands: byte ranges by role: ``a``, ``b``, ``c``, ``d``, ``workspace``, and where the
            matmul has them ``bias``, ``aux``, ``a_scale``, ``b_scale``, ``c_scale``, ``d_scale``,
            ``d_amax``.
    """

    name: str
    matmul: Matmul
    operands: tuple[tuple[str, BufferUse], ...]

    kind = "matmul"
    WRITTEN = ("d", "aux", "workspace", "d_amax")

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return tuple([use for _, use in self.operands])

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the buffers that it reads, or may read, each once."""
        return _name_once(use for _, use in self.operands)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that it writes, each once."""
        return _name_once(use for role, use in self.operands if role in self.WRITTEN)

    def move(self, relocate: Relocate) -> MatmulNode:
        """Returns the node with each of its byte ranges replaced."""
        operands = tuple((role, relocate(use)) for role, use in self.operands)
        return MatmulNode(self.name, self.matmul, operands)


@dataclasses.dataclass(frozen=True)
class FfiCallNode:
    """One call of a handler of `jax.ffi`.

    Attributes:
        call: the handler's name, types and attributes.
        operands, outputs: byte range of each, None for a token.
    """

    name: str
    call: FfiCall
    operands: tuple[BufferUse | None, ...]
    outputs: tuple[BufferUse | None, ...]

    kind = "ffi_call"

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return tuple(use for use in (*self.operands, *self.outputs) if use is not None)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the buffers that it reads, or may read, each once."""
        return _name_once(self.ranges)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that it writes, each once."""
        return _name_once(use for use in self.outputs if use is not None)

    def move(self, relocate: Relocate) -> FfiCallNode:
        """Returns the node with each of its byte ranges replaced."""
        moved = [use and relocate(use) for use in (*self.operands, *self.outputs)]
        count = len(self.operands)
        return FfiCallNode(self.name, self.call, tuple(moved[:count]), tuple(moved[count:]))


DeviceNode: TypeAlias = KernelNode | CopyNode | FillNode | MatmulNode | FfiCallNode


class Construct(enum.Enum):
    """What a conditional node does with the value of its handle; the names are CUDA's."""

    IF = "if"  # runs the first body if it is not 0, else the second
    WHILE = "while"  # runs its body as long as it is not 0
    SWITCH = "switch"  # runs the body of that number


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
    """

    name: str
    construct: Construct
    bodies: tuple[Body, ...]
    setter: KernelNode

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


def _move_parameter(parameter: KernelParameter, relocate: Relocate) -> KernelParameter:
    if isinstance(parameter, TensorMap):
        return dataclasses.replace(parameter, use=relocate(parameter.use))
    return relocate(parameter) if isinstance(parameter, BufferUse) else parameter


def _name_once(uses: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(use.buffer for use in uses))
