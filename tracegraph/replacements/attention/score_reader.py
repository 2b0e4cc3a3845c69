"""ScoreReader: what is computed from products, element by element and along rows.

Note [Row programs]
What is between two matmuls of attention is mostly a softmax, and in the backward pass its
derivative. How they are written differs: with a division or a factor, with the maximum taken away,
with masks, caps and dropped scores, and each way has a derivative of its own. So none is looked
for: whatever is computed from the elements of one row of the products is read, element by element,
down to the products and to arrays. A sum or a maximum over the columns is a stage: its value is a
variable of what is computed from it, as is the element of a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.lowering.kernels.element_functions import FLOAT, ElementOp
from tracegraph.lowering.kernels.tiled_attention import Stage
from tracegraph.replacements.attention.products import COLUMN, Product, find_product
from tracegraph.replacements.element_reader import TYPES, Element, ElementReader, UnreadableError
from tracegraph.replacements.indices import Index, list_variables, make_variable
from tracegraph.replacements.places import Place

_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max"}


class ScoreReader(ElementReader):
    """Reads elements of rows of products, see Note [Row programs].

    Args:
        makers: the op of each value.
        arrays: the number of the kernel's parameter for each value that is loaded; it grows.
        columns: of the products.
        limit: how many products there may be.

    Attributes:
        products: that were found, in the order of the variables ``sum0``, ``sum1``.
    """

    def __init__(
        self, makers: Mapping[Operand, Op], arrays: dict[Value, int], columns: int, limit: int
    ) -> None:
        super().__init__(makers, arrays)
        self.products: list[Product] = []
        self._columns, self._limit = columns, limit
        # Kind and element of each stage.
        self._stages: list[tuple[str, int]] = []
        self._known_stages: dict[Any, int] = {}

    def depends_on_products(self, element: Element) -> bool:
        """True for an element that is computed from a product."""
        return not isinstance(element, Index) and element in self._of_sum

    def list_stages(self) -> tuple[Stage, ...]:
        """Returns the sums and maxima of rows, each computed from those before it."""
        return tuple(Stage(kind, self.finish(element)) for kind, element in self._stages)

    def _save(self) -> Any:
        counts = len(self.products), len(self._stages), dict(self._known_stages)
        return super()._save(), counts

    def _restore(self, state: Any) -> None:
        before, (products, stages, self._known_stages) = state
        super()._restore(before)
        del self.products[products:], self._stages[stages:]

    def _read_op(self, op: Op, place: Place) -> Element:
        if len(op.results) == 1 and TYPES.get(str(op.results[0].dtype)) == FLOAT:
            if op.name == "dot_general":
                return self._read_product(op, place)
            if op.name in _REDUCTIONS:
                return self._read_reduction(op, place)
        return super()._read_op(op, place)

    def _read_product(self, op: Op, place: Place) -> int:
        product = find_product(op, place)
        if product is None:
            raise UnreadableError
        numbers = [n for n, each in enumerate(self.products) if each.op is op]
        if not numbers:
            if len(self.products) == self._limit:
                raise UnreadableError
            numbers = [len(self.products)]
            self.products.append(product)
        elif self.products[numbers[0]].place != place:
            raise UnreadableError
        return self._add_variable(f"sum{numbers[0]}")

    def _read_reduction(self, op: Op, place: Place) -> Element:
        """Returns the variable of a stage; over axes of one element nothing is to be done."""
        shape, axes = op.operands[0].aval.shape, op.params["axes"]
        long = [axis for axis in axes if shape[axis] > 1]
        rest = iter(place)
        at = [Index() if axis in axes else next(rest) for axis in range(len(shape))]
        if not long:
            return self.read(op.operands[0], tuple(at))
        if len(long) > 1 or shape[long[0]] != self._columns:
            raise UnreadableError
        if any(COLUMN in list_variables(index) for index in place):
            raise UnreadableError
        key = (id(op), place)
        if key not in self._known_stages:
            at[long[0]] = make_variable(COLUMN, self._columns)
            element = self.read(op.operands[0], tuple(at))
            if isinstance(element, Index) or element not in self._of_sum:
                raise UnreadableError
            self._known_stages[key] = len(self._stages)
            self._stages.append((_REDUCTIONS[op.name], element))
        return self._add_variable(f"row{self._known_stages[key]}")

    def _add_variable(self, name: str) -> int:
        number = self._add(ElementOp("variable", FLOAT, (), name))
        self._of_sum.add(number)
        return number
