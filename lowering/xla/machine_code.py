"""Whether a kernel's machine code waits for the kernels before it before it touches memory.

Note [Loads ahead of the wait]
XLA writes ``griddepcontrol.wait`` as the first instruction of a kernel and says so (``use_pdl``).
But it also loads what a kernel only reads by ``ld.global.nc``, which promises that it does not
change while the kernel runs, and on that promise ptxas may move such a load ahead of the wait. It
does where the address needs no arithmetic: for scalars that an earlier kernel has computed. Started
early, such a kernel reads the bytes of the replay before. On an H200 one capture in six of a
dropout of eight elements was refused by its verification, and others drew wrong numbers later. So
the word of XLA is not taken: the instructions of the code are read up to its wait, and all of them
have to be known to touch no memory.

The encoding is that of compute capability 7.0 and later: 16 bytes an instruction, its operation in
the lowest nine bits, the predicate in bits 12 to 15. NVIDIA does not document it; the numbers below
are what nvdisasm 13 prints for code for an H200 and for Blackwell. What is not known counts as a
load: then the edge to the kernel is a full one, which is right and slower.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from tracegraph.runtime.definition.nodes import KernelCode

_ELF = b"\x7fELF\x02\x01"
_INSTRUCTION = struct.Struct("<QQ")
# Of an ELF file of 64 bits: where its section headers are; their size, count and the one of names.
_SECTIONS_AT, _COUNTS_AT = 0x28, 0x3A
_SECTION = struct.Struct("<IIQQQQIIQQ")
_OPERATION_MASK = 0x1FF
_PREDICATE_SHIFT, _PREDICATE_MASK, _ALWAYS = 12, 0xF, 7
# What the wait is called in machine code.
ACQBULK = 0x02E
# Those that compute in registers, or read constants: parameters among them.
HARMLESS = {
    "MOV": 0x002,
    "CS2R": 0x005,
    "SEL": 0x007,
    "ISETP": 0x00C,
    "IADD3": 0x010,
    "LEA": 0x011,
    "LOP3": 0x012,
    "SHF": 0x019,
    "PLOP3": 0x01C,
    "IMAD": 0x024,
    "IMAD.WIDE": 0x025,
    "IMAD.HI": 0x027,
    "HFMA2": 0x031,
    "HFMA2.MMA": 0x035,
    "VIADD": 0x036,
    "UMOV": 0x082,
    "UISETP": 0x08C,
    "UIADD3": 0x090,
    "ULEA": 0x091,
    "ULOP3": 0x092,
    "USHF": 0x099,
    "UIMAD": 0x0A5,
    "ULDC": 0x0B9,
    "NOP": 0x118,
    "S2R": 0x119,
    "LDC": 0x182,
    "LDCU": 0x1AC,
    "S2UR": 0x1C3,
}
_HARMLESS = frozenset(HARMLESS.values())


def waits_first(code: KernelCode) -> bool:
    """True for a kernel that always waits, and touches no memory before it does.

    See Note [Loads ahead of the wait]. False for PTX: the driver's compiler moves loads, too.

    Args:
        code: the image, a cubin or PTX, and the symbol.
    """
    for operation, predicate in _read_operations(_find_text(code)):
        if operation == ACQBULK:
            return predicate == _ALWAYS
        if operation not in _HARMLESS:
            return False
    return False


def _find_text(code: KernelCode) -> bytes:
    """Returns the instructions of a kernel; none if the image is no ELF file that holds them."""
    image, wanted = code.cubin, b".text." + code.symbol.encode() + b"\0"
    if not image.startswith(_ELF):
        return b""
    try:
        (start,) = struct.unpack_from("<Q", image, _SECTIONS_AT)
        size, count, names = struct.unpack_from("<HHH", image, _COUNTS_AT)
        sections = [_SECTION.unpack_from(image, start + size * index) for index in range(count)]
        names_at = sections[names][4]
    except (struct.error, IndexError, OverflowError):
        return b""
    for section in sections:
        name_at, (begin, nbytes) = names_at + section[0], section[4:6]
        if image.startswith(wanted, name_at):
            return image[begin : begin + nbytes]
    return b""


def _read_operations(text: bytes) -> Iterator[tuple[int, int]]:
    size = _INSTRUCTION.size
    for begin in range(0, len(text) // size * size, size):
        word, _ = _INSTRUCTION.unpack_from(text, begin)
        yield word & _OPERATION_MASK, word >> _PREDICATE_SHIFT & _PREDICATE_MASK
