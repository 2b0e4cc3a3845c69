"""The note `large-constant`: legal, but every graph keeps its own copy of what it closes over."""

from __future__ import annotations

from typing import Any

from tracegraph.constraints.dependence import iterate_ops
from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import Constant, Graph
from tracegraph.ir.printer import print_type

_MEBIBYTE = 1 << 20
# From here on a closed-over array is an input of the graph, see Note [Embedded constants].
LARGE_CONSTANT_BYTES = _MEBIBYTE


def find_large_constants(
    graph: Graph, limit_bytes: int = LARGE_CONSTANT_BYTES
) -> tuple[Violation, ...]:
    """Finds closed-over arrays that a user would rather pass as arguments.

    Args:
        graph: with its constants lifted.
        limit_bytes: the smallest size that is reported.

    Returns:
        One note per array, in order. The function is captured all the same.
    """
    return tuple(
        _make_constant_violation(graph, constant)
        for constant in graph.constants
        if measure_bytes(constant.array) >= limit_bytes
    )


def measure_bytes(array: Any) -> int:
    """Returns the size of a closed-over array."""
    return int(getattr(array, "nbytes", 0))


def _make_constant_violation(graph: Graph, constant: Constant) -> Violation:
    value = constant.value
    op = next((op for op in iterate_ops(graph) if value in op.operands), None)
    place = f"the results of `{graph.name}`" if op is None else locate_op(op)
    size = measure_bytes(constant.array) / _MEBIBYTE
    return Violation(
        "large-constant",
        f"`{graph.name}` closes over an array of {size:.1f} MiB (`{constant.name}`, "
        f"{print_type(value.aval)})",
        place,
        "the graph keeps its own copy, so replays do not see a new array assigned to the variable; "
        "`jax.jit` folds it into its program, so the last bits of results may differ",
        "pass it as an argument, donated if it changes",
        op,
    )
