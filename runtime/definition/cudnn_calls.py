"""Calls of cuDNN: what is computed, before operands have addresses.

cuDNN names a tensor by a number. A convolution's are those that XLA gives them; a graph that XLA
has compiled says its own.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeAlias

# The numbers of a convolution's tensors: input, filter, output, side input, bias.
X, W, Y, Z, B = map(ord, "xwyzb")

ITEM_BYTES = {
    "int8": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


class Direction(enum.Enum):
    """Which of its three tensors a convolution computes from the others."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward data"
    BACKWARD_FILTER = "backward filter"


class Activation(enum.Enum):
    """What is applied to the sum of convolution and bias."""

    NONE = "none"
    RELU = "relu"
    RELU6 = "relu6"
    ELU = "elu"
    LEAKY_RELU = "leaky relu"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array as cuDNN describes it: batch, features, then one to three spatial dimensions.

    Attributes:
        dtype: JAX's name, as ``bfloat16``.
        dims: elements per dimension; of a filter, features of the output, then of the input.
        strides: elements between two neighbours of each dimension.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes lie between its first and behind its last element.

        Example:
            >>> Tensor("float32", (2, 3, 1, 1), (8, 1, 3, 3)).nbytes
            44
        """
        last = sum((d - 1) * stride for d, stride in zip(self.dims, self.strides, strict=True))
        return (last + 1) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Window:
    """How the filter moves, per spatial dimension.

    Attributes:
        padding: zeros on either side.
        strides: elements of the input between two places of the filter.
        dilation: elements of the input between two of the filter.
        is_flipped: True when the filter is read backwards.
    """

    padding: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    is_flipped: bool = False


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Which of cuDNN's engines computes a convolution.

    Attributes:
        engine: its number; None for the first that cuDNN recommends.
        knobs: number and value of each setting that is not the engine's own choice.
        allows_tf32: for float32, where cuDNN recommends.
    """

    engine: int | None = None
    knobs: tuple[tuple[int, int], ...] = ()
    allows_tf32: bool = True


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What follows a forward convolution: scale * conv(x, w) + side_scale * z + b, activated.

    Attributes:
        bias: the tensor B.
        activation: of the sum.
        slope: of the leaky one, below zero.
        scale, side_scale: factors.
    """

    bias: Tensor
    activation: Activation = Activation.NONE
    slope: float = 0.0
    scale: float = 1.0
    side_scale: float = 0.0

    @property
    def adds_side_input(self) -> bool:
        """True when the tensor Z is one of the operands, though its factor may be 0.

        cuDNN's compiled kernels for these activations exist only with the addition.
        """
        is_plain = self.activation in (Activation.NONE, Activation.RELU)
        return is_plain or self.scale != 1.0 or self.side_scale != 0.0


@dataclasses.dataclass(frozen=True)
class Convolution:
    """One convolution.

    More than six fields because they are what XLA's descriptor of a convolution consists of.

    Attributes:
        direction: which tensor is computed.
        x, w, y: input, filter and output, or the gradients in their place.
        window: how the filter moves.
        algorithm: which engine computes it.
        workspace_bytes: the most that the engine may use.
        epilogue: what follows it, if anything does.
    """

    direction: Direction
    x: Tensor
    w: Tensor
    y: Tensor
    window: Window
    algorithm: Algorithm = Algorithm()
    workspace_bytes: int = 0
    epilogue: Epilogue | None = None


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """A graph of cuDNN operations that XLA has compiled, as attention.

    Attributes:
        plan: cuDNN's own text of the compiled graph.
        uids: the numbers of its tensors.
        values: those that are one value: number and bytes.
        places: those that are in the workspace: number and offset.
        own_bytes: how much of the workspace, from its start, holds such tensors.
        workspace_bytes: size of the whole workspace.
    """

    plan: bytes = dataclasses.field(repr=False)
    uids: tuple[int, ...]
    values: tuple[tuple[int, bytes], ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    own_bytes: int = 0
    workspace_bytes: int = 0


CudnnCall: TypeAlias = Convolution | CompiledGraph
