"""Element functions written as nested tuples, and what NumPy makes of them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tracegraph.lowering.kernels.element_functions import (
    BOOL,
    FLOAT,
    INT,
    ElementFunction,
    ElementOp,
    find_type,
)

_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "exp": np.exp,
    "tanh": np.tanh,
    "int_add": np.add,
    "int_mul": np.multiply,
    "int_rem": np.remainder,
    "le": np.less_equal,
    "lt": np.less,
    "and": np.logical_and,
    "or": np.logical_or,
    "select": np.where,
    "to_float": np.float64,
}


def build(expression: Any) -> ElementFunction:
    """Returns a function of an expression.

    Args:
        expression: the name of a variable, an int or a float, an opcode with its operands, or the
            type of a load with the parameter and the index.
    """
    ops: list[ElementOp] = []

    def add(each: Any) -> int:
        op = _make_op(each, ops, add)
        if op not in ops:
            ops.append(op)
        return ops.index(op)

    result = add(expression)
    return ElementFunction(tuple(ops), (result,))


def _make_op(each: Any, ops: list[ElementOp], add: Callable[[Any], int]) -> ElementOp:
    if isinstance(each, str):
        return ElementOp(
            "variable",
            FLOAT if each.rstrip("0123456789") in ("sum", "row", "input") else INT,
            detail=each,
        )
    if isinstance(each, int):
        return ElementOp("constant", INT, detail=str(each))
    if isinstance(each, float):
        return ElementOp("constant", FLOAT, detail=struct.pack(">f", each).hex())
    name, *rest = each
    if name in (FLOAT, INT, BOOL):
        return ElementOp("load", name, (add(rest[1]),), str(rest[0]))
    operands = tuple(map(add, rest))
    return ElementOp(name, find_type(name, ops[operands[-1]].type), operands)


def evaluate(function: ElementFunction, variables: Mapping[str, Any], arrays: Sequence[Any]) -> Any:
    """Returns a function's result in float64.

    Args:
        function: what is computed.
        variables: their values, arrays that are broadcast.
        arrays: the parameters that are loaded from.
    """
    values: list[Any] = []
    for op in function.ops:
        given = [values[number] for number in op.operands]
        if op.opcode == "variable":
            values.append(variables[op.detail])
        elif op.opcode == "constant":
            is_float = op.type == FLOAT
            (bits,) = struct.unpack(">f", bytes.fromhex(op.detail)) if is_float else (0,)
            values.append(bits if is_float else int(op.detail))
        elif op.opcode == "load":
            loaded = arrays[int(op.detail)].ravel()[given[0]]
            values.append(loaded.astype(np.float64) if op.type == FLOAT else loaded)
        else:
            values.append(_NUMPY[op.opcode](*given))
    return values[function.results[0]]
