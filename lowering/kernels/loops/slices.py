"""Slices: the kernel that copies a piece of an array whose place moves with the turns of a loop.

A memcpy node of a graph has fixed addresses. XLA computes the address of such a piece on the host,
once per iteration; here the kernel does, from the turn that the loop has counted.
"""

from __future__ import annotations

import dataclasses
import math

from tracegraph.lowering.device_program import DeviceStep, Step
from tracegraph.lowering.kernels.loops.conditions import FIRST_LINES
from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, KernelNode, LaunchShape

THREADS = 256
# As many blocks as keep the memory of a large GPU busy.
MAX_BLOCKS = 1056
_WORDS = {
    16: ("v2.u64", "{%word, %other}"),
    8: ("u64", "%word"),
    4: ("u32", "%half"),
    1: ("u8", "%byte"),
}

_TEMPLATE = """
.visible .entry copy_slice_{nbytes}(
    .param .u64 source, .param .u64 target, .param .u64 counter, .param .u64 words,
    .param .s64 source_first, .param .s64 source_step, .param .s64 source_last,
    .param .s64 target_first, .param .s64 target_step, .param .s64 target_last)
{{
    .reg .pred %is_end;
    .reg .b16  %byte;
    .reg .b32  %half, %block, %thread, %threads, %blocks;
    .reg .b64  %word, %other, %turn, %index, %stride, %words, %source, %target;
    .reg .b64  %offset, %step, %last, %from, %to;

    ld.param.u64  %source, [counter];
    ld.global.u32 %half, [%source];
    cvt.s64.u32   %turn, %half;

    ld.param.s64  %offset, [source_first];
    ld.param.s64  %step, [source_step];
    ld.param.s64  %last, [source_last];
    mad.lo.s64    %offset, %turn, %step, %offset;
    max.s64       %offset, %offset, 0;
    min.s64       %offset, %offset, %last;
    ld.param.u64  %source, [source];
    add.s64       %source, %source, %offset;

    ld.param.s64  %offset, [target_first];
    ld.param.s64  %step, [target_step];
    ld.param.s64  %last, [target_last];
    mad.lo.s64    %offset, %turn, %step, %offset;
    max.s64       %offset, %offset, 0;
    min.s64       %offset, %offset, %last;
    ld.param.u64  %target, [target];
    add.s64       %target, %target, %offset;

    mov.u32       %block, %ctaid.x;
    mov.u32       %blocks, %nctaid.x;
    mov.u32       %thread, %tid.x;
    mov.u32       %threads, %ntid.x;
    mul.wide.u32  %index, %block, %threads;
    cvt.u64.u32   %offset, %thread;
    add.u64       %index, %index, %offset;
    mul.wide.u32  %stride, %blocks, %threads;
    ld.param.u64  %words, [words];
NEXT:
    setp.ge.u64   %is_end, %index, %words;
    @%is_end bra  END;
    mad.lo.u64    %from, %index, {nbytes}, %source;
    mad.lo.u64    %to, %index, {nbytes}, %target;
    ld.global.{type} {register}, [%from];
    st.global.{type} [%to], {register};
    add.u64       %index, %index, %stride;
    bra           NEXT;
END:
    ret;
}}
"""

_SLICES = [
    _TEMPLATE.format(nbytes=nbytes, type=kind, register=register)
    for nbytes, (kind, register) in _WORDS.items()
]
COPY_SLICE = FIRST_LINES + "".join([".address_size 64\n", *_SLICES, "\0"]).encode()


@dataclasses.dataclass(frozen=True)
class MovingUse:
    """A piece of a buffer that is somewhere else in every turn of a loop.

    Attributes:
        whole: the bytes in which it moves.
        nbytes: its own size.
        first: its offset in turn 0, in bytes; what is out of bounds is moved inside.
        step: how far it moves per turn.
    """

    whole: BufferUse
    nbytes: int
    first: int
    step: int = 0

    @property
    def last(self) -> int:
        """The greatest offset at which it is within its bounds."""
        return self.whole.nbytes - self.nbytes

    def find(self, turn: int) -> BufferUse:
        """Returns its bytes in one turn.

        Example:
            >>> MovingUse(BufferUse("a", 0, 64), 16, 16, 32).find(1)
            BufferUse(buffer='a', offset=48, nbytes=16)
        """
        offset = min(max(self.first + turn * self.step, 0), self.last)
        return BufferUse(self.whole.buffer, self.whole.offset + offset, self.nbytes)


@dataclasses.dataclass(frozen=True)
class Slice:
    """What a step of `copy_slice` does; see there."""

    name: str
    source: MovingUse
    target: MovingUse
    counter: BufferUse

    @property
    def is_read(self) -> bool:
        """True where the copy has one place, and what it is of moves."""
        return bool(self.source.step) and self.target.nbytes == self.target.whole.nbytes


def read_slice(step: Step) -> Slice | None:
    """Returns what a step of `copy_slice` does, or None for any other step.

    Example:
        >>> piece = MovingUse(BufferUse("a", 0, 64), 16, 16, 32)
        >>> place = MovingUse(BufferUse("b", 0, 16), 16, 0)
        >>> step = copy_slice("copy", piece, place, BufferUse("c", 0, 4))
        >>> read_slice(step) == Slice("copy", piece, place, BufferUse("c", 0, 4))
        True
    """
    node = step.node if isinstance(step, DeviceStep) else None
    if not isinstance(node, KernelNode) or node.code.cubin is not COPY_SLICE:
        return None
    source, target, counter, *packed = node.parameters
    assert isinstance(source, BufferUse)
    assert isinstance(target, BufferUse)
    assert isinstance(counter, BufferUse)
    numbers = [
        int.from_bytes(each, "little", signed=True) for each in packed if isinstance(each, bytes)
    ]
    _, from_first, from_step, from_last, to_first, to_step, to_last = numbers
    return Slice(
        node.name,
        MovingUse(source, source.nbytes - from_last, from_first, from_step),
        MovingUse(target, target.nbytes - to_last, to_first, to_step),
        counter,
    )


def copy_slice(name: str, source: MovingUse, target: MovingUse, counter: BufferUse) -> DeviceStep:
    """Returns the step that copies one piece to another, both where they are in this turn.

    Args:
        name: of the step.
        source: what is read.
        target: what is written, of the same size.
        counter: four bytes: how many turns are over.
    """
    word_bytes = _find_word(source, target)
    words = source.nbytes // word_bytes
    blocks = min(max(math.ceil(words / THREADS), 1), MAX_BLOCKS)
    numbers = (
        words,
        *(source.first, source.step, source.last),
        *(target.first, target.step, target.last),
    )
    node = KernelNode(
        name,
        KernelCode(f"copy_slice_{word_bytes}", COPY_SLICE),
        LaunchShape((blocks, 1, 1), (THREADS, 1, 1)),
        (
            source.whole,
            target.whole,
            counter,
            *(each.to_bytes(8, "little", signed=True) for each in numbers),
        ),
        (False, True) + (False,) * (1 + len(numbers)),
    )
    # It keeps what is around the piece, so the old bytes of the target matter.
    is_kept = target.whole.nbytes != target.nbytes
    reads = (source.whole, counter, *([target.whole] if is_kept else []))
    return DeviceStep(node, reads=reads, writes=(target.whole,))


def _find_word(source: MovingUse, target: MovingUse) -> int:
    """Returns the most bytes that one access may take wherever the pieces are."""
    numbers = [source.nbytes]
    for use in (source, target):
        # Buffers begin at multiples of 16, and out of bounds means at 0 or at the last offset.
        numbers += [use.whole.offset, use.first, use.step, use.last]
    return next(size for size in _WORDS if math.gcd(*numbers) % size == 0)
