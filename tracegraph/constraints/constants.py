"""What a graph closes over: which arrays, and the note `large-constant`.

It is legal, but every graph keeps its own copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from tracegraph.constraints.dependence import iterate_ops
from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import Constant, Graph, Value
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


def list_embedded(graph: Graph, inputs: Collection[str]) -> list[Any]:
    """Returns the closed-over arrays that are no inputs of a graph; scalars are left out.

    Args:
        graph: of a signature.
        inputs: names of the inputs of its lowering.
    """
    own = [each.array for each in graph.constants if f"%{each.name}" not in inputs]
    found = {identify(each): each for each in (*own, *list_inner_arrays(graph)) if np.ndim(each)}
    return [*found.values()]


def identify(array: Any) -> Any:
    """Returns what tells an array apart from all others that are held now."""
    if not isinstance(array, np.ndarray):
        return id(array)
    # JAX wraps a NumPy array in a new object at each use: the address identifies it.
    place = array.__array_interface__
    return (place["data"], place["strides"], array.shape, array.dtype.str)


def list_inner_arrays(graph: Graph) -> Iterator[Any]:
    """Yields the closed-over arrays of the graphs that ops hold, which are in no input."""
    for op in graph.ops:
        for _, inner in op.subgraphs:
            yield from (each.array for each in inner.constants)
            operands = [operand for op in inner.ops for operand in op.operands]
            yield from (each.value for each in operands if not isinstance(each, Value))
            yield from list_inner_arrays(inner)


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
