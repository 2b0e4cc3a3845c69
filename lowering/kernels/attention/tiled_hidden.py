"""What a mask hides of an attention in tiles: which tiles need no sums, and when they add nothing.

Note [Hidden tiles]
A causal mask, a window, a prefix: a condition on indices decides whether a score is a sum or a
constant. Nothing here knows one of them: while a kernel is written the functions of all elements
are looked at, with what is known of their integers and conditions. A tile of 16 rows by 16 columns
is hidden where no element's result depends on the sum. What is left of the functions there, their
hidden forms, depends on the row alone, as ``exp(-1e9 - maximum)``.

Whether a hidden tile may be left out depends on the weights themselves, not on the mask: the
constant may be as large as the scores that are seen. So a test, a part of the hidden forms, is
computed for each row when the row values that it needs are known. If it is zero, so are the weights
and whatever is added up for the row; if it is not, for any row of a block, the block computes all
tiles. Rows that see nothing at all have equal weights, or none that is a number: no tile is hidden
from the 16 rows that one of them is among.

What is left out is zero times a value: where that value is infinite or not a number, the result is
not one either when the tile is computed, and is a number when it is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Collection, Sequence

import numpy as np

from tracegraph.lowering.kernels.attention.tiled import STRIP, RowValue, TiledAttention
from tracegraph.lowering.kernels.attention.tiled_elements import Terms
from tracegraph.lowering.kernels.element_functions import FLOAT, ElementFunction, ElementOp
from tracegraph.lowering.kernels.element_values import Bits, look_at_elements

# To look at more elements takes longer than to compile the kernel.
_MAX_ELEMENTS = 1 << 24
# Of how many different counts of columns a kernel has code. In a step other kernels run in between,
# and code has to be fetched each time: with more, that takes longer than what is saved.
_MAX_COUNTS = 2
# A kernel's tables have 64 KiB.
_MAX_TILES = 1 << 13
_ZEROS = ("00000000", "80000000")


@dataclasses.dataclass(frozen=True)
class Hidden:
    """What a mask hides, see Note [Hidden tiles].

    Attributes:
        seen: for each 16 rows the tiles that are seen, a bit for each 16 columns.
        largest: of each row value what it is at hidden elements, if it is a maximum; else None.
        test: of the group, ``r`` and row values: where it is zero, hidden elements add nothing;
            None where they never do.
        known: how many row values have to be known for the test.
    """

    seen: tuple[int, ...]
    largest: tuple[ElementFunction | None, ...]
    test: ElementFunction | None
    known: int


# Layers that are alike are looked at once.
@functools.lru_cache(maxsize=64)
def find_hidden(
    problem: TiledAttention, row_values: tuple[RowValue, ...], weights: tuple[ElementFunction, ...]
) -> Hidden | None:
    """Returns what is hidden, or None where that is nothing, or nothing that can be left out.

    Args:
        problem: what is computed.
        row_values: that are computed, each one's result is a row value of those behind it.
        weights: what lines are multiplied by.
    """
    terms = Terms()
    results = [terms.take(each) for each in (*(given.function for given in row_values), *weights)]
    is_hidden = _find_elements(problem, terms, results)
    if is_hidden is None:
        return None
    forms, results = _fold(problem, terms, results, is_hidden)
    varying = forms.find_dependents(("t", *_name_sums(problem)))
    largest: list[ElementFunction | None] = []
    added = results[len(row_values) :]
    for row_value, result in zip(row_values, results, strict=False):
        if row_value.kind == "max" and result in varying:
            return None
        largest.append(forms.finish(result) if row_value.kind == "max" else None)
        added += [result] if row_value.kind == "sum" else []
    # The last one has most of what the weights are computed from.
    tests = [
        number
        for number, op in enumerate(forms.ops)
        if number not in varying and op.type == FLOAT and op.opcode != "constant"
    ]
    for test in (None, *reversed(tests)):
        if not _is_zero(forms, added, test):
            continue
        function = None if test is None else forms.finish(test)
        known = 0 if function is None else _count_rows(function)
        # What is added up before the test is known must be zero for sure.
        early = [results[n] for n, each in enumerate(row_values[:known]) if each.kind == "sum"]
        if _is_zero(forms, early, None):
            return Hidden(_list_seen(is_hidden), tuple(largest), function, known)
    return None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What each block of a group sees, for the tables of a kernel.

    Attributes:
        counts: how many steps a block has; all of them where nothing is left out.
        lists: the units of lines that a block works on, those that it sees first.
    """

    counts: tuple[int, ...]
    lists: tuple[tuple[int, ...], ...]

    @property
    def are_in_order(self) -> bool:
        """True if each block sees the first lines, or all."""
        return all(each == tuple(range(len(each))) for each in self.lists)

    def write(self, groups: int) -> str:
        """Returns the tables: of blocks, those that see most come first.

        Args:
            groups: how many there are.
        """
        order = sorted(range(len(self.counts)), key=lambda each: (-self.counts[each], each))
        tables = {"ORDER": order, "COUNTS": self.counts}
        if not self.are_in_order:
            tables["LISTS"] = [unit for each in self.lists for unit in each]
        return f"constexpr int GROUPS = {groups};\n" + "".join(
            f"TABLE unsigned short {name}[] = {{{', '.join(map(str, table))}}};\n"
            for name, table in tables.items()
        )

    def write_find(self, place: str, lines: int) -> str:
        """Returns which unit is at a place of the block's list, in C++."""
        return place if self.are_in_order else f"LISTS[block * {lines} + {place}]"


def list_row_blocks(hidden: Hidden, columns: int, strips: int, sharers: int) -> Blocks:
    """Returns what blocks of rows see, in strips of columns.

    Args:
        hidden: what is hidden.
        columns: of the problem.
        strips: of a block.
        sharers: warps of a strip, which take turns.
    """
    every = columns // STRIP
    whole = -(-every // sharers)
    # Each count is code of its own.
    step = -(-whole // _MAX_COUNTS)
    lists = _list_units(_unpack(hidden, every), strips)
    counts = [-(-count // sharers) for count, _ in lists]
    counts = [min(whole, -(-count // step) * step) for count in counts]
    return Blocks(tuple(counts), tuple(units for _, units in lists))


def list_column_blocks(hidden: Hidden, columns: int, strips: int, unit: int) -> Blocks:
    """Returns what blocks of columns see, in units of rows.

    Args:
        hidden: what is hidden.
        columns: of the problem.
        strips: of a block.
        unit: rows of a unit.
    """
    sees = _unpack(hidden, columns // STRIP)
    sees = sees.reshape(-1, unit // STRIP, sees.shape[1]).any(axis=1)
    lists = _list_units(sees.T, strips)
    return Blocks(tuple(count for count, _ in lists), tuple(units for _, units in lists))


def _unpack(hidden: Hidden, count: int) -> Bits:
    return np.array([[bool(seen >> bit & 1) for bit in range(count)] for seen in hidden.seen])


def _list_units(sees: Bits, strips: int) -> list[tuple[int, tuple[int, ...]]]:
    """Returns for each block how many units it sees, and all units, those first."""
    found = []
    for each in sees.reshape(-1, strips, sees.shape[1]).any(axis=1):
        seen, others = np.flatnonzero(each), np.flatnonzero(~each)
        found.append((len(seen), tuple(int(unit) for unit in (*seen, *others))))
    return found


def _name_sums(problem: TiledAttention) -> list[str]:
    return [f"sum{each}" for each in range(len(problem.matmuls))]


def _make_places(problem: TiledAttention, terms: Terms) -> dict[str, Bits] | None:
    """Returns the integers that are known, each along an axis of its own; None for too many."""
    sizes = {f"g{axis}": size for axis, size in enumerate(problem.groups)}
    used = {op.detail for op in terms.ops if op.opcode == "variable"}
    sizes = {name: size if name in used else 1 for name, size in sizes.items()}
    sizes |= {"r": problem.rows, "t": problem.columns}
    if math.prod(sizes.values()) > _MAX_ELEMENTS:
        return None
    places = {}
    for axis, (name, size) in enumerate(sizes.items()):
        shape = [size if axis == each else 1 for each in range(len(sizes))]
        places[name] = np.arange(size).reshape(shape)
    return places


def _find_elements(problem: TiledAttention, terms: Terms, results: Sequence[int]) -> Bits | None:
    """Returns which elements are in hidden tiles, or None where none is."""
    places = _make_places(problem, terms)
    if places is None or problem.rows * problem.columns > _MAX_TILES * STRIP**2:
        return None
    sizes = np.broadcast_shapes(*(each.shape for each in places.values()))
    found: Bits = np.zeros((1, 1), bool)
    for name in _name_sums(problem):
        looked = look_at_elements(terms.ops, places, name)
        needed = functools.reduce(operator.or_, (looked[result].needs for result in results))
        needed = np.broadcast_to(needed, sizes).reshape(-1, problem.rows, problem.columns)
        all_see = needed.any(axis=2).all(axis=0).reshape(-1, STRIP).all(axis=1, keepdims=True)
        tiles = needed.any(axis=0).reshape(problem.rows // STRIP, STRIP, -1, STRIP)
        is_hidden = all_see & ~tiles.any(axis=(1, 3))
        # Of two sums, that of the scores: the other one's use ends with the weights.
        if is_hidden.sum() > found.sum():
            found = is_hidden
    if not found.any():
        return None
    return found.repeat(STRIP, axis=0).repeat(STRIP, axis=1)


def _list_seen(is_hidden: Bits) -> tuple[int, ...]:
    tiles = ~is_hidden[::STRIP, ::STRIP]
    return tuple(sum(1 << int(bit) for bit in np.flatnonzero(row)) for row in tiles)


def _fold(
    problem: TiledAttention, terms: Terms, results: Sequence[int], is_hidden: Bits
) -> tuple[Terms, list[int]]:
    """Returns what is left of scalars at hidden elements, and the numbers of some of them."""
    looked = look_at_elements(terms.ops, _make_places(problem, terms) or {}, "")
    forms, numbers = Terms(), list[int]()
    for op, each in zip(terms.ops, looked, strict=True):
        operands = tuple(numbers[place] for place in op.operands)
        constant = each.find_constant(is_hidden) if op.type == FLOAT else None
        chosen = None
        if op.opcode == "select":
            chosen = looked[op.operands[0]].find_decision(is_hidden)
        if constant is not None:
            numbers.append(forms.add(ElementOp("constant", FLOAT, detail=constant)))
        elif chosen is not None:
            numbers.append(operands[1 if chosen else 2])
        else:
            numbers.append(forms.add(dataclasses.replace(op, operands=operands)))
    return forms, [numbers[each] for each in results]


def _is_zero(forms: Terms, results: Collection[int], test: int | None) -> bool:
    """True if scalars are zero wherever another one is."""
    zeros: set[int] = set()
    for number, op in enumerate(forms.ops):
        are_zero = [each in zeros for each in op.operands]
        if (
            number == test
            or (op.opcode == "constant" and op.type == FLOAT and op.detail in _ZEROS)
            or (op.opcode == "mul" and any(are_zero))
            or (op.opcode == "div" and are_zero[0])
            or (op.opcode in ("neg", "add", "sub") and all(are_zero))
            or (op.opcode == "select" and all(are_zero[1:]))
        ):
            zeros.add(number)
    return zeros.issuperset(results)


def _count_rows(function: ElementFunction) -> int:
    names = [op.detail for op in function.ops if op.opcode == "variable"]
    return max((int(name[3:]) + 1 for name in names if name.startswith("row")), default=0)
