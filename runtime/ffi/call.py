"""FfiCall: what one call of a handler is given besides addresses."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

from tracegraph.runtime.ffi.c_api import DataType

# Bytes of one element; types of less than a byte are not here.
ITEM_BYTES = {
    DataType.PRED: 1,
    DataType.S8: 1,
    DataType.S16: 2,
    DataType.S32: 4,
    DataType.S64: 8,
    DataType.U8: 1,
    DataType.U16: 2,
    DataType.U32: 4,
    DataType.U64: 8,
    DataType.F16: 2,
    DataType.F32: 4,
    DataType.F64: 8,
    DataType.BF16: 2,
    DataType.C64: 8,
    DataType.C128: 16,
    DataType.TOKEN: 0,
    DataType.F8E5M2: 1,
    DataType.F8E3M4: 1,
    DataType.F8E4M3: 1,
    DataType.F8E4M3FN: 1,
    DataType.F8E4M3B11FNUZ: 1,
    DataType.F8E5M2FNUZ: 1,
    DataType.F8E4M3FNUZ: 1,
    DataType.F8E8M0FNU: 1,
}


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Element type and shape of an operand or a result; a token has no bytes.

    Example:
        >>> print(ArrayType(DataType.F32, (3, 4)))
        F32[3,4]
    """

    dtype: DataType
    dims: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.dims))}]"

    @property
    def nbytes(self) -> int:
        """Bytes of the array, row by row without gaps."""
        return math.prod(self.dims) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class ScalarAttribute:
    """A number or a truth value."""

    dtype: DataType
    value: bool | int | float


@dataclasses.dataclass(frozen=True)
class ArrayAttribute:
    """Numbers of one type."""

    dtype: DataType
    values: tuple[int | float, ...]


@dataclasses.dataclass(frozen=True)
class DictionaryAttribute:
    """Attributes by name, sorted by it."""

    items: tuple[tuple[str, CallAttribute], ...]


# Bytes are a string, which is text in most cases but need not be.
CallAttribute: TypeAlias = ScalarAttribute | ArrayAttribute | DictionaryAttribute | bytes


@dataclasses.dataclass(frozen=True)
class FfiCall:
    """A call of a registered handler.

    Attributes:
        target: the name that the handler is registered under.
        operands: types of the arguments.
        results: types of the results.
        attributes: what the program sets, by name.
    """

    target: str
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    attributes: DictionaryAttribute = DictionaryAttribute(())
