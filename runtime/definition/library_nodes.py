"""Nodes that call a library or a handler of the user: cublasLt, cuDNN, `jax.ffi`."""

from __future__ import annotations

import abc
import dataclasses
from typing import Self

from tracegraph.runtime.definition.cudnn_calls import CudnnCall
from tracegraph.runtime.definition.library_calls import LibraryCall
from tracegraph.runtime.definition.nodes import BufferUse, Relocate, name_buffers
from tracegraph.runtime.ffi.call import FfiCall


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


class _OperandsByRole(abc.ABC):
    """What nodes whose operands are byte ranges by role have in common: dataclasses."""

    operands: tuple[tuple[str, BufferUse], ...]

    @property
    @abc.abstractmethod
    def written(self) -> tuple[BufferUse, ...]:
        """The byte ranges that it writes."""

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return tuple([use for _, use in self.operands])

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the buffers that it reads, or may read, each once."""
        return name_buffers(self.ranges)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that it writes, each once."""
        return name_buffers(self.written)

    def move(self, relocate: Relocate) -> Self:
        """Returns the node with each of its byte ranges replaced."""
        operands = tuple((role, relocate(use)) for role, use in self.operands)
        return dataclasses.replace(self, operands=operands)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class MatmulNode(_OperandsByRole):
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
    def written(self) -> tuple[BufferUse, ...]:
        """The byte ranges that it writes."""
        return tuple(use for role, use in self.operands if role in self.WRITTEN)


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
        return name_buffers(self.ranges)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that it writes, each once."""
        return name_buffers(use for use in self.outputs if use is not None)

    def move(self, relocate: Relocate) -> FfiCallNode:
        """Returns the node with each of its byte ranges replaced."""
        moved = [use and relocate(use) for use in (*self.operands, *self.outputs)]
        count = len(self.operands)
        return FfiCallNode(self.name, self.call, tuple(moved[:count]), tuple(moved[count:]))


@dataclasses.dataclass(frozen=True)
class LibraryCallNode(_OperandsByRole):
    """One call of a library of NVIDIA.

    Attributes:
        name: of the instruction that it computes.
        call: what is computed; it says which roles it writes.
        operands: byte ranges by role, as the call names them.
    """

    name: str
    call: LibraryCall
    operands: tuple[tuple[str, BufferUse], ...]

    @property
    def kind(self) -> str:
        """That of the call, as ``fft``."""
        return self.call.kind

    @property
    def written(self) -> tuple[BufferUse, ...]:
        """The byte ranges that it writes."""
        return tuple(use for role, use in self.operands if role in self.call.written)


@dataclasses.dataclass(frozen=True)
class CudnnNode:
    """One call of cuDNN.

    Attributes:
        name: of the instruction that it computes.
        call: what is computed.
        operands: number and byte range of each tensor.
        written: numbers of those that it writes.
        workspace: byte range of the call's own temporaries, None where it needs none.
    """

    name: str
    call: CudnnCall
    operands: tuple[tuple[int, BufferUse], ...]
    written: tuple[int, ...]
    workspace: BufferUse | None = None

    kind = "cudnn"

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        own = () if self.workspace is None else (self.workspace,)
        return (*[use for _, use in self.operands], *own)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the buffers that it reads, or may read, each once."""
        return name_buffers(self.ranges)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that it writes, each once."""
        return name_buffers(self.written_ranges)

    @property
    def written_ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it writes, the workspace included."""
        own = () if self.workspace is None else (self.workspace,)
        return (*[use for uid, use in self.operands if uid in self.written], *own)

    def move(self, relocate: Relocate) -> CudnnNode:
        """Returns the node with each of its byte ranges replaced."""
        operands = tuple((uid, relocate(use)) for uid, use in self.operands)
        workspace = self.workspace and relocate(self.workspace)
        return CudnnNode(self.name, self.call, operands, self.written, workspace)
