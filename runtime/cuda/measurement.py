"""How far floats in device memory are apart: a kernel, see Note [Kernels that compare].

A step of a large model has hundreds of megabytes of results. Where all of them may differ in the
last bits, copies of both sides to the host would take longer than all else of a verification.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tracegraph.runtime.definition.nodes import KernelCode
from tracegraph.runtime.device import FloatDifference

# By name, as NumPy has no bfloat16 of its own.
FORMATS = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}
# A row of the kernel's results: difference, magnitude, and bits that say more.
FOUND = np.dtype([("difference", np.float64), ("magnitude", np.float64), ("bits", np.uint64)])
_STRANGE, _CHANGED = 1, 2

# Each block of threads measures the piece of its number: two addresses, a number of elements and
# their format. Where the second side is finite, it finds the greatest distance of the two sides and
# the greatest magnitude, and whether any bit is another one; elsewhere whether both sides are one
# infinity, or both no number. What is not negative has the order of its bits, and what is no number
# comes last.
MEASURE_PIECES = KernelCode(
    "measure_pieces",
    b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry measure_pieces(.param .u64 pieces, .param .u64 found)
{
    .reg .pred %is_end, %is_this, %is_finite, %is_changed, %is_same, %is_nan, %is_other_nan;
    .reg .b16  %half, %other_half;
    .reg .b32  %block, %thread, %threads, %format, %flags, %word, %other_word;
    .reg .f32  %single, %other_single;
    .reg .f64  %value, %other_value, %distance, %size;
    .reg .b64  %row, %one, %other, %count, %index, %step, %place, %bits, %other_bits;
    .reg .b64  %difference, %magnitude, %positive, %more;

    mov.u32       %block, %ctaid.x;
    mov.u32       %thread, %tid.x;
    mov.u32       %threads, %ntid.x;
    ld.param.u64  %row, [pieces];
    mad.wide.u32  %row, %block, 32, %row;
    ld.global.u64 %one, [%row];
    ld.global.u64 %other, [%row+8];
    ld.global.u64 %count, [%row+16];
    ld.global.u32 %format, [%row+24];
    cvt.u64.u32   %index, %thread;
    cvt.u64.u32   %step, %threads;
    mov.u64       %difference, 0;
    mov.u64       %magnitude, 0;
    mov.u32       %flags, 0;
NEXT:
    setp.ge.u64   %is_end, %index, %count;
    @%is_end bra  END;
    setp.eq.u32   %is_this, %format, 1;
    @%is_this bra SINGLE;
    setp.ge.u32   %is_this, %format, 2;
    @%is_this bra HALF;
    mad.lo.u64    %place, %index, 8, %one;
    ld.global.u64 %bits, [%place];
    mad.lo.u64    %place, %index, 8, %other;
    ld.global.u64 %other_bits, [%place];
    mov.b64       %value, %bits;
    mov.b64       %other_value, %other_bits;
    bra           LOADED;
HALF:
    mad.lo.u64    %place, %index, 2, %one;
    ld.global.u16 %half, [%place];
    mad.lo.u64    %place, %index, 2, %other;
    ld.global.u16 %other_half, [%place];
    setp.eq.u32   %is_this, %format, 3;
    @%is_this bra BRAIN;
    cvt.u64.u16   %bits, %half;
    cvt.u64.u16   %other_bits, %other_half;
    cvt.f32.f16   %single, %half;
    cvt.f32.f16   %other_single, %other_half;
    bra           WIDEN;
BRAIN:
    cvt.u32.u16   %word, %half;
    cvt.u32.u16   %other_word, %other_half;
    shl.b32       %word, %word, 16;
    shl.b32       %other_word, %other_word, 16;
    bra           WORDS;
SINGLE:
    mad.lo.u64    %place, %index, 4, %one;
    ld.global.u32 %word, [%place];
    mad.lo.u64    %place, %index, 4, %other;
    ld.global.u32 %other_word, [%place];
WORDS:
    cvt.u64.u32   %bits, %word;
    cvt.u64.u32   %other_bits, %other_word;
    mov.b32       %single, %word;
    mov.b32       %other_single, %other_word;
WIDEN:
    cvt.f64.f32   %value, %single;
    cvt.f64.f32   %other_value, %other_single;
LOADED:
    add.u64       %index, %index, %step;
    abs.f64       %size, %other_value;
    setp.lt.f64   %is_finite, %size, 0d7FF0000000000000;
    @!%is_finite bra STRANGE;
    sub.f64       %distance, %value, %other_value;
    mov.b64       %positive, %distance;
    and.b64       %positive, %positive, 0x7FFFFFFFFFFFFFFF;
    max.u64       %difference, %difference, %positive;
    mov.b64       %positive, %size;
    max.u64       %magnitude, %magnitude, %positive;
    setp.eq.u64   %is_same, %bits, %other_bits;
    @%is_same bra NEXT;
    or.b32        %flags, %flags, 2;
    bra           NEXT;
STRANGE:
    setp.eq.f64   %is_same, %value, %other_value;
    @%is_same bra NEXT;
    setp.nan.f64  %is_nan, %value, %value;
    setp.nan.f64  %is_other_nan, %other_value, %other_value;
    and.pred      %is_same, %is_nan, %is_other_nan;
    @%is_same bra NEXT;
    or.b32        %flags, %flags, 1;
    bra           NEXT;
END:
    ld.param.u64  %row, [found];
    mad.wide.u32  %row, %block, 24, %row;
    cvt.u64.u32   %more, %flags;
    red.global.max.u64 [%row], %difference;
    red.global.max.u64 [%row+8], %magnitude;
    red.global.or.b64  [%row+16], %more;
    ret;
}
\0""",
)


def join_pieces(found: np.ndarray[Any, Any], owners: np.ndarray[Any, Any]) -> list[FloatDifference]:
    """Returns the difference of each pair from those of its pieces.

    Args:
        found: one row of ``FOUND`` per piece.
        owners: index of the pair of each piece, ascending; each pair has one or more.
    """
    firsts = np.flatnonzero(np.diff(owners, prepend=-1))
    # `maximum` keeps what is no number.
    differences = np.maximum.reduceat(found["difference"], firsts)
    magnitudes = np.maximum.reduceat(found["magnitude"], firsts)
    bits = np.bitwise_or.reduceat(found["bits"], firsts).tolist()
    return [
        FloatDifference(
            float(difference), float(magnitude), not each & _STRANGE, each & _CHANGED > 0
        )
        for difference, magnitude, each in zip(differences, magnitudes, bits, strict=True)
    ]
