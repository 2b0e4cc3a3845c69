"""Images of kernels as ptxas lays them out, with instructions of a test's choice."""

from __future__ import annotations

import struct
from collections.abc import Sequence

ALWAYS, NEVER = 7, 15
LDC, S2R, IADD3, LDG, STG, EXIT, WAIT = 0xB82, 0x919, 0x210, 0x981, 0x986, 0x94D, 0x82E


def encode(operation: int, predicate: int = ALWAYS) -> bytes:
    """Returns an instruction with its form; its operands are of no importance."""
    return struct.pack("<QQ", 0xFF017 << 44 | predicate << 12 | operation, 0x000FE200000000)


def make_image(kernels: dict[str, Sequence[bytes]]) -> bytes:
    """Returns an ELF file with one section of instructions per kernel."""
    texts = [b"".join(instructions) for instructions in kernels.values()]
    names = b"\0.shstrtab\0" + b"".join(f".text.{name}\0".encode() for name in kernels)
    head, size = 64, 64
    begins, rows = head + len(names), [bytes(size)]
    rows.append(struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, head, len(names), 0, 0, 1, 0))
    for name, text in zip(kernels, texts, strict=True):
        name_at = names.index(f".text.{name}\0".encode())
        rows.append(struct.pack("<IIQQQQIIQQ", name_at, 1, 6, 0, begins, len(text), 0, 0, 128, 0))
        begins += len(text)
    header = b"\x7fELF\x02\x01" + bytes(0x22) + struct.pack("<Q", begins)
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", size, len(rows), 1)
    return b"".join([header, names, *texts, *rows])


def make_waiting_image(symbol: str) -> bytes:
    """Returns a kernel that begins with a wait."""
    return make_image({symbol: [encode(each) for each in (LDC, WAIT, LDG, STG, EXIT)]})
