"""Runs the PTX of kernels that load, select and store, thread after thread, on host memory.

Of the language it knows what `guards.py` and `counters.py` of `lowering/kernels/loops/` write;
anything else is an error.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from tracegraph.runtime.definition.nodes import KernelNode

_CELLS: Mapping[str, Any] = {
    "u8": ctypes.c_uint8,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
}
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
}


def run_node(node: KernelNode, values: dict[int, int], parameters: tuple[bytes, ...]) -> None:
    """Launches a node's kernel.

    Args:
        node: its code is text.
        values: those of the handles of conditional nodes, which the kernel may set.
        parameters: the bytes of each, addresses of host memory among them.
    """
    names, instructions = _parse(node.code.cubin.decode().rstrip("\0"), node.code.symbol)
    assert len(names) == len(parameters), node.code.symbol
    numbers = dict(zip(names, (int.from_bytes(p, "little") for p in parameters), strict=True))
    blocks, threads = node.shape.grid[0], node.shape.block[0]
    for block, thread in itertools.product(range(blocks), range(threads)):
        registers = {"%ctaid.x": block, "%ntid.x": threads, "%tid.x": thread}
        _run_thread(instructions, registers, numbers, values)


@functools.cache
def _parse(text: str, symbol: str) -> tuple[list[str], list[tuple[str, ...]]]:
    """Returns the names of the parameters, and predicate, word and operands of each statement."""
    head = re.search(rf"\.visible \.entry {symbol}\(([^)]*)\)\s*\{{(.*)\}}", text, re.DOTALL)
    assert head is not None, f"{symbol} is no entry"
    names = [each.split()[-1] for each in head[1].split(",")]
    # Words of memory that come as two registers, `{%a, %b}`, stay together.
    body = re.sub(r"\{(%\w+), (%\w+)\}", r"\1|\2", head[2])
    body = re.sub(r"(\w+):\s", r"label \1; ", re.sub(r"[{}]", " ", body))
    found = []
    for statement in (each.strip() for each in body.split(";")):
        if not statement or statement.startswith((".reg", ".param")):
            continue
        predicate, statement = (
            statement.split(maxsplit=1) if statement.startswith("@") else ("", statement)
        )
        word, _, rest = statement.partition(" ")
        found.append(
            (predicate, word, *(re.sub(r"[\[\]()]", "", e).strip() for e in rest.split(",")))
        )
    return names, found


def _run_thread(
    instructions: list[tuple[str, ...]],
    registers: dict[str, int],
    parameters: Mapping[str, int],
    values: dict[int, int],
) -> None:
    passed: dict[str, int] = {}

    def read(operand: str) -> int:
        return registers[operand] if operand.startswith("%") else int(operand)

    place = 0
    while True:
        predicate, word, *operands = instructions[place]
        place += 1
        if predicate and bool(registers[predicate.lstrip("@!")]) == predicate.startswith("@!"):
            continue
        kind, *parts = word.split(".")
        if kind == "ret":
            return
        if kind == "bra":
            place = next(
                i for i, each in enumerate(instructions) if each[1:] == ("label", operands[0])
            )
        elif word.startswith("st.param"):
            passed[operands[0]] = read(operands[1])
        elif kind == "call":
            assert operands[0] == "cudaGraphSetConditional", operands
            values[passed[operands[1]]] = passed[operands[2]]
        elif word.startswith("ld.param"):
            registers[operands[0]] = parameters[operands[1]]
        elif word.startswith(("ld.global", "st.global")):
            _access(kind, parts, operands, registers)
        elif kind != "label":
            registers[operands[0]] = _compute(kind, parts, list(map(read, operands[1:])))


def _access(kind: str, parts: list[str], operands: list[str], registers: dict[str, int]) -> None:
    """Loads or stores one word, or two in one access."""
    address, names = operands if kind == "st" else reversed(operands)
    cell = _CELLS[parts[-1]]
    names = names.split("|")
    assert len(names) == (2 if "v2" in parts else 1)
    whole = len(names) * ctypes.sizeof(cell)
    assert registers[address] % whole == 0, f"{registers[address]:#x} is no multiple of {whole}"
    for index, name in enumerate(names):
        found = cell.from_address(registers[address] + index * ctypes.sizeof(cell))
        if kind == "ld":
            registers[name] = found.value
        else:
            found.value = registers[name]


def _compute(kind: str, parts: list[str], numbers: list[int]) -> int:
    """Returns what an instruction computes."""
    if kind == "setp":
        is_so = _COMPARISONS[parts[0]](numbers[0], numbers[1])
        return int(is_so and (bool(numbers[2]) if "and" in parts else True))
    if kind == "selp":
        return numbers[0] if numbers[2] else numbers[1]
    if kind in ("mov", "cvt"):
        return numbers[0]
    if kind == "mad":
        return numbers[0] * numbers[1] + numbers[2]
    if kind == "min":
        return min(numbers)
    if kind == "sub":
        return numbers[0] - numbers[1]
    if kind == "add":
        return numbers[0] + numbers[1]
    if kind == "mul":
        return numbers[0] * numbers[1]
    if kind == "or":
        return numbers[0] | numbers[1]
    raise AssertionError(f"unknown instruction: {'.'.join([kind, *parts])}")
