"""No loop under a lock, or in a `try`, is left past it by an interrupt where the loop goes back."""

from __future__ import annotations

import dis
from types import CodeType

from tests.oracles.loop_exits import (
    check_code,
    find_look,
    find_loop_exits,
    list_back_jumps,
    read_ranges,
)
from tests.paths import ROOT

LOOP = """
def run(lock, values):
    with lock:
        for value in values:
            if value:
                continue
            else:
                return
"""


def _compile_loop() -> CodeType:
    (code,) = (each for each in compile(LOOP, "x", "exec").co_consts if isinstance(each, CodeType))
    return code


def test_no_interrupt_leaves_a_loop_past_its_lock():
    found = []
    for room in ("tracegraph", "lowering", "runtime"):
        for path in sorted((ROOT / room).rglob("*.py")):
            found += find_loop_exits(path.read_text(), str(path.relative_to(ROOT)))
    assert found == []


def test_a_loop_whose_jump_has_no_handler_is_found():
    code = _compile_loop()
    ranges = read_ranges(code)
    assert check_code(code, ranges) == []
    looks = [find_look(each) for each in list_back_jumps(list(dis.get_instructions(code)))]
    assert looks
    for look in looks:
        parts = [
            [(start, min(end, look), to), (max(start, look + 2), end, to)]
            for start, end, to in ranges
        ]
        holed = [part for pair in parts for part in pair if part[0] < part[1]]
        assert len(check_code(code, holed)) >= 1
