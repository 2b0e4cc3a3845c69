"""Endings: what a kernel computes of its matmuls' results, so that fewer values are stored.

Note [Where a kernel ends]
Element-wise ops behind a matmul can be a part of its kernel. All of them that could be are taken in
their order; then the kernel ends behind the one after which the fewest values are stored, the last
one of several that computes something. So a residual is added, and a gate is multiplied with what
it gates; but the square for the next norm is left to the next kernel, since the sum is needed too.
What joins it with a later matmul's result is left to that one's kernel, which must wait for both.

Where all that depends on the matmuls can be taken, and is read by nothing else, the kernel ends
behind all of it, however many values are stored: each of them would be a kernel that computes the
same again. So it is with the cell of a recurrent layer, and what its backward pass reads.

A kernel that stores operands goes on to what another matmul reads, and stores that too: an
activation in front of the next matmul is then computed once for each element, not by each of that
one's blocks. What else depends on its results is computed from them again where it is needed.

A value of which only the largest element of each row is read is not stored: see Note [Largest of a
row].
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.lowering.kernels.row_functions import EXPRESSIONS, Form
from tracegraph.replacements.few_rows.choices import find_choices
from tracegraph.replacements.few_rows.row_matmuls import RowMatmul
from tracegraph.replacements.few_rows.row_reader import RowShape, keeps_elements
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.kinds import FLOAT_KINDS

ELEMENTWISE = frozenset([*EXPRESSIONS, "add_any", "integer_pow", "convert_element_type"])


class Ending:
    """Ops behind matmuls, in their order, with what each is made from.

    Args:
        view: of the graph that they are in.
        matmuls: of the same rows.
        most: how many of them one op may join.
        stores_operands: go on to what another matmul reads, and store it.
        chooses: make choices of the largest element of each row.

    Attributes:
        ops: that are a part of the kernel.
        choices: for each value of the kernel the ops that take the largest of each of its rows.
        sources: for each value of the kernel the matmuls that it depends on, by their places.
    """

    def __init__(
        self,
        view: GraphView,
        matmuls: Sequence[RowMatmul],
        most: int,
        *,
        stores_operands: bool = False,
        chooses: bool = False,
    ) -> None:
        self._most = most
        self._makers, self._latest = view.makers, view.latest
        self._last = max(view.order[id(each.op)] for each in matmuls)
        self._graph, self._uses, self._matmuls = view.graph, view.uses, matmuls
        results: dict[Operand, frozenset[int]] = {
            each.result: frozenset([place]) for place, each in enumerate(matmuls)
        }
        self.sources = dict(results)
        self.ops = self._find_ops()
        self.choices = self._find_choices(view) if chooses else {}
        end = self._choose_end()
        behind = self._find_operands(end) if stores_operands else []
        self._before, self._behind = self.ops[:end], behind
        self.ops = [*self.ops[:end], *self._list_makers(self.ops[end:], behind)]
        kept = {value for op in self.ops for value in op.results}
        self.sources = {
            value: places
            for value, places in self.sources.items()
            if value in kept or value in results
        }
        self.choices = {v: ops for v, ops in self.choices.items() if v in self.sources}

    def list_stored(self) -> list[Value]:
        """Returns the values that other ops or the graph's results need."""
        return [*self._list_needed(self._before, self.ops), *self._behind]

    def _find_choices(self, view: GraphView) -> dict[Value, list[Op]]:
        shapes = [RowShape(each.rows, each.columns) for each in self._matmuls]
        found = {
            value: find_choices(view, value, shapes[min(places)])
            for value, places in self.sources.items()
            if isinstance(value, Value)
        }
        return {value: ops for value, ops in found.items() if ops}

    def _find_operands(self, end: int) -> list[Value]:
        """Returns what matmuls read of the ops behind an end."""
        return [
            op.results[0]
            for op in self.ops[end:]
            if any(use.name == "dot_general" for use in self._list_readers(op.results[0]))
        ]

    def _list_readers(self, value: Value) -> Iterable[Op]:
        """Yields the ops that read the elements of a value, through reshapes."""
        for op in self._uses.get(value, ()):
            if keeps_elements(op):
                yield from self._list_readers(op.results[0])
            else:
                yield op

    def _list_makers(self, ops: Sequence[Op], values: Iterable[Value]) -> list[Op]:
        """Returns those of some ops that values are made by."""
        needed: set[Operand] = set(values)
        found: list[Op] = []
        for op in reversed(ops):
            if op.results[0] in needed:
                needed.update(op.operands)
                found.append(op)
        return found[::-1]

    def _find_ops(self) -> list[Op]:
        found: list[Op] = []
        # What depends on a matmul, and is no part of the kernel.
        behind: set[Operand] = set()
        own = {id(self._makers[each.result]) for each in self._matmuls}
        own |= {id(each.op) for each in self._matmuls}
        for op in self._graph.ops:
            if id(op) in own:
                continue
            known = [self.sources[each] for each in op.operands if each in self.sources]
            is_apart = behind.isdisjoint(op.operands) and len(op.results) == 1
            if known and is_apart and self._takes(op, known):
                self.sources[op.results[0]] = frozenset().union(*known)
                found.append(op)
            elif known or not behind.isdisjoint(op.operands):
                behind.update(op.results)
        return found

    def _takes(self, op: Op, known: Collection[frozenset[int]]) -> bool:
        """True for an op that computes each element of the results by itself."""
        matmuls = [self._matmuls[place] for place in frozenset().union(*known)]
        shape = RowShape(matmuls[0].rows, matmuls[0].columns)
        result = op.results[0]
        is_full = math.prod(result.shape) == shape.rows * shape.columns
        is_float = str(result.dtype) in FLOAT_KINDS
        has_one_length = len({each.columns for each in matmuls}) == 1
        if len(matmuls) > self._most or not (has_one_length and is_full and is_float):
            return False
        if any(self._latest.get(each, -1) > self._last for each in op.operands):
            return False
        if keeps_elements(op):
            return True
        if op.name not in ELEMENTWISE or op.params.get("y", 2) not in (2, 3):
            return False
        return all(_reads(each, op, shape, self.sources) for each in op.operands)

    def _choose_end(self) -> int:
        """Returns how many of the ops are taken: Note [Where a kernel ends]."""
        if self._ends_the_graph():
            return len(self.ops)
        parts = [self.ops[:end] for end in range(len(self.ops) + 1)]
        counts = [len(self._list_needed(part, part)) for part in parts]
        end = max(end for end, count in enumerate(counts) if count == min(counts))
        while end and counts[end - 1] == counts[end] and self._costs_nothing(self.ops[end - 1]):
            end -= 1
        return end

    def _ends_the_graph(self) -> bool:
        """True if whatever depends on the matmuls is a part of the kernel or a result."""
        inside = {id(op) for op in self.ops}
        values = [each.result for each in self._matmuls] + [op.results[0] for op in self.ops]
        return all(id(op) in inside for each in values for op in self._uses.get(each, ()))

    def _costs_nothing(self, op: Op) -> bool:
        """True for an op that is no kernel of its own: what reads its result does it."""
        is_kept = op.results[0] in self._graph.outputs
        return keeps_elements(op) or (op.name == "convert_element_type" and not is_kept)

    def _list_needed(self, ops: Sequence[Op], own: Sequence[Op]) -> list[Value]:
        """Returns the results of matmuls and ops that others than the kernel's own ops need."""
        inside = {id(op) for op in own}
        inside |= {id(op) for ops in self.choices.values() for op in ops}
        values = [each.result for each in self._matmuls] + [op.results[0] for op in ops]
        return [
            value
            for value in values
            if value in self._graph.outputs
            or any(id(op) not in inside for op in self._uses.get(value, ()))
        ]


def _reads(
    value: Operand, op: Op, shape: RowShape, sources: Mapping[Operand, frozenset[int]]
) -> bool:
    result = op.results[0].shape
    form = shape.find_form(tuple(value.aval.shape), Form.FULL, result)
    is_float = str(value.aval.dtype) in FLOAT_KINDS
    return is_float and (form is Form.FULL if value in sources else form is not None)
