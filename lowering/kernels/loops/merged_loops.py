"""Merged loops: one kernel that computes the same function of many small arrays.

Note [Arithmetic of XLA]
A merged kernel has to give the bits that XLA's kernels give. XLA rounds each product before it adds
it, divides by ``div.full`` and takes roots by ``sqrt.approx``; powers and exponentials are those of
libdevice. NVRTC does the same with the options below.

Note [Addresses in a merged kernel]
A graph gives each node its parameters when it is built, and new addresses of arguments one by one.
So a merged kernel has one parameter per array, and a block picks those of its loop in a ``switch``,
which is one indirect jump.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tracegraph.lowering.element_loops import LoopFunction, LoopOp
from tracegraph.lowering.kernels.device_head import HEAD, TYPES

THREADS = 256
SYMBOL = "merged_loops"
# See Note [Arithmetic of XLA].
OPTIONS = ("--fmad=false", "--prec-div=false", "--prec-sqrt=false", "--ftz=false")

_OPERATORS = {
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "divide": "{0} / {1}",
    "maximum": "maximum({0}, {1})",
    "minimum": "minimum({0}, {1})",
    "clamp": "minimum(maximum({0}, {1}), {2})",
    "power": "powf({0}, {1})",
    "negate": "-{0}",
    "abs": "fabsf({0})",
    "sqrt": "sqrtf({0})",
    "rsqrt": "rsqrtf({0})",
    "exponential": "expf({0})",
    "log": "logf({0})",
    "and": "{0} && {1}",
    "or": "{0} || {1}",
    "not": "!{0}",
    "select": "{0} ? {1} : {2}",
}
_COMPARISONS = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}


@dataclasses.dataclass(frozen=True)
class LoopArguments:
    """Which parameters of a merged kernel one of its loops uses.

    Attributes:
        count: of its elements.
        operands: number of the parameter of each operand.
        results: of each result.
    """

    count: int
    operands: tuple[int, ...]
    results: tuple[int, ...]


def write_merged_loops(
    function: LoopFunction,
    loops: Sequence[LoopArguments],
    kinds: Sequence[str],
    *,
    waits: bool,
) -> str:
    """Returns the source of a kernel, in C++ for NVRTC.

    It takes one block per loop along the second axis of its grid, and any number along the first.

    Args:
        function: what each loop computes.
        loops: one or more.
        kinds: of each parameter XLA's name of its elements' type.
        waits: begin with a wait for the kernels before it, which needs compute capability 9.0.
    """
    parameters = ", ".join(f"{TYPES[kind]} *p{number}" for number, kind in enumerate(kinds))
    operands, results = function.operands, function.results
    names = [f"x{index}" for index in range(len(operands))]
    names += [f"y{index}" for index in range(len(results))]
    types = [TYPES[operand.kind] for operand in operands]
    types += [TYPES[function.find_kind(result)] for result in results]
    lines = [f"KERNEL({THREADS}) {SYMBOL}({parameters}) {{"]
    lines += ["    wait();"] if waits else []
    lines.append("    int count = 0;")
    lines += [f"    {kind} *{name} = nullptr;" for kind, name in zip(types, names, strict=True)]
    lines.append("    switch (blockIdx.y) {")
    for number, loop in enumerate(loops):
        chosen = zip(names, (*loop.operands, *loop.results), strict=True)
        picks = " ".join(f"{name} = p{parameter};" for name, parameter in chosen)
        lines.append(f"    case {number}: count = {loop.count}; {picks} break;")
    lines += [
        "    }",
        "    int step = gridDim.x * blockDim.x;",
        # The grid is as large as most loops need.
        "    #pragma unroll 1",
        "    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {",
        *(f"        {line}" for line in _write_body(function)),
        "    }",
        "}",
    ]
    return HEAD + "\n".join(lines) + "\n"


def _write_body(function: LoopFunction) -> list[str]:
    """Returns the statements for element ``i``: all is read before anything is written."""
    lines: list[str] = []
    for index, operand in enumerate(function.operands):
        place = "0" if operand.is_single else "i"
        lines.append(f"{TYPES[operand.kind]} v{index} = x{index}[{place}];")
    first = len(function.operands)
    for number, op in enumerate(function.ops, start=first):
        lines.append(f"{TYPES[op.kind]} v{number} = {_write_op(function, op)};")
    for index, result in enumerate(function.results):
        lines.append(f"y{index}[i] = v{result};")
    return lines


def _write_op(function: LoopFunction, op: LoopOp) -> str:
    values = [f"v{operand}" for operand in op.operands]
    if op.opcode == "constant":
        return _write_constant(op)
    if op.opcode == "compare":
        return f"{values[0]} {_COMPARISONS[op.detail]} {values[1]}"
    if op.opcode != "convert":
        return _OPERATORS[op.opcode].format(*values)
    (value,) = values
    source = function.find_kind(op.operands[0])
    if source in ("BF16", "F16"):
        value = f"widen({value})"
    if op.kind in ("BF16", "F16"):
        return f"narrow((float){value}, {TYPES[op.kind]}())"
    return f"({TYPES[op.kind]}){value}"


def _write_constant(op: LoopOp) -> str:
    if op.kind == "F32":
        return f"literal(0x{op.detail}u)"
    if op.kind in ("BF16", "F16"):
        return f"{TYPES[op.kind]}{{0x{op.detail}}}"
    if op.kind == "PRED":
        return "true" if int(op.detail, 16) else "false"
    return f"(int)0x{op.detail}u"
