"""Float atomics: instructions whose result depends on the order in which threads happen to add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracegraph.lowering.xla.enums import read_name

FLOATS = ("F", "BF", "C")
_SCATTERS = ("scatter", "select-and-scatter")


def find_float_atomics(module: Any) -> tuple[str, ...]:
    """Returns the names of instructions that add floats at places that may coincide.

    XLA lowers a scatter to atomic operations unless its indices are known to be unique. The sum of
    floats depends on their order, so two runs of one executable may differ in the last bits.

    Args:
        module: an ``xla.HloModuleProto``.
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
    if scatter.opcode == "select-and-scatter":
        return _is_float(scatter.shape)
    if scatter.unique_indices:
        return False
    roots = [_find_root(computations.get(each)) for each in scatter.called_computation_ids]
    combines = any(root is None or root.opcode != "parameter" for root in roots)
    return combines and _is_float(scatter.shape)


def _is_float(shape: Any) -> bool:
    shapes = shape.tuple_shapes or (shape,)
    return any(read_name(each, "element_type").startswith(FLOATS) for each in shapes)


def _find_root(computation: Any) -> Any:
    if computation is None:
        return None
    return next((i for i in computation.instructions if i.id == computation.root_id), None)
