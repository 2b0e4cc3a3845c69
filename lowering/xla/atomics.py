"""Float atomics: instructions whose result depends on the order in which threads happen to add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracegraph.lowering.xla.enums import read_name
from tracegraph.lowering.xla.refusal import Refusal

FLOATS = ("F", "BF", "C")
_SCATTERS = ("scatter", "select-and-scatter")


def find_float_atomics(module: Any) -> tuple[str, ...]:
    """Returns the names of instructions that add floats at places that may coincide.

    XLA lowers a scatter to atomic operations unless its indices are known to be unique. The sum of
    floats depends on their order, so two runs of one executable may differ in the last bits.

    Args:
        module: an ``xla.HloModuleProto``.

    Raises:
        Refusal: a scatter is of a type that the schema does not have.
    """
    scatters = [
        instruction
        for computation in module.computations
        for instruction in computation.instructions
        if instruction.opcode in _SCATTERS
    ]
    computations = {each.id: each for each in module.computations}
    return tuple(each.name for each in scatters if _adds_floats(each, computations))


def _adds_floats(scatter: Any, computations: Mapping[int, Any]) -> bool:
    is_float = _is_float(scatter)
    if scatter.opcode == "select-and-scatter":
        return is_float
    if scatter.unique_indices:
        return False
    roots = [_find_root(computations.get(each)) for each in scatter.called_computation_ids]
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


def _find_root(computation: Any) -> Any:
    if computation is None:
        return None
    return next((i for i in computation.instructions if i.id == computation.root_id), None)
