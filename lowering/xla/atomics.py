"""Float atomics: instructions whose result depends on the order in which threads happen to add."""

from __future__ import annotations

from typing import Any

from tracegraph.lowering.xla.computations import Computations
from tracegraph.lowering.xla.enums import read_name
from tracegraph.lowering.xla.refusal import Refusal

FLOATS = ("F", "BF", "C")
_SCATTERS = ("scatter", "select-and-scatter")


def find_float_atomics(computations: Computations) -> tuple[str, ...]:
    """Returns the names of instructions that add floats at places that may coincide.

    XLA lowers a scatter to atomic operations unless its indices are known to be unique. The sum of
    floats depends on their order, so two runs of one executable may differ in the last bits.

    Args:
        computations: of the program.

    Raises:
        Refusal: a scatter is of a type that the schema does not have.
    """
    scatters = computations.list_instructions(*_SCATTERS)
    return tuple(each.name for each in scatters if _adds_floats(each, computations))


def _adds_floats(scatter: Any, computations: Computations) -> bool:
    is_float = _is_float(scatter)
    if scatter.opcode == "select-and-scatter":
        return is_float
    if scatter.unique_indices:
        return False
    roots = [_find_root(computations, each) for each in scatter.called_computation_ids]
    return is_float and any(root is None or root.opcode != "parameter" for root in roots)


def _is_float(scatter: Any) -> bool:
    kinds = [
        read_name(shape, "element_type") for shape in scatter.shape.tuple_shapes or (scatter.shape,)
    ]
    for kind in kinds:
        # A number stands for a type without a name.
        if kind.lstrip("-").isdigit():
            raise Refusal(f"has the {scatter.opcode} `{scatter.name}` of the unknown type {kind}")
    return any(kind.startswith(FLOATS) for kind in kinds)


def _find_root(computations: Computations, number: int) -> Any:
    if number not in computations:
        return None
    root = computations.read(number).root_id
    return next((each for each in computations[number].values() if each.id == root), None)
