"""Regions: ops along the same rows that one kernel may compute, and what it has to store.

Note [Regions of rows]
Ops along rows are in one region if they are as far from the inputs of the graph, counted in ops of
other kinds, as matmuls, and share values. What an op of another kind makes of a result is further
from them, and so is all that needs it: no region waits for itself, through others or not.

A value of one region that a later one needs is stored, or computed again there. It is stored if it
comes from more than one array of its size: the sum of a residual and a matmul is, but what a norm
makes of that sum is made of it again in the backward pass, mean and deviation too, so that one
array is read for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.row_fusions.forms import RowForm, RowSpace

_SLOW = frozenset(["tanh", "logistic", "exp"])


@dataclasses.dataclass(frozen=True, eq=False)
class RowRegion:
    """Ops that one kernel may compute, see Note [Regions of rows].

    Attributes:
        space: the rows.
        ops: along rows, in the order of the graph.
        sums: ops that add up along the columns.
        stored: results for each element, or for each row.
    """

    space: RowSpace
    ops: tuple[Op, ...]
    sums: tuple[Op, ...]
    stored: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Regions:
    """All of them for some rows.

    Attributes:
        found: the regions, in the order of the graph.
        makers: the op of each value that a kernel computes again where it is needed, rather than
            to read it.
    """

    found: tuple[RowRegion, ...]
    makers: Mapping[Operand, Op]


class RegionFinder:
    """Finds the regions of some rows, see Note [Regions of rows].

    Args:
        view: of the graph.
        space: the rows.
    """

    def __init__(self, view: GraphView, space: RowSpace) -> None:
        self._view, self._space = view, space
        self._outputs = set(view.graph.outputs)
        ops = view.graph.ops
        self._ops = [op for op in ops if space.takes(op)]
        self._shared = [op for op in ops if space.shares(op)]
        self._along = {id(op) for op in self._ops}
        self._renaming = self._find_renaming()
        self._sums = [op for op in ops if id(op) not in self._along and space.is_along_columns(op)]
        # The number of the group of each op.
        self._owners: dict[int, int] = {}

    def find(self) -> Regions:
        """Returns the regions that do more than one element at a time."""
        if not self._sums and not any(map(self._space.is_along_rows, self._ops)):
            return Regions((), {})
        groups = self._group(self._find_levels())
        self._owners = {id(op): number for number, group in enumerate(groups) for op in group}
        kept = self._find_kept()
        is_used = [self._is_useful(group) for group in groups]
        found = [
            self._make_region(group, kept, is_used)
            for group, is_one in zip(groups, is_used, strict=True)
            if is_one
        ]
        made = [*self._shared, *(op for op in self._ops if op.results[0] not in kept)]
        return Regions(tuple(found), {op.results[0]: op for op in made})

    def _find_renaming(self) -> set[int]:
        """Returns the ops that only give another shape to what no kernel has made."""
        found: set[int] = set()
        for op in filter(self._space.is_renaming, self._ops):
            maker = id(self._view.makers.get(op.operands[0]))
            if maker in found or maker not in self._along:
                found.add(id(op))
        return found

    def _find_levels(self) -> dict[Operand, int]:
        """Returns for each value how many ops of other kinds it needs one after the other.

        What a kernel reads along with its rows, a gain that is rounded, makes no difference.
        """
        levels: dict[Operand, int] = {}
        inside = self._along.union(map(id, self._shared))
        for op in self._view.graph.ops:
            level = max((levels.get(each, 0) for each in op.operands), default=0)
            levels.update(dict.fromkeys(op.results, level + (id(op) not in inside)))
        return levels

    def _group(self, levels: Mapping[Operand, int]) -> list[list[Op]]:
        """Returns the ops of one level that share values, a list for each such group."""
        parents: dict[Any, Any] = {}

        def find(item: Any) -> Any:
            while parents.setdefault(item, item) != item:
                item = parents[item]
            return item

        order = self._view.order
        ops = sorted((*self._ops, *self._sums), key=lambda op: order[id(op)])
        for op in ops:
            level = max((levels.get(each, 0) for each in op.operands), default=0)
            for operand in op.operands:
                maker = self._view.makers.get(operand)
                if maker is not None and id(maker) in self._along and levels[operand] == level:
                    parents[find(id(op))] = find(id(maker))
                elif self._space.find_form(operand) is RowForm.FULL:
                    parents[find(id(op))] = find((operand, level))
        groups: dict[Any, list[Op]] = {}
        for op in ops:
            groups.setdefault(find(id(op)), []).append(op)
        return list(groups.values())

    def _is_useful(self, group: list[Op]) -> bool:
        """True for a group that XLA reads an array for more than once, or computes slowly."""
        count = sum(map(self._space.is_along_rows, group))
        has_more = count or any(id(op) not in self._along or _is_slow(op) for op in group)
        has_result = any(self._is_result(op) for op in group if id(op) in self._along)
        return count > 1 or bool(has_more and has_result)

    def _is_result(self, op: Op) -> bool:
        """True for an op with an element for each place that another group, or none, needs."""
        (result,) = op.results
        is_full = self._space.find_form(result) is RowForm.FULL and id(op) not in self._renaming
        return is_full and (result in self._outputs or self._is_used_elsewhere(op))

    def _is_used_elsewhere(self, op: Op) -> bool:
        return any(owner != self._owners[id(op)] for owner in self._list_users(op))

    def _list_users(self, op: Op) -> list[int | None]:
        """Returns the groups that read the result of an op, None for an op that is in none."""
        users = self._view.uses.get(op.results[0], [])
        return [self._owners.get(id(each)) for each in users]

    def _find_kept(self) -> set[Value]:
        """Returns the values that are read where they are needed again."""
        # For each value the arrays that it is made from, of those with an element for each place.
        bases: dict[Operand, frozenset[Operand]] = {}
        kept: set[Value] = set()
        for op in self._ops:
            (result,) = op.results
            base = frozenset().union(*(self._find_base(bases, each) for each in op.operands))
            if len(base) > 1 and self._is_result(op):
                kept.add(result)
                base = frozenset([result])
            bases[result] = base
        return kept

    def _find_base(
        self, bases: Mapping[Operand, frozenset[Operand]], operand: Operand
    ) -> frozenset[Operand]:
        if operand in bases:
            return bases[operand]
        is_array = isinstance(operand, Value) and self._space.find_form(operand) is RowForm.FULL
        return frozenset([operand]) if is_array else frozenset()

    def _make_region(
        self, group: list[Op], kept: Collection[Value], is_used: Sequence[bool]
    ) -> RowRegion:
        ops = tuple(op for op in group if id(op) in self._along)
        sums = tuple(op for op in group if id(op) not in self._along)
        stored = tuple(op.results[0] for op in ops if self._is_stored(op, kept, is_used))
        return RowRegion(self._space, ops, sums, stored)

    def _is_stored(self, op: Op, kept: Collection[Value], is_used: Sequence[bool]) -> bool:
        """True for a value that is read, and not computed again, by what needs it."""
        if id(op) in self._renaming:
            return False
        if op.results[0] in kept or op.results[0] in self._outputs:
            return True
        others = [each for each in self._list_users(op) if each != self._owners[id(op)]]
        return any(each is None or not is_used[each] for each in others)


def _is_slow(op: Op) -> bool:
    """True for a function that a GPU has an instruction for, exact enough for 16 bits."""
    return op.name in _SLOW and op.results[0].dtype.itemsize == 2
