"""Float atomics: instructions whose result depends on the order in which threads happen to add."""

from __future__ import annotations

from typing import Any

FLOATS = ("F", "BF", "C")


def find_float_atomics(module: Any) -> tuple[str, ...]:
    """Returns the names of instructions that add floats at places that may coincide.

    XLA lowers a scatter to atomic operations unless its indices are known to be unique. The sum of
    floats depends on their order, so two runs of one executable may differ in the last bits.

    Args:
        module: an ``xla.HloModuleProto``.
    """
    roots = {each.id: _find_root(each) for each in module.computations}
    return tuple(
        instruction.name
        for computation in module.computations
        for instruction in computation.instructions
        if _adds_floats(instruction, roots)
    )


def _adds_floats(instruction: Any, roots: dict[int, Any]) -> bool:
    if instruction.opcode == "select-and-scatter":
        return _is_float(instruction.shape)
    if instruction.opcode != "scatter" or instruction.unique_indices:
        return False
    combines = any(
        roots.get(each) is None or roots[each].opcode != "parameter"
        for each in instruction.called_computation_ids
    )
    return combines and _is_float(instruction.shape)


def _is_float(shape: Any) -> bool:
    shapes = shape.tuple_shapes or (shape,)
    kinds = shape.DESCRIPTOR.fields_by_name["element_type"].enum_type.values_by_number
    return any(kinds[each.element_type].name.startswith(FLOATS) for each in shapes)


def _find_root(computation: Any) -> Any:
    return next((i for i in computation.instructions if i.id == computation.root_id), None)
