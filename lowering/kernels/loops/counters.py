"""Counters: the kernel that counts several iterations of a loop in advance."""

from __future__ import annotations

from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.kernels.loops.conditions import FIRST_LINES
from tracegraph.lowering.planning.memory_plan import ALIGNMENT
from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, KernelNode, LaunchShape

# Of a block: a value for each.
MOST_VALUES = 256
# By the bytes of a value: how it is loaded as one of 64 bits, and stored.
_VALUES = {
    4: (
        "ld.global.u32 %half, [%source]; cvt.u64.u32 %value, %half",
        "cvt.u32.u64 %half, %value; @%is_in st.global.u32 [%values], %half",
    ),
    8: ("ld.global.u64 %value, [%source]", "@%is_in st.global.u64 [%values], %value"),
}

_TEMPLATE = """
.visible .entry count_ahead_{nbytes}(
    .param .u64 source, .param .u64 values, .param .u64 first, .param .u64 step,
    .param .u64 count)
{{
    .reg .pred %is_in;
    .reg .b32  %thread, %half;
    .reg .b64  %source, %values, %first, %step, %count, %index, %value;

    ld.param.u64  %source, [source];
    ld.param.u64  %values, [values];
    ld.param.u64  %first, [first];
    ld.param.u64  %step, [step];
    ld.param.u64  %count, [count];
    mov.u32       %thread, %tid.x;
    cvt.u64.u32   %index, %thread;
    setp.lt.u64   %is_in, %index, %count;
    mad.lo.u64    %values, %index, {stride}, %values;
    {load};
    add.u64       %value, %value, %first;
    mad.lo.u64    %value, %index, %step, %value;
    {store};
    ret;
}}
"""

_KERNELS = [
    _TEMPLATE.format(nbytes=nbytes, stride=ALIGNMENT, load=load, store=store)
    for nbytes, (load, store) in _VALUES.items()
]
COUNT_AHEAD = FIRST_LINES + "".join([".address_size 64\n", *_KERNELS, "\0"]).encode()


def count_values(
    name: str, counter: BufferUse, values: BufferUse, first: int, step: int
) -> DeviceStep:
    """Returns the step that writes values which a counter will have.

    Args:
        name: of the step.
        counter: an integer of four or eight bytes.
        values: where they are written, one at each multiple of `ALIGNMENT` bytes; one value may
            take the place of the counter.
        first: how much more than the counter the first one is.
        step: from one to the next.
    """
    count = -(-values.nbytes // ALIGNMENT)
    numbers = tuple(each.to_bytes(8, "little", signed=True) for each in (first, step, count))
    node = KernelNode(
        name,
        KernelCode(f"count_ahead_{counter.nbytes}", COUNT_AHEAD),
        LaunchShape((1, 1, 1), (-(-count // 32) * 32, 1, 1)),
        (counter, values, *numbers),
        (False, True) + (False,) * len(numbers),
    )
    return DeviceStep(node, reads=(counter,), writes=(values,))
