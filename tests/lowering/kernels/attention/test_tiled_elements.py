"""What functions of elements have in common is found in one walk, however often it is used."""

from __future__ import annotations

from tracegraph.lowering.kernels.attention.tiled_elements import share_elements
from tracegraph.lowering.kernels.element_functions import FLOAT, ElementFunction, ElementOp

DEPTH = 60


def test_a_scalar_that_many_paths_lead_to_is_visited_once() -> None:
    # Each square is read twice: 2^60 paths lead to the sum.
    sum0, row0 = (ElementOp("variable", FLOAT, detail=name) for name in ("sum0", "row0"))
    ops = [sum0, ElementOp("exp", FLOAT, (0,)), row0, ElementOp("mul", FLOAT, (1, 2))]
    ops += [ElementOp("mul", FLOAT, (place, place)) for place in range(3, 3 + DEPTH)]
    function = ElementFunction(tuple(ops), (len(ops) - 1,))
    shared, rest = share_elements([function, function], 1, 0)
    assert [[op.opcode for op in each.ops] for each in shared] == [["variable", "exp"]]
    assert [len(each.ops) for each in rest] == [3 + DEPTH] * 2
