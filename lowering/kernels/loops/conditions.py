"""Conditions: the kernels that tell a conditional node of a graph what to do next.

Note [Kernels as PTX]. They are a few instructions each and the same for every GPU, so they are kept
as text, which every driver translates for its own. ``cudaGraphSetConditional`` is a function that
the driver brings with it.
"""

from __future__ import annotations

from tracegraph.lowering.device_program import DeviceStep
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    ConditionHandle,
    KernelCode,
    KernelNode,
    KernelParameter,
    LaunchShape,
)

COUNTER_BYTES = 4

# By these a kernel of our own is told from others; every GPU takes it.
FIRST_LINES = b"// tracegraph\n.version 7.8\n.target sm_70\n"

SET_CONDITION = """{
        .param .b64 first;
        .param .b32 second;
        st.param.b64 [first], %handle;
        st.param.b32 [second], %value;
        call.uni cudaGraphSetConditional, (first, second);
    }
    ret;"""

_CONDITIONS = """
.address_size 64

.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);

.visible .entry set_flag(.param .u64 handle, .param .u64 flag)
{
    .reg .pred %is_set;
    .reg .b16  %flag;
    .reg .b32  %value;
    .reg .b64  %handle, %address;

    ld.param.u64  %handle, [handle];
    ld.param.u64  %address, [flag];
    ld.global.u8  %flag, [%address];
    setp.ne.u16   %is_set, %flag, 0;
    selp.u32      %value, 1, 0, %is_set;
    SET_CONDITION
}

.visible .entry set_index(.param .u64 handle, .param .u64 index, .param .u64 count)
{
    .reg .pred %is_outside;
    .reg .b32  %value, %count, %last;
    .reg .b64  %handle, %address;

    ld.param.u64  %handle, [handle];
    ld.param.u64  %address, [index];
    ld.param.u32  %count, [count];
    sub.u32       %last, %count, 1;
    ld.global.u32 %value, [%address];
    setp.ge.u32   %is_outside, %value, %count;
    selp.u32      %value, %last, %value, %is_outside;
    SET_CONDITION
}

.visible .entry set_branch_1(
    .param .u64 handle, .param .u64 flag, .param .u64 place, .param .u64 count)
{
    .reg .pred %is_taken;
    .reg .b16  %flag;
    .reg .b32  %value, %place, %is_set;
    .reg .b64  %handle, %address;

    ld.param.u64  %handle, [handle];
    ld.param.u64  %address, [flag];
    ld.param.u32  %place, [place];
    ld.global.u8  %flag, [%address];
    cvt.u32.u16   %is_set, %flag;
    min.u32       %is_set, %is_set, 1;
    setp.ne.u32   %is_taken, %is_set, %place;
    selp.u32      %value, 1, 0, %is_taken;
    SET_CONDITION
}

.visible .entry set_branch_4(
    .param .u64 handle, .param .u64 index, .param .u64 place, .param .u64 count)
{
    .reg .pred %is_taken;
    .reg .b32  %value, %place, %count;
    .reg .b64  %handle, %address;

    ld.param.u64  %handle, [handle];
    ld.param.u64  %address, [index];
    ld.param.u32  %place, [place];
    ld.param.u32  %count, [count];
    sub.u32       %count, %count, 1;
    ld.global.u32 %value, [%address];
    min.u32       %value, %value, %count;
    setp.eq.u32   %is_taken, %value, %place;
    selp.u32      %value, 1, 0, %is_taken;
    SET_CONDITION
}

.visible .entry start_turns(.param .u64 handle, .param .u64 counter)
{
    .reg .b32  %value;
    .reg .b64  %handle, %address;

    ld.param.u64  %handle, [handle];
    ld.param.u64  %address, [counter];
    mov.u32       %value, 0;
    st.global.u32 [%address], %value;
    mov.u32       %value, 1;
    SET_CONDITION
}

.visible .entry count_turn(.param .u64 handle, .param .u64 counter, .param .u64 turns)
{
    .reg .pred %has_more;
    .reg .b32  %value, %done, %turns;
    .reg .b64  %handle, %address;

    ld.param.u64  %handle, [handle];
    ld.param.u64  %address, [counter];
    ld.param.u32  %turns, [turns];
    ld.global.u32 %done, [%address];
    add.u32       %done, %done, 1;
    st.global.u32 [%address], %done;
    setp.lt.u32   %has_more, %done, %turns;
    selp.u32      %value, 1, 0, %has_more;
    SET_CONDITION
}
\0""".replace("SET_CONDITION", SET_CONDITION)
CONDITIONS = FIRST_LINES + _CONDITIONS.encode()

_ONE_THREAD = LaunchShape((1, 1, 1), (1, 1, 1))


def set_flag(name: str, flag: BufferUse) -> DeviceStep:
    """Returns the step that sets a handle to 1 if a byte is not 0, else to 0.

    Args:
        name: of the step.
        flag: one byte.
    """
    node = _make_kernel(name, "set_flag", (flag,), (False,))
    return DeviceStep(node, reads=(flag,), writes=())


def set_index(name: str, index: BufferUse, count: int) -> DeviceStep:
    """Returns the step that sets a handle to an index; to the last one if it is out of range.

    Args:
        name: of the step.
        index: four bytes.
        count: one more than the last index.
    """
    node = _make_kernel(name, "set_index", (index, _pack(count)), (False, False))
    return DeviceStep(node, reads=(index,), writes=())


def set_branch(name: str, index: BufferUse, place: int, count: int) -> DeviceStep:
    """Returns the step that sets a handle to 1 where one branch is to be taken, else to 0.

    Args:
        name: of the step.
        index: four bytes, the last branch if out of range; or one, the first branch if not 0.
        place: of the branch among all.
        count: of all branches.
    """
    parameters = (index, _pack(place), _pack(count))
    symbol = f"set_branch_{index.nbytes}"
    node = _make_kernel(name, symbol, parameters, (False, False, False))
    return DeviceStep(node, reads=(index,), writes=())


def start_turns(name: str, counter: BufferUse) -> DeviceStep:
    """Returns the step that sets a handle to 1 and a counter of turns to 0.

    Args:
        name: of the step.
        counter: four bytes.
    """
    node = _make_kernel(name, "start_turns", (counter,), (True,))
    return DeviceStep(node, reads=(), writes=(counter,))


def count_turn(name: str, counter: BufferUse, turns: int) -> DeviceStep:
    """Returns the step that counts a turn of a loop, and sets its handle to 0 after the last one.

    Args:
        name: of the step.
        counter: four bytes; how many turns are over.
        turns: how many there are.
    """
    node = _make_kernel(name, "count_turn", (counter, _pack(turns)), (True, False))
    return DeviceStep(node, reads=(counter,), writes=(counter,))


def _make_kernel(
    name: str, symbol: str, parameters: tuple[KernelParameter, ...], written: tuple[bool, ...]
) -> KernelNode:
    return KernelNode(
        name,
        KernelCode(symbol, CONDITIONS),
        _ONE_THREAD,
        (ConditionHandle.OWN, *parameters),
        (False, *written),
    )


def _pack(number: int) -> bytes:
    return number.to_bytes(8, "little")
