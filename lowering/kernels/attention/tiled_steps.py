"""RowSteps: what a kernel that adds along the columns computes, one step after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracegraph.lowering.kernels.attention.tiled import (
    TiledAttention,
    fill_parts,
    find_reduction,
    name_groups,
    name_rows,
    name_sums,
)
from tracegraph.lowering.kernels.attention.tiled_elements import open_function, share_elements
from tracegraph.lowering.kernels.attention.tiled_hidden import Hidden
from tracegraph.lowering.kernels.attention.tiled_source import (
    ELEMENTS,
    JOIN,
    KEPT,
    TEST,
)
from tracegraph.lowering.kernels.element_functions import ElementFunction, ElementLines
from tracegraph.lowering.kernels.matmuls.few_rows_ends import indent

_AWAIT = "    await_copies<0>();\n    sync_block();\n"


class RowSteps:
    """Writes the steps, see Note [Attention in tiles].

    Before each row value, and before the weights, comes what all that is left has in common once
    the row values that it needs are there: values that take the place of sums. A matmul comes
    right before the first step that uses it. So where a mask hides tiles the second one is made
    when it is known whether their weights are zero.

    Args:
        problem: what is computed.
        weight: of the kernel.
        rights: of each matmul which of the arrays its right operand is.
        hidden: what a mask hides, or None.

    Attributes:
        heads: statements of what depends on the group alone.
        early: numbers of the matmuls that all begins with.
    """

    def __init__(
        self,
        problem: TiledAttention,
        weight: ElementFunction,
        rights: Sequence[int],
        hidden: Hidden | None,
    ) -> None:
        self._problem, self._rights, self._hidden = problem, rights, hidden
        self.heads: list[str] = []
        self.early: set[int] = set()
        # Matmuls that are not made yet, and whose place each has.
        self._waiting = {number: number for number in range(len(problem.matmuls))}
        self._is_awaited = False
        self._texts: list[str] = []
        left = [*(each.function for each in problem.row_values), weight]
        for number in range(len(left)):
            self._write_test(number)
            shared, rest = share_elements(left, len(problem.matmuls), number)
            if shared and len(left) > 1:
                left = rest
                self._write_shared(number, shared)
            if number < len(problem.row_values):
                self._write_row_value(number, left.pop(0))
        self._write_weights(left[0])

    def write(self, *, keeps_rows: bool) -> str:
        """Returns the steps up to the weights; all lines are there then.

        Args:
            keeps_rows: the row values are a result, too.
        """
        text = fill_parts("".join(self._texts), {"{KEPT}\n": KEPT if keeps_rows else ""})
        return text if self._is_awaited else text + _AWAIT

    def _write_test(self, number: int) -> None:
        """Writes what ends the work where hidden weights are not zero."""
        hidden = self._hidden
        if hidden is None or hidden.test is None or hidden.known != number:
            return
        test = self._open(hidden.test, "h_")
        parts = {
            "{ROW}\n": indent(test.write({"r": "r", **self._rows}), 8),
            "{TEST}": test.name_results()[0],
        }
        self._texts.append(fill_parts(TEST, parts))

    def _open(self, function: ElementFunction, prefix: str) -> ElementLines:
        written = open_function(function, prefix)
        self.heads += written.write(name_groups(self._problem))
        return written

    def _use(self, functions: Iterable[ElementFunction], number: int) -> None:
        """Writes the matmuls that functions need, before the row value of a number."""
        names = {op.detail for each in functions for op in each.ops if op.opcode == "variable"}
        for matmul, place in list(self._waiting.items()):
            if f"sum{place}" not in names:
                continue
            del self._waiting[matmul]
            if number == 0:
                self.early.add(matmul)
            elif not self._is_awaited:
                self._texts.append(_AWAIT)
                self._is_awaited = True
            left = f"shared + LEFT + ({matmul} * STRIPS * 16 + own) * LINE"
            right = f"shared + ({self._rights[matmul]} * COLUMNS + sharer * 16) * LINE"
            self._texts.append(f"    multiply_lines(sums[{place}], {left}, {right}, holds);\n")

    def _write_shared(self, number: int, shared: Sequence[ElementFunction]) -> None:
        """Writes values that take the place of sums; matmuls that are not made only move."""
        moved = {
            matmul: place
            for matmul, old in self._waiting.items()
            for place, each in enumerate(shared)
            if len(each.ops) == 1 and each.ops[0].detail == f"sum{old}"
        }
        computed = [each for place, each in enumerate(shared) if place not in moved.values()]
        self._use(computed, number)
        self._waiting |= moved
        written = [self._open(each, f"c{number}_{place}_") for place, each in enumerate(shared)]
        own, inner = self._write_element(written)
        # One may be computed from the sum whose place another one takes.
        for place, each in enumerate(written):
            inner.append(f"const float value{place} = {each.name_results()[0]};")
        for place in range(len(written)):
            inner.append(f"sums[{place}][tile][upper * 2 + e] = value{place};")
        self._add_elements(own, inner)

    def _write_row_value(self, number: int, function: ElementFunction) -> None:
        self._use([function], number)
        begin, join = find_reduction(self._problem.row_values[number])
        written = self._open(function, f"s{number}_")
        own, inner = self._write_element([written])
        inner.append(f"values[e] = {join.format('values[e]', written.name_results()[0])};")
        row = f"rows[{number}][upper]"
        end = [f"{row} = {join.format('values[0]', 'values[1]')};"]
        largest = None if self._hidden is None else self._hidden.largest[number]
        if largest is not None:
            form = self._open(largest, f"f{number}_")
            end += form.write({"r": "r", **self._rows})
            end.append(
                f"if (PAIRS * SHARERS < EVERY) {row} = {join.format(row, form.name_results()[0])};"
            )
        self._add_elements([f"float values[2] = {{{begin}, {begin}}};", *own], inner, end)
        parts = {"{NUMBER}": str(number), "{JOINED}": join.format("a", "b")}
        self._texts.append(fill_parts(JOIN, parts))

    def _write_weights(self, function: ElementFunction) -> None:
        self._use([function], len(self._problem.row_values))
        self._texts.append("{KEPT}\n")
        written = self._open(function, "w_")
        own, inner = self._write_element([written])
        inner.append(f"sums[0][tile][upper * 2 + e] = {written.name_results()[0]};")
        self._add_elements(own, inner)

    @property
    def _rows(self) -> dict[str, str]:
        return name_rows(range(len(self._problem.row_values)), "rows[{}][upper]")

    def _write_element(self, written: Sequence[ElementLines]) -> tuple[list[str], list[str]]:
        """Returns statements of each row, then of each of its elements."""
        own = [line for each in written for line in each.write({"r": "r", **self._rows})]
        elements = {"t": "t", **name_sums(self._problem)}
        return own, [line for each in written for line in each.write(elements)]

    def _add_elements(
        self, own: Sequence[str], inner: Sequence[str], end: Sequence[str] = ()
    ) -> None:
        parts = {"ROW": indent(own, 8), "VALUE": indent(inner, 16), "END": indent(end, 8)}
        named = {f"{{{name}}}\n": text for name, text in parts.items()}
        self._texts.append(fill_parts(ELEMENTS, named))
