"""Cells: bodies of recurrent loops, written so that one kernel can take a cell in.

Note [Cells]
A recurrent layer multiplies its state by the matrices of all gates at once, takes the result apart,
and computes from the parts, element by element, the next state and what the backward pass reads.
A block of a kernel has all that it needs of this where it computes the same columns of each part.
So the one matmul becomes one of each part, by a part of the matrix, which is cut out ahead of the
loop; and ops in between, a bias or the other matmul that is added, are taken apart like it. A body
stays as it is where this would leave parts of a matmul to XLA.

What does not wait for the state, as the matmul of an iteration's input, comes first: the cell then
belongs to the kernel of the state's matmul, and the other one runs beside the iteration before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.jax_internals import bind_op
from tracegraph.lowering.kernels.matmuls.small_matmul import MAX_MATRICES
from tracegraph.replacements.bodies import split_scan
from tracegraph.replacements.few_rows.endings import ELEMENTWISE
from tracegraph.replacements.few_rows.row_reader import expand_shape
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.match import Match
from tracegraph.replacements.splice import splice_matches
from tracegraph.replacements.wide_ops import WideOps


def open_cell(op: Op, body: Graph) -> Graph:
    """Returns a body in which a cell's matmuls are apart, in order: Note [Cells].

    Args:
        op: that has the body.
        body: as rules see it.
    """
    splits = [each for each in body.ops if each.name == "split"]
    if op.name != "scan" or not splits:
        return body
    view = GraphView(body)
    matches = [match for each in splits if (match := _match(view, each)) is not None]
    if not matches:
        return body
    apart = splice_matches(body, matches)
    _, carried, _ = split_scan(op, apart.inputs)
    return _order(apart, carried)


def count_left(body: Graph, matches: Sequence[Match]) -> int:
    """Returns how many matmuls of a body are in no match of kernels for them."""
    taken = {
        id(op)
        for match in matches
        if isinstance(match.reference, WideOps)
        for op in match.reference.ops
    }
    return sum(op.name == "dot_general" and id(op) not in taken for op in body.ops)


def _order(graph: Graph, carried: Sequence[Value]) -> Graph:
    """Returns a graph whose ops that need no carried value come first."""
    waiting: set[Operand] = set(carried)
    first: list[Op] = []
    rest: list[Op] = []
    for op in graph.ops:
        waits = not waiting.isdisjoint(op.operands)
        (rest if waits else first).append(op)
        if waits:
            waiting.update(op.results)
    return dataclasses.replace(graph, ops=(*first, *rest))


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """Computes each part of the columns of a value by itself.

    Attributes:
        split: takes the value apart.
        ops: that make it of matmuls, in their order.
        inputs: what they read.
    """

    split: Op
    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Returns the parts."""
        (width, *_), columns = self.split.params["sizes"], self.split.operands[0].aval.shape[-1]
        given: dict[Operand, Any] = dict(zip(self.inputs, arrays, strict=True))
        return [self._compute(given, start, width) for start in range(0, columns, width)]

    def _compute(self, given: Mapping[Operand, Any], start: int, width: int) -> Any:
        known: dict[Operand, Any] = {}
        for op in self.ops:
            (value,) = op.results
            pairs = zip(op.operands, _find_column_axes(op), strict=True)
            cut = [
                known[each] if each in known else _cut(given, each, axis, start, width)
                for each, axis in pairs
            ]
            known[value] = _bind(op, cut, width)
        return known[self.split.operands[0]]


def _bind(op: Op, operands: list[Any], width: int) -> Any:
    """Returns what an op makes of operands that have so many columns."""
    if op.name == "broadcast_in_dim":
        shape = (*op.results[0].shape[:-1], width)
        return lax.broadcast_in_dim(operands[0], shape, op.params["broadcast_dimensions"])
    (result,) = bind_op(op, operands)
    return result


def _match(view: GraphView, split: Op) -> Match | None:
    """Returns the match of what takes the columns of a matmul apart, or None for others."""
    value, sizes = split.operands[0], split.params["sizes"]
    if len(value.aval.shape) != 2 or split.params["axis"] != 1 or len({*sizes}) != 1:
        return None
    if len(sizes) > MAX_MATRICES:
        return None
    found: list[Op] = []
    pending = [value]
    while pending:
        each = pending.pop()
        op = view.makers.get(each)
        if op is not None and _is_alone(view, each) and _find_column_axes(op):
            found.append(op)
            pending += op.operands if op.name != "dot_general" else ()
    if not any(op.name == "dot_general" for op in found):
        return None
    ops = tuple(sorted(found, key=lambda op: view.order[id(op)]))
    own = {op.results[0] for op in ops}
    read = [each for op in ops for each in op.operands if each not in own]
    inputs = tuple(dict.fromkeys(each for each in read if isinstance(each, Value)))
    parts = Parts(split, ops, inputs)
    return Match(split, split.results, inputs, parts, parts)


def _is_alone(view: GraphView, value: Operand) -> bool:
    return len(view.uses.get(value, ())) == 1 and value not in view.graph.outputs


def _find_column_axes(op: Op) -> tuple[int | None, ...]:
    """Returns for each operand which axis has the columns of the result, or None where all have it.

    Nothing where the columns of a result are no columns of the operands.
    """
    shapes = [tuple(each.aval.shape) for each in op.operands]
    result = tuple(op.results[0].shape)
    if op.name == "dot_general":
        (_, axes), batch = op.params["dimension_numbers"]
        free = [axis for axis in range(len(shapes[1])) if axis not in axes]
        return (None, free[0]) if not any(batch) and len(free) == 1 else ()
    if op.name == "broadcast_in_dim":
        expanded = expand_shape(op)
        is_full = expanded[-1] == result[-1]
        return (len(shapes[0]) - 1 if is_full else None,)
    if op.name not in ELEMENTWISE:
        return ()
    return tuple(len(shape) - 1 if shape and shape[-1] == result[-1] else None for shape in shapes)


def _cut(
    given: Mapping[Operand, Any], operand: Operand, axis: int | None, start: int, width: int
) -> Any:
    if isinstance(operand, Literal):
        return operand.value
    array = given[operand]
    return array if axis is None else lax.slice_in_dim(array, start, start + width, axis=axis)
