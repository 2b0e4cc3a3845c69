"""Lifting: every closed-over array is one named constant."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tracegraph.ir.graph import Constant, Graph, Op, Operand, Value


@dataclasses.dataclass(frozen=True)
class LiftConstants:
    """Makes one constant of each closed-over array, in order of first use.

    An array that several calls close over is one constant; an array written into an op becomes
    one. Scalars written into ops stay there.
    """

    name: str = "lift-constants"

    def apply(self, graph: Graph) -> Graph:
        """Returns the graph with its constants ``c0``, ``c1``, ... in order of first use."""
        lifter = _Lifter(graph)
        ops = tuple([lifter.rewrite(op) for op in graph.ops])
        outputs = tuple(lifter.lift(operand) for operand in graph.outputs)
        constants = tuple(
            dataclasses.replace(constant, name=f"c{index}")
            for index, constant in enumerate(lifter.used.values())
        )
        return dataclasses.replace(graph, constants=constants, ops=ops, outputs=outputs)


class _Lifter:
    """The constants used so far, by the array that they hold."""

    def __init__(self, graph: Graph) -> None:
        self._next = graph.next_number
        self._known = {constant.value: constant for constant in graph.constants}
        self.used: dict[tuple[Any, ...], Constant] = {}

    def rewrite(self, op: Op) -> Op:
        operands = tuple([self.lift(operand) for operand in op.operands])
        # Operands compare by identity.
        if operands == op.operands:
            return op
        return Op(op.results, op.primitive, operands, op.params, op.subgraphs, op.origin)

    def lift(self, operand: Operand) -> Operand:
        constant = self._find_constant(operand)
        if constant is None:
            return operand
        return self.used.setdefault(_identify(constant), constant).value

    def _find_constant(self, operand: Operand) -> Constant | None:
        if isinstance(operand, Value):
            return self._known.get(operand)
        if np.ndim(operand.value) == 0:
            return None
        value = Value(self._next, operand.aval)
        self._next += 1
        return Constant(value, "", operand.value)


def _identify(constant: Constant) -> tuple[Any, ...]:
    array, aval = constant.array, constant.value.aval
    if not isinstance(array, np.ndarray):
        return (id(array), str(aval))
    # JAX wraps a NumPy array in a new object at each use: the address identifies it.
    interface = array.__array_interface__
    return (interface["data"], interface["strides"], array.shape, str(array.dtype), str(aval))
