"""`matmul` and `cudnn` of `tg.backends`: the flags as attributes."""

from __future__ import annotations

import contextlib
from types import EllipsisType
from typing import Any

from tracegraph.precision.flags import SPELLINGS, hold_flags, read_flags, set_flag


class _Group:
    """Flags of one library."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return type(self).__name__.removesuffix("Flags").lower()

    def __repr__(self) -> str:
        group = self.__reduce__()
        values = zip(SPELLINGS.values(), read_flags(), strict=True)
        shown = [f"{name}={value}" for name, value in values if name.startswith(f"{group}.")]
        return f"<tg.backends: {', '.join(shown)}>"


def _make_flag(field: str, text: str) -> Any:
    def read(_: _Group) -> bool | None:
        return getattr(read_flags(), field)

    def write(_: _Group, value: bool | None) -> None:
        set_flag(field, value)

    read.__doc__ = f"{text} True, False, or None where JAX decides, as it does until it is set."
    return property(read, write)


class MatmulFlags(_Group):
    """`tg.backends.matmul`: how precise matmuls are that say nothing of it themselves.

    Example:
        >>> print(tg.backends.matmul.allow_tf32)
        None
        >>> tg.backends.matmul.allow_tf32 = False
        >>> tg.backends.matmul  # doctest: +ELLIPSIS
        <tg.backends: matmul.allow_tf32=False, ...>
        >>> tg.backends.matmul.allow_tf32 = None
    """

    __slots__ = ()
    allow_tf32: bool | None = _make_flag(
        "matmul_tf32", "Matmuls of float32 and complex64 may round their operands to TF32."
    )
    allow_fp16_reduced_precision_reduction: bool | None = _make_flag(
        "matmul_fp16_reduction", "Matmuls of float16 may add partial sums in float16."
    )
    allow_bf16_reduced_precision_reduction: bool | None = _make_flag(
        "matmul_bf16_reduction", "Matmuls of bfloat16 may add partial sums in bfloat16."
    )

    def flags(
        self,
        *,
        allow_tf32: bool | EllipsisType | None = ...,
        allow_fp16_reduced_precision_reduction: bool | EllipsisType | None = ...,
        allow_bf16_reduced_precision_reduction: bool | EllipsisType | None = ...,
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which flags have other values, for this thread only.

        Args:
            allow_tf32: left out, the flag keeps its value.
            allow_fp16_reduced_precision_reduction: the same.
            allow_bf16_reduced_precision_reduction: the same.

        Example:
            >>> with tg.backends.matmul.flags(allow_tf32=False):
            ...     print(tg.backends.matmul.allow_tf32)
            False
            >>> print(tg.backends.matmul.allow_tf32)
            None
        """
        changes = {
            "matmul_tf32": allow_tf32,
            "matmul_fp16_reduction": allow_fp16_reduced_precision_reduction,
            "matmul_bf16_reduction": allow_bf16_reduced_precision_reduction,
        }
        return hold_flags({f: value for f, value in changes.items() if value is not ...})


class CudnnFlags(_Group):
    """`tg.backends.cudnn`: how precise convolutions are that say nothing of it themselves.

    Example:
        >>> print(tg.backends.cudnn.allow_tf32)
        None
    """

    __slots__ = ()
    allow_tf32: bool | None = _make_flag(
        "cudnn_tf32", "Convolutions of float32 and complex64 may round their operands to TF32."
    )

    def flags(
        self, *, allow_tf32: bool | EllipsisType | None = ...
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the flag has another value, for this thread only.

        Args:
            allow_tf32: left out, the flag keeps its value.

        Example:
            >>> with tg.backends.cudnn.flags(allow_tf32=False):
            ...     print(tg.backends.cudnn.allow_tf32)
            False
        """
        return hold_flags({} if allow_tf32 is ... else {"cudnn_tf32": allow_tf32})


matmul, cudnn = MatmulFlags(), CudnnFlags()
