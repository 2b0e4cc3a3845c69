"""Kernels of a profile: one that does nothing, one that keeps the GPU busy, one that reads bytes.

They are kept as PTX, which every driver translates for its GPU: Note [Kernels that compare].
"""

from __future__ import annotations

from tracegraph.runtime.definition.nodes import KernelCode, KernelNode, LaunchShape

_SMALL = LaunchShape((1, 1, 1), (32, 1, 1))
# A thread of `read_bytes` takes so many bytes in one load.
LOAD_BYTES = 16
READ_THREADS = 1024

NOTHING = KernelCode(
    "do_nothing",
    b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry do_nothing(.param .u64 unused)
{
    ret;
}
\0""",
)

# As XLA's kernels for newer GPUs begin, see Note [Programmatic edges].
NOTHING_AFTER_WAIT = KernelCode(
    "do_nothing_after_wait",
    b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry do_nothing_after_wait(.param .u64 unused)
{
    griddepcontrol.wait;
    ret;
}
\0""",
)

# Keeps one place of the GPU busy for so many cycles, while the host enqueues what is timed.
SPIN = KernelCode(
    "spin",
    b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry spin(.param .u64 cycles)
{
    .reg .pred %is_early;
    .reg .b64  %wanted, %start, %now, %passed;

    ld.param.u64  %wanted, [cycles];
    mov.u64       %start, %clock64;
NEXT:
    mov.u64       %now, %clock64;
    sub.u64       %passed, %now, %start;
    setp.lt.u64   %is_early, %passed, %wanted;
    @%is_early bra NEXT;
    ret;
}
\0""",
)

# Reads every byte from `first` to `end`, so that the caches hold these and nothing else. The bytes
# are zeros, so that nothing is ever written: what it read would have to be written back later, in
# the time of the node that is measured. The store is there for the compiler, which would leave the
# loads out without it.
READ_BYTES = KernelCode(
    "read_bytes",
    b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry read_bytes(.param .u64 first, .param .u64 end, .param .u64 stride)
{
    .reg .pred %is_end, %is_zero;
    .reg .b32  %block, %thread, %threads, %a, %b, %c, %d, %sum;
    .reg .b64  %place, %last, %step;

    mov.u32       %block, %ctaid.x;
    mov.u32       %thread, %tid.x;
    mov.u32       %threads, %ntid.x;
    mad.lo.u32    %thread, %block, %threads, %thread;
    ld.param.u64  %place, [first];
    ld.param.u64  %last, [end];
    ld.param.u64  %step, [stride];
    mad.wide.u32  %place, %thread, 16, %place;
    mov.u32       %sum, 0;
NEXT:
    setp.ge.u64   %is_end, %place, %last;
    @%is_end bra  END;
    ld.global.v4.u32 {%a, %b, %c, %d}, [%place];
    or.b32        %sum, %sum, %a;
    or.b32        %sum, %sum, %b;
    or.b32        %sum, %sum, %c;
    or.b32        %sum, %sum, %d;
    add.u64       %place, %place, %step;
    bra           NEXT;
END:
    setp.eq.u32   %is_zero, %sum, 0;
    @%is_zero bra DONE;
    ld.param.u64  %place, [first];
    st.global.u32 [%place], %sum;
DONE:
    ret;
}
\0""",
)


def make_nothing(*, waits: bool) -> KernelNode:
    """Returns a node that does nothing.

    Args:
        waits: begin with a wait, as the kernels of the graph do.
    """
    code = NOTHING_AFTER_WAIT if waits else NOTHING
    return KernelNode("nothing", code, _SMALL, (bytes(8),), (False,), waits)


def make_spin(cycles: int) -> KernelNode:
    """Returns a node that keeps the GPU busy for so many cycles of its clock."""
    return KernelNode("spin", SPIN, _SMALL, (cycles.to_bytes(8, "little"),), (False,))


def make_reading(address: int, nbytes: int, threads: int) -> KernelNode:
    """Returns a node that reads bytes.

    Args:
        address: of the first byte, a multiple of 16; all are zeros.
        nbytes: how many, a multiple of 16.
        threads: how many read at once.
    """
    blocks = max(threads // READ_THREADS, 1)
    numbers = (address, address + nbytes, blocks * READ_THREADS * LOAD_BYTES)
    return KernelNode(
        "read",
        READ_BYTES,
        LaunchShape((blocks, 1, 1), (READ_THREADS, 1, 1)),
        tuple(number.to_bytes(8, "little") for number in numbers),
        (False, False, False),
    )
