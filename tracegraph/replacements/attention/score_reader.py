"""ScoreReader: what is computed from matmuls, element by element and along rows.

Note [Row programs]
What is between two matmuls of attention is mostly a softmax, and in the backward pass its
derivative. How they are written differs: with a division or a factor, with the maximum taken away,
with masks, caps and dropped scores, and each way has a derivative of its own. So none is looked
for: whatever is computed from the elements of one row of the matmuls is read, element by element,
down to the matmuls and to arrays. A sum or a maximum over the columns is a row value: a
variable of what is computed from it, as is the element of a matmul.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.lowering.kernels.element_functions import FLOAT
from tracegraph.replacements.attention.line_matmuls import LineMatmul, find_line_matmul
from tracegraph.replacements.element_reader import TYPES, Element, UnreadableError
from tracegraph.replacements.indices import Index
from tracegraph.replacements.places import Indices
from tracegraph.replacements.row_value_reader import RowValueReader


class ScoreReader(RowValueReader):
    """Reads elements of rows of matmuls, see Note [Row programs].

    Args:
        makers: the op of each value.
        arrays: the number of the kernel's parameter for each value that is loaded; it grows.
        columns: of the matmuls.
        limit: how many matmuls there may be.

    Attributes:
        matmuls: that were found, in the order of the variables ``sum0``, ``sum1``.
    """

    def __init__(
        self, makers: Mapping[Operand, Op], arrays: dict[Value, int], columns: int, limit: int
    ) -> None:
        super().__init__(makers, arrays, columns)
        self.matmuls: list[LineMatmul] = []
        self._limit = limit

    def depends_on_matmuls(self, element: Element) -> bool:
        """True for an element that is computed from a matmul."""
        return not isinstance(element, Index) and element in self._of_sum

    def _save(self) -> Any:
        return super()._save(), len(self.matmuls)

    def _restore(self, state: Any) -> None:
        before, matmuls = state
        super()._restore(before)
        del self.matmuls[matmuls:]

    def _read_op(self, op: Op, place: Indices) -> Element:
        is_float = len(op.results) == 1 and TYPES.get(str(op.results[0].dtype)) == FLOAT
        if is_float and op.name == "dot_general":
            return self._read_product(op, place)
        return super()._read_op(op, place)

    def _read_product(self, op: Op, place: Indices) -> int:
        matmul = find_line_matmul(op, place)
        if matmul is None:
            raise UnreadableError
        numbers = [n for n, each in enumerate(self.matmuls) if each.op is op]
        if not numbers:
            if len(self.matmuls) == self._limit:
                raise UnreadableError
            numbers = [len(self.matmuls)]
            self.matmuls.append(matmul)
        elif self.matmuls[numbers[0]].place != place:
            raise UnreadableError
        return self._add_variable(f"sum{numbers[0]}")
