"""What is known of a value whose axes may be padded.

Note [Padded axes]. A function is traced at the bucket's sizes and once more at other sizes. An axis
whose extent differs is padded: only the first ``size * scale`` of it belong to the call. What is
behind them may be anything, NaN too, unless a mask has put a known value there. The true
part never depends on the rest: each op is held to that by a rule, `tracegraph/buckets/rules/`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tracegraph.ir.graph import Op, Operand


@dataclasses.dataclass(frozen=True)
class Padding:
    """One padded axis.

    Attributes:
        size: name of the size that it follows.
        scale: its extent is that many times the size, as after a reshape that merges axes.
        fill: the value of every padded element; None where they may be anything.
        may_be_nan: True where they may be NaN instead, if all true elements at the same places of
            the other axes are NaN, too.
    """

    size: str
    scale: int = 1
    fill: np.generic | None = None
    may_be_nan: bool = False

    def is_like(self, other: Padding) -> bool:
        """True for the same size and scale."""
        return (self.size, self.scale) == (other.size, other.scale)


@dataclasses.dataclass(frozen=True)
class AxisIndex:
    """The elements count 0, 1, 2, ... along an axis."""

    axis: int


@dataclasses.dataclass(frozen=True)
class TrueSize:
    """All elements are the true size of a call, times a factor, plus a number."""

    size: str
    scale: int = 1
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Maximum:
    """The largest elements of another value along some of its axes."""

    source: Operand
    axes: tuple[int, ...]


Meaning = AxisIndex | TrueSize | Maximum


@dataclasses.dataclass(frozen=True)
class Padded:
    """What is known of one value, see Note [Padded axes].

    Attributes:
        axes: its padding, one entry per axis; None for an axis of fixed extent.
        uniform: the value of all its elements, where they are equal and known.
        meaning: what its elements are, if that matters to a mask.
        leak: the op of a mask that it comes from and that lets padding through.
    """

    axes: tuple[Padding | None, ...]
    uniform: np.generic | None = None
    meaning: Meaning | None = None
    leak: Op | None = None

    @property
    def is_padded(self) -> bool:
        """True when an axis is padded."""
        return any(axis is not None for axis in self.axes)

    def find_fill(self, axis: int) -> np.generic | None:
        """Returns the value of the padded elements of an axis, None if it is not known."""
        if self.uniform is not None:
            return self.uniform
        padding = self.axes[axis] if axis < len(self.axes) else None
        return None if padding is None or padding.may_be_nan else padding.fill

    def find_relative_fill(self, axis: int) -> np.generic | None:
        """Returns the same of an axis whose padded elements may be NaN as the true ones are."""
        padding = self.axes[axis] if axis < len(self.axes) else None
        return padding.fill if padding is not None and padding.may_be_nan else None


class RefusedError(Exception):
    """A rule does not take an op.

    Args:
        what: reads on after the op, as ``sums over the padded axis 0``.
        why: the one fact that makes it wrong.
        fix: what to type.
        mask: the op of the mask that lets padding through, where there is one.
    """

    def __init__(self, what: str, why: str, fix: str, mask: Op | None = None) -> None:
        super().__init__(what, why, fix)
        self.what, self.why, self.fix, self.mask = what, why, fix, mask


def forget_fill(padding: Padding | None) -> Padding | None:
    """Returns the same axis with anything in its padded part."""
    return None if padding is None else Padding(padding.size, padding.scale)


def as_scalar(value: Any, dtype: Any) -> Any:
    """Returns a number of Python, NumPy or JAX as a scalar of a dtype; None for keys and arrays."""
    try:
        array = np.asarray(value)
        return None if array.ndim else array.astype(np.dtype(dtype))[()]
    except (TypeError, ValueError):
        return None
