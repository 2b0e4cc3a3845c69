"""Guards: the kernels that keep a loop's state where a turn may go past the loop's end.

See Note [Guarded iterations] in `lowering/xla/guard_loops.py`. Their text is made for the number of
pieces and of iterations, so that every address is a parameter. A thread moves one word of each
piece, and loads all of them before it stores one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.kernels.loops.conditions import FIRST_LINES, SET_CONDITION
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    ConditionHandle,
    KernelCode,
    KernelNode,
    KernelParameter,
    LaunchShape,
)

THREADS = 256
# By the bytes of a word: its type and its registers in piece {0}.
_WORDS = {
    16: ("v2.u64", "{{%word_{0}, %other_{0}}}"),
    4: ("u32", "%half_{0}"),
    1: ("u8", "%byte_{0}"),
}

_KERNEL = """
.address_size 64

.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);

.visible .entry {symbol}({parameters})
{{
    .reg .b32  %block, %thread, %threads;
    .reg .b64  %index, %place, %words;

    mov.u32       %block, %ctaid.x;
    mov.u32       %threads, %ntid.x;
    mov.u32       %thread, %tid.x;
    mul.wide.u32  %index, %block, %threads;
    cvt.u64.u32   %place, %thread;
    add.u64       %index, %index, %place;
{body}
}}
"""

_PIECE = """
    .reg .pred %is_in_{0};
    .reg .b16  %byte_{0};
    .reg .b32  %half_{0};
    .reg .b64  %word_{0}, %other_{0}, %from_{0}, %to_{0};
    {find_source}
    ld.param.u64  %to_{0}, [target_{0}];
    ld.param.u64  %words, [words_{0}];
    {check}
    mad.lo.u64    %from_{0}, %index, {nbytes}, %from_{0};
    mad.lo.u64    %to_{0}, %index, {nbytes}, %to_{0};
    @%is_in_{0} ld.global.{kind} {registers}, [%from_{0}];
"""

_KEEP = "ld.param.u64  %from_{0}, [source_{0}];", "setp.lt.u64   %is_in_{0}, %index, %words;"

_FIND_END = """
    .reg .pred %has_ended, %is_other;
    .reg .b32  %value;
    .reg .b64  %handle, %address;
    ld.param.u64  %handle, [handle];
    {load_flags}
    setp.ne.u16   %has_ended, %flag_{last}, 0;
    selp.u32      %value, 1, 0, %has_ended;
    setp.ne.u32   %has_ended, 0, 0;
    {look_for_end}
"""
_LOAD_FLAG = """.reg .pred %is_end_{0};
    .reg .b16 %flag_{0};
    ld.param.u64  %address, [flag_{0}];
    ld.global.u8  %flag_{0}, [%address];"""
_LOOK_FOR_END = """setp.eq.u16   %is_end_{0}, %flag_{0}, 0;
    or.pred       %has_ended, %has_ended, %is_end_{0};
    @%is_end_{0} mov.u32 %value, 0;"""
_PUT_BACK = "setp.lt.and.u64 %is_in_{0}, %index, %words, %has_ended;"
_TELL = """
    setp.ne.u64   %is_other, %index, 0;
    @%is_other bra END;
    SET_CONDITION
END:
    ret;""".replace("SET_CONDITION", SET_CONDITION.replace("call.uni", "call"))


def keep_state(name: str, pieces: Sequence[tuple[BufferUse, BufferUse]]) -> DeviceStep:
    """Returns the step that copies pieces of memory, all at once.

    Args:
        name: of the step.
        pieces: from where and to where; at least one, and none overlaps another.
    """
    sizes = [_find_word(pair) for pair in pieces]
    declared: list[str] = []
    parameters: list[KernelParameter] = []
    for number, (size, (source, target)) in enumerate(zip(sizes, pieces, strict=True)):
        declared += [f"source_{number}", f"target_{number}", f"words_{number}"]
        parameters += [source, target, _pack(source.nbytes // size)]
    body = [_write_piece(number, size, *_KEEP) for number, size in enumerate(sizes)]
    body += [*_write_stores(sizes), "    ret;"]
    symbol = "_".join(["keep_state", *map(str, sizes)])
    node = KernelNode(
        name,
        _make_code(symbol, declared, body),
        _make_shape(sizes, [source for source, _ in pieces]),
        tuple(parameters),
        (False, True, False) * len(pieces),
    )
    reads, writes = zip(*pieces, strict=True)
    return DeviceStep(node, reads=reads, writes=writes)


def end_turn(
    name: str, flags: Sequence[BufferUse], pieces: Sequence[tuple[BufferUse, Sequence[BufferUse]]]
) -> DeviceStep:
    """Returns the step that ends a turn of guarded iterations.

    It sets the handle to 1 if no flag is 0. If one before the last is, it copies the state back
    as it was after the first iteration whose flag is 0.

    Args:
        name: of the step.
        flags: one byte for each iteration: whether another is to follow.
        pieces: of the state: its place, and where it is kept after each iteration but the last.
    """
    sizes = [_find_word([target, *sources]) for target, sources in pieces]
    last = len(flags)
    declared = ["handle", *(f"flag_{number}" for number in range(1, last + 1))]
    parameters: list[KernelParameter] = [ConditionHandle.OWN, *flags]
    written = [False] * len(parameters)
    body = [
        _FIND_END.format(
            last=last,
            load_flags=_write_each(_LOAD_FLAG, range(1, last + 1)),
            look_for_end=_write_each(_LOOK_FOR_END, range(1, last)),
        )
    ]
    for number, (size, (target, sources)) in enumerate(zip(sizes, pieces, strict=True)):
        names = [f"source_{number}_{index}" for index in range(1, last)]
        declared += [f"target_{number}", f"words_{number}", *names]
        parameters += [target, _pack(target.nbytes // size), *sources]
        written += [True, False, *(False for _ in sources)]
        # From the last to the first: the first iteration that ended the loop is taken.
        find_source = [f"ld.param.u64  %from_{number}, [{names[-1]}];"]
        find_source += [
            f"@%is_end_{index} ld.param.u64 %from_{number}, [{names[index - 1]}];"
            for index in range(last - 2, 0, -1)
        ]
        body.append(_write_piece(number, size, "\n    ".join(find_source), _PUT_BACK))
    body += [*_write_stores(sizes), _TELL]
    targets = [target for target, _ in pieces]
    symbol = "_".join([f"end_turn_of_{last}", *map(str, sizes)])
    node = KernelNode(
        name,
        _make_code(symbol, declared, body),
        _make_shape(sizes, targets),
        tuple(parameters),
        tuple(written),
    )
    # The state stays as it is where the loop goes on, so its old bytes matter.
    kept = [source for _, sources in pieces for source in sources]
    reads = tuple(dict.fromkeys([*flags, *kept, *targets]))
    return DeviceStep(node, reads=reads, writes=tuple(targets))


def _write_piece(number: int, size: int, find_source: str, check: str) -> str:
    """Returns the text that loads a thread's word of a piece."""
    kind, registers = _WORDS[size]
    return _PIECE.format(
        number,
        nbytes=size,
        kind=kind,
        registers=registers.format(number),
        find_source=find_source.format(number),
        check=check.format(number),
    )


def _write_stores(sizes: Sequence[int]) -> list[str]:
    return [
        f"    @%is_in_{number} st.global.{_WORDS[size][0]} [%to_{number}], "
        f"{_WORDS[size][1].format(number)};"
        for number, size in enumerate(sizes)
    ]


def _write_each(template: str, numbers: range) -> str:
    return "\n    ".join(template.format(number) for number in numbers)


def _make_code(symbol: str, declared: Sequence[str], body: Sequence[str]) -> KernelCode:
    parameters = ", ".join(f".param .u64 {name}" for name in declared)
    text = _KERNEL.format(symbol=symbol, parameters=parameters, body="\n".join(body))
    return KernelCode(symbol, FIRST_LINES + f"{text}\0".encode())


def _make_shape(sizes: Sequence[int], pieces: Sequence[BufferUse]) -> LaunchShape:
    """Returns a thread for each word of the piece that has the most."""
    counts = [piece.nbytes // size for size, piece in zip(sizes, pieces, strict=True)]
    blocks = math.ceil(max([*counts, 1]) / THREADS)
    return LaunchShape((blocks, 1, 1), (THREADS, 1, 1))


def _find_word(pieces: Sequence[BufferUse]) -> int:
    """Returns the most bytes that one access to equal pieces may take."""
    # Buffers begin at multiples of 16.
    numbers = [number for piece in pieces for number in (piece.offset, piece.nbytes)]
    return next(size for size in _WORDS if math.gcd(*numbers) % size == 0)


def _pack(number: int) -> bytes:
    return number.to_bytes(8, "little")
