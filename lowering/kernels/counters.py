"""Counters: the kernel that counts several iterations of a loop in advance."""

from __future__ import annotations

from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.kernels.conditions import FIRST_LINES
from tracegraph.lowering.planning.memory_plan import ALIGNMENT
from tracegraph.runtime.nodes import BufferUse, KernelCode, KernelNode, LaunchShape

# Of a block: a value for each.
MOST_VALUES = 256
# By the bytes of a value: how it is loaded and stored as one of 64 bits.
_VALUES = {
    4: ("ld.global.u32 %half, [%counter]; cvt.u64.u32 %value, %half", "cvt.u32.u64 %half", "u32"),
    8: ("ld.global.u64 %value, [%counter]", "mov.u64 %half", "u64"),
}

_TEMPLATE = """
.visible .entry count_ahead_{nbytes}(
    .param .u64 counter, .param .u64 values, .param .u64 step, .param .u64 count)
{{
    .reg .pred %is_in, %is_first;
    .reg .b32  %thread;
    .reg .b{bits}  %half;
    .reg .b64  %counter, %values, %step, %count, %index, %value, %result;

    ld.param.u64  %counter, [counter];
    ld.param.u64  %values, [values];
    ld.param.u64  %step, [step];
    ld.param.u64  %count, [count];
    mov.u32       %thread, %tid.x;
    cvt.u64.u32   %index, %thread;
    {load};
    bar.sync      0;
    setp.lt.u64   %is_in, %index, %count;
    setp.eq.u64   %is_first, %index, 0;
    mad.lo.u64    %values, %index, {stride}, %values;
    mad.lo.u64    %result, %index, %step, %value;
    {narrow}, %result;
    @%is_in st.global.{kind} [%values], %half;
    mad.lo.u64    %result, %count, %step, %value;
    {narrow}, %result;
    @%is_first st.global.{kind} [%counter], %half;
    ret;
}}
"""

_KERNELS = [
    _TEMPLATE.format(
        nbytes=nbytes, bits=8 * nbytes, stride=ALIGNMENT, load=load, narrow=narrow, kind=kind
    )
    for nbytes, (load, narrow, kind) in _VALUES.items()
]
COUNT_AHEAD = FIRST_LINES + "".join([".address_size 64\n", *_KERNELS, "\0"]).encode()


def count_values(name: str, counter: BufferUse, values: BufferUse, step: int) -> DeviceStep:
    """Returns the step that writes the next values of a counter, and counts as far.

    Args:
        name: of the step.
        counter: an integer of four or eight bytes; it gets the value after the last one written.
        values: one at each multiple of `ALIGNMENT` bytes.
        step: from one to the next.
    """
    count = -(-values.nbytes // ALIGNMENT)
    node = KernelNode(
        name,
        KernelCode(f"count_ahead_{counter.nbytes}", COUNT_AHEAD),
        LaunchShape((1, 1, 1), (-(-count // 32) * 32, 1, 1)),
        (counter, values, *(each.to_bytes(8, "little", signed=True) for each in (step, count))),
        (True, True, False, False),
    )
    return DeviceStep(node, reads=(counter,), writes=(counter, values))
