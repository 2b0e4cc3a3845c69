"""Factors and gradients: which matmuls of a graph are those of one forward or backward pass.

The derivative of a matmul multiplies the gradient of its result by each of its operands, the very
values that it had. So the matmuls of a backward pass are found from those of the forward pass: the
gradient of the scores is what is multiplied by the queries and by the keys, the gradient of the
result is what is multiplied by the values and by the shares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.replacements.attention.line_matmuls import (
    COLUMN,
    ROW,
    LineMatmul,
    count_lines,
    find_depth,
    list_groups,
    place_side,
    runs_on_tensor_cores,
    spread_free,
)
from tracegraph.replacements.attention.softmax_chain import ELEMENT, list_free
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.indices import Index, list_variables, make_variable
from tracegraph.replacements.places import Indices


@dataclasses.dataclass(frozen=True)
class Factor:
    """A matmul that adds up lines, each times an element of a matrix of weights.

    Attributes:
        op: the matmul.
        side: which operand has the lines.
        along: the variable that counts these.
        lines: place of an element of a line.
        weights: place of a weight, of which there is one for each row and column.
        result: place of an element of the result.
    """

    op: Op
    side: int
    along: str
    lines: Indices
    weights: Indices
    result: Indices

    @property
    def matrix(self) -> Operand:
        """The weights."""
        return self.op.operands[1 - self.side]

    @property
    def along_result(self) -> str:
        """The variable that counts the lines of the result."""
        return ROW if self.along == COLUMN else COLUMN

    def list_result_names(self) -> list[str]:
        """Returns the variables of the result's axes that have more than one element."""
        return [name for index in self.result for name in sorted(list_variables(index))]


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of queries and keys.

    Attributes:
        scores: the matmul of queries and keys.
        of_rows: adds up keys to the gradient of each query.
        of_columns: adds up queries to the gradient of each key.
    """

    scores: LineMatmul
    of_rows: Factor
    of_columns: Factor


def list_gradients(view: GraphView, op: Op) -> Iterator[Gradients]:
    """Yields what may be the gradients of a matmul: both have the same weights."""
    for left in (0, 1):
        scores = make_line_matmul(op, left)
        if scores is None:
            continue
        for of_rows in list_factors(view, scores, 1 - left):
            for of_columns in list_factors(view, scores, left):
                is_one = of_rows.matrix == of_columns.matrix
                if is_one and of_rows.weights == of_columns.weights:
                    yield Gradients(scores, of_rows, of_columns)


def make_line_matmul(op: Op, left: int) -> LineMatmul | None:
    """Returns a matmul of lines, with the rows of one operand, if it is one."""
    if op.name != "dot_general" or not find_depth(op) or not runs_on_tensor_cores(op):
        return None
    free = [
        spread_free(op, side, make_variable(name, count_lines(op, side)))
        for side, name in enumerate((ROW, COLUMN) if left == 0 else (COLUMN, ROW))
    ]
    if free[0] is None or free[1] is None:
        return None
    return LineMatmul(op, (*list_groups(op), *free[0], *free[1]), left)


def make_mix(op: Op, side: int) -> Factor | None:
    """Returns a matmul as one that adds up values, columns of which one operand has, if it is one.

    Args:
        op: the matmul.
        side: which operand would have the values.
    """
    if op.name != "dot_general" or not find_depth(op) or not runs_on_tensor_cores(op):
        return None
    batch = list_groups(op)
    names = (ELEMENT, ROW) if side == 0 else (ROW, ELEMENT)
    free = [
        spread_free(op, each, make_variable(name, count_lines(op, each)))
        for each, name in enumerate(names)
    ]
    if free[0] is None or free[1] is None:
        return None
    time = make_variable(COLUMN, find_depth(op))
    places = [place_side(op, each, batch, free[each] or (), time) for each in (0, 1)]
    return Factor(op, side, COLUMN, places[side], places[1 - side], (*batch, *free[0], *free[1]))


def list_factors(view: GraphView, matmul: LineMatmul, side: int) -> Iterator[Factor]:
    """Yields the matmuls that add up the lines of one operand of a matmul."""
    lines = matmul.op.operands[side]
    if not isinstance(lines, Value):
        return
    for op in view.uses.get(lines, ()):
        factor = _read_factor(matmul, side, op)
        if factor is not None:
            yield factor


def _read_factor(matmul: LineMatmul, side: int, op: Op) -> Factor | None:
    if op is matmul.op or op.name != "dot_general" or not runs_on_tensor_cores(op):
        return None
    lines = matmul.op.operands[side]
    if op.operands[0] == op.operands[1] or find_depth(op) != count_lines(matmul.op, side):
        return None
    own = 0 if op.operands[0] == lines else 1
    known = dict(enumerate(matmul.place_lines(side)))
    name, other_name = (ROW, COLUMN) if side == matmul.left else (COLUMN, ROW)
    (contracted, batch), free = op.params["dimension_numbers"], list_free(op, own)
    is_summed = {axis: known[axis] for axis in contracted[own]}
    shape = lines.aval.shape
    if any(index != Index() and not _is_variable(index, name) for index in is_summed.values()):
        return None
    if any(not _is_variable(known[axis], ELEMENT) for axis in free if shape[axis] > 1):
        return None
    # The weights have the other lines for themselves.
    rest = spread_free(op, 1 - own, make_variable(other_name, count_lines(op, 1 - own)))
    if rest is None or count_lines(op, 1 - own) != count_lines(matmul.op, 1 - side):
        return None
    places = {
        theirs: known[ours]
        for pairs in (contracted, batch)
        for ours, theirs in zip(pairs[own], pairs[1 - own], strict=True)
    }
    places |= dict(zip(list_free(op, 1 - own), rest, strict=True))
    groups = tuple(known[axis] for axis in batch[own])
    parts = [tuple(known[axis] for axis in free), rest]
    first, second = parts if own == 0 else reversed(parts)
    return Factor(
        op,
        own,
        name,
        tuple(known.values()),
        tuple(places[axis] for axis in range(len(places))),
        (*groups, *first, *second),
    )


def _is_variable(index: Index, name: str) -> bool:
    return index.find_factor(name) == 1 and index.drop(name) == Index()
