"""Finds loops that an interrupt leaves past the `with` or `try` around them.

The interpreter looks for interrupts where a loop goes back. Python 3.13 compiles a condition at the
end of a loop's body, or of a comprehension, to a jump that it forgets in the table of handlers: an
interrupt there ends the function without `__exit__`, `except` or `finally`, so that a lock stays
held for ever. Up to Python 3.12 the interpreter looks behind the jump, where the table is asked for
the instruction before the loop's first.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any, TypeAlias

# First offset, end, and the offset of the handler.
Range: TypeAlias = tuple[int, int, int]


def find_loop_exits(source: str, name: str) -> list[str]:
    """Returns the places of such loops in a file.

    Args:
        source: text of the file.
        name: of the file.
    """
    found = []
    for code in _list_codes(compile(source, name, "exec")):
        found += [f"{name}:{line} {code.co_name}" for line in check_code(code, read_ranges(code))]
    return found


def check_code(code: CodeType, ranges: Sequence[Range]) -> list[int]:
    """Returns the lines of such loops in one function, with a table of handlers."""
    instructions = list(dis.get_instructions(code))
    names = {each.offset: each.opname for each in instructions}
    lines = []
    for each in list_back_jumps(instructions):
        has_handler = _find_handler(each.argval, ranges, names) is not None
        if has_handler and _find_handler(find_look(each), ranges, names) is None:
            lines.append((each.positions and each.positions.lineno) or 0)
    return lines


def list_back_jumps(instructions: Sequence[dis.Instruction]) -> list[dis.Instruction]:
    """Returns the jumps back where the interpreter looks for interrupts."""
    backward = [each for each in instructions if "JUMP_BACKWARD" in each.opname]
    return [each for each in backward if "NO_INTERRUPT" not in each.opname]


def find_look(jump: dis.Instruction) -> int:
    """Returns the offset for which the table is asked if an interrupt comes at a jump back."""
    return jump.offset if sys.version_info >= (3, 13) else jump.argval - 2


def read_ranges(code: CodeType) -> list[Range]:
    """Returns the table of handlers of a function."""
    parse: Any = vars(dis)["_parse_exception_table"]
    return [(each.start, each.end, each.target) for each in parse(code)]


def _find_handler(offset: int, ranges: Sequence[Range], names: dict[int, str]) -> int | None:
    """Returns the handler of the code around an instruction; that of a comprehension is none."""
    while True:
        targets = [target for start, end, target in ranges if start <= offset < end]
        # A generator's own handler only changes a StopIteration.
        if not targets or names[targets[0]] == "CALL_INTRINSIC_1":
            return None
        if names[targets[0]] != "SWAP":
            return targets[0]
        offset = targets[0]


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _list_codes(each)
