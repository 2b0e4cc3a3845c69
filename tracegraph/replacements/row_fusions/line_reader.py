"""LineReader: elements of rows, as a kernel for a fusion along rows computes them."""

from __future__ import annotations

from collections.abc import Mapping

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.lowering.kernels.element_functions import FLOAT, ElementOp
from tracegraph.lowering.kernels.row_fusions.problem import EIGHT, MAX_ELEMENTS, RowInput
from tracegraph.replacements.element_reader import TYPES, Element, UnreadableError
from tracegraph.replacements.indices import Index, flatten_index, make_variable
from tracegraph.replacements.places import Indices
from tracegraph.replacements.row_fusions.forms import RowSpace, find_pick, is_rounding
from tracegraph.replacements.row_value_reader import COLUMN, ROW, RowValueReader

_NAN = "7fc00000"


class LineReader(RowValueReader):
    """Reads elements of rows, and which arrays lie along them.

    Args:
        makers: the op of each value that is computed; others are loaded.
        arrays: the number of the kernel's parameter for each value that is loaded; it grows.
        space: the rows.
    """

    # Each row is read once, however much is computed of it.
    max_ops = 512

    def __init__(
        self, makers: Mapping[Operand, Op], arrays: dict[Value, int], space: RowSpace
    ) -> None:
        super().__init__(makers, arrays, space.columns)
        self._space = space
        self._own = make_variable(ROW, space.rows).times(space.columns)
        self._inputs: dict[tuple[int, Index], int] = {}

    def list_inputs(self) -> tuple[RowInput, ...]:
        """Returns what is read along rows."""
        return tuple(
            RowInput(parameter, self.finish(base), base == self._own)
            for parameter, base in self._inputs
        )

    def _save(self) -> object:
        return super()._save(), dict(self._inputs)

    def _restore(self, state: tuple[object, dict[tuple[int, Index], int]]) -> None:
        before, self._inputs = state
        super()._restore(before)

    def _is_dear(self, opcode: str, operands: object) -> bool:  # noqa: ARG002
        return False

    def _is_of_row(self, element: int) -> bool:  # noqa: ARG002
        return True

    def _load(self, value: Value, place: Indices) -> Element:
        flat = flatten_index(place, value.shape)
        base = flat.drop(COLUMN)
        is_even = all(factor % EIGHT == 0 for _, factor in base.terms) and not base.constant % EIGHT
        is_line = flat.find_factor(COLUMN) == 1 and is_even and value.aval.size <= MAX_ELEMENTS
        if TYPES.get(str(value.dtype)) != FLOAT or not is_line:
            return super()._load(value, place)
        parameter = self._arrays.setdefault(value, len(self._arrays))
        number = self._inputs.setdefault((parameter, base), len(self._inputs))
        return self._add_variable(f"input{number}")

    def _read_op(self, op: Op, place: Indices) -> Element:
        if op.name == "gather":
            return self._read_pick(op, place)
        # Weights are rounded where the program rounds them; between ops, values are not.
        if self._space.shares(op) and is_rounding(op):
            value = self.read(op.operands[0], place)
            return self._emit(f"round_{op.results[0].dtype}", self._emit_element(value))
        return super()._read_op(op, place)

    def _read_pick(self, op: Op, place: Indices) -> Element:
        """Returns the element at an index that is in bounds, or NaN."""
        pick = find_pick(op)
        if pick is None:
            raise UnreadableError
        index = self.read(op.operands[1], (*place, Index()))
        if not isinstance(index, Index):
            raise UnreadableError
        last = op.operands[0].aval.shape[pick.axis] - 1
        at = [place[axis] for axis in pick.batch]
        at.insert(pick.axis, self.clamp(index, 0, last))
        value = self.read(op.operands[0], tuple(at))
        if not pick.fills or isinstance(value, Index):
            return value
        number, bounds = self._emit_index(index), [self._emit_constant(each) for each in (0, last)]
        is_inside = self._emit(
            "and", self._emit("ge", number, bounds[0]), self._emit("le", number, bounds[1])
        )
        nothing = self._add(ElementOp("constant", FLOAT, (), _NAN))
        return self._emit("select", is_inside, value, nothing)
