"""Split XLA's temporaries into the values that they hold one after another.

Note [Splitting is safe]
XLA gives one allocation to many values: different bytes at one time, the same bytes at different
times. The steps are followed in XLA's serial order, and each byte of an allocation knows the part
that holds it now. A step that reads a range joins all parts under it, and with them whatever it
writes over that range: they keep their distances. Only a range that a step writes and does not
read begins a new part, since nothing of the old bytes can be seen through it any more. So a read
always finds the bytes that it would find in XLA's allocation; parts that no step connects may
lie anywhere. Joining more than needed is always right: one part per allocation is XLA's layout.

XLA writes some instructions as several steps of one name: a memcpy of the operand or a memset to an
initial value, then a kernel that works in place on it (sorts, scatters, sums by atomics). The
operands of the instruction do not tell that the kernel reads those bytes. So what a later step of
an instruction writes counts as read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from tracegraph.lowering.device_program import GraphStep, Step
from tracegraph.lowering.planning.byte_map import ByteMap
from tracegraph.lowering.planning.lifetimes import Lifetime
from tracegraph.lowering.planning.memory_plan import find_least_bytes
from tracegraph.runtime.definition.nodes import BufferUse

# XLA aligns to it; a part keeps its address modulo it, and so the alignment of each access.
ALIGNMENT = 256


@dataclasses.dataclass(frozen=True)
class Part:
    """A byte range of an allocation that keeps its layout: one buffer of our program.

    Attributes:
        allocation: the allocation's name.
        offset: of its first byte in the allocation, rounded down to ``ALIGNMENT``.
        nbytes: from there to its last byte.
    """

    allocation: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Split:
    """Where every use of the allocations lies.

    Attributes:
        parts: in order of first use.
        steps: for each step the index of the part that holds each of its ranges.
        results: the same for the ranges that are read after the last step.
    """

    parts: tuple[Part, ...]
    steps: tuple[Mapping[BufferUse, int], ...]
    results: Mapping[BufferUse, int]


def split_allocations(
    steps: Sequence[Step],
    allocations: Set[str],
    results: Sequence[BufferUse],
    *,
    is_whole: bool = False,
) -> Split:
    """Returns the parts of some allocations, and the part of every use of them.

    Args:
        steps: in XLA's serial order.
        allocations: names of those to split; uses of others, and of no bytes, are left out.
        results: the ranges that are read after the last step.
        is_whole: True to keep each allocation in one part, as XLA laid it out.
    """
    values = _Values(is_whole)
    names: set[str] = set()
    found: list[dict[BufferUse, int]] = []
    for step in steps:
        writes = _only(step.writes, allocations)
        reads = _only(step.reads, allocations)
        # A later step of one instruction continues with what the earlier ones wrote, whether XLA
        # lists it as an operand or not: see Note [Splitting is safe].
        reads += writes if step.name in names else ()
        names.add(step.name)
        found.append(_follow_step(values, reads, writes))
    last = _follow_step(values, _only(results, allocations), ())
    parts, index_of = values.list_parts()
    return Split(
        parts,
        tuple({use: index_of[value] for use, value in uses.items()} for uses in found),
        {use: index_of[value] for use, value in last.items()},
    )


def find_whole_peak(steps: Sequence[GraphStep], allocations: Set[str]) -> int:
    """Returns the most bytes of whole allocations that live at one step.

    Args:
        steps: in XLA's serial order.
        allocations: names of those that count, each in one part from its first use to its last.
    """
    found: dict[str, tuple[int, int, int, int]] = {}
    for index, step in enumerate(steps):
        for name, offset, nbytes in (*step.reads, *step.writes):
            if nbytes and name in allocations:
                start, end, first, _ = found.get(name, (offset, 0, index, index))
                found[name] = (min(start, offset), max(end, offset + nbytes), first, index)
    return find_least_bytes(
        Lifetime(name, end - start + start % ALIGNMENT, first, last)
        for name, (start, end, first, last) in found.items()
    )


def _only(uses: Sequence[BufferUse], allocations: Set[str]) -> list[BufferUse]:
    return [use for use in uses if use.buffer in allocations and use.nbytes]


def _follow_step(
    values: _Values, reads: Sequence[BufferUse], writes: Sequence[BufferUse]
) -> dict[BufferUse, int]:
    """Returns the value that each use of one step belongs to."""
    is_read = dict.fromkeys(writes, False) | dict.fromkeys(reads, True)
    found: dict[BufferUse, int] = {}
    waiting = sorted(is_read)
    first = 0
    while first < len(waiting):
        allocation, start, nbytes = waiting[first]
        end, last, is_any_read = start + nbytes, first + 1, is_read[waiting[first]]
        # One node may name a range twice, as read and as written: what overlaps stays together.
        while last < len(waiting) and waiting[last].buffer == allocation:
            use = waiting[last]
            if use.offset >= end:
                break
            end, last = max(end, use.offset + use.nbytes), last + 1
            is_any_read = is_any_read or is_read[use]
        follow = values.use if is_any_read else values.begin
        found.update(dict.fromkeys(waiting[first:last], follow(allocation, start, end)))
        first = last
    return found


class _Values:
    """The values of all allocations, joined where a step connects them (union-find)."""

    def __init__(self, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._maps: dict[str, ByteMap[int]] = {}
        self._parents: list[int] = []
        self._ranges: list[tuple[str, int, int]] = []

    def begin(self, allocation: str, start: int, end: int) -> int:
        """Returns a new value in the range: its old bytes are never read again."""
        follow = self.use if self._is_whole else self._add
        return follow(allocation, start, end)

    def use(self, allocation: str, start: int, end: int) -> int:
        """Returns the value that holds the whole range; those under it are joined."""
        held = self._maps[allocation].read(start, end) if allocation in self._maps else []
        # In one part a value gets bytes that were not in its range: those are noted below.
        if len(held) == 1 and held[0] >= 0 and not self._is_whole:
            return self._find(held[0])
        roots = sorted({self._find(value) for value in held if value >= 0})
        if not roots:
            return self._add(allocation, start, end)
        first = roots[0]
        self._maps[allocation].replace(start, end, first)
        for root in roots:
            self._parents[root] = first
            start, end = min(start, self._ranges[root][1]), max(end, self._ranges[root][2])
        self._ranges[first] = (allocation, start, end)
        return first

    def _add(self, allocation: str, start: int, end: int) -> int:
        value = len(self._parents)
        self._parents.append(value)
        self._ranges.append((allocation, start, end))
        # In one part, bytes that no step has touched belong to the first value, too.
        untouched = value if self._is_whole else -1
        self._maps.setdefault(allocation, ByteMap(untouched)).replace(start, end, value)
        return value

    def list_parts(self) -> tuple[tuple[Part, ...], list[int]]:
        """Returns the parts, and for every value the index of its part."""
        roots = [self._find(value) for value in range(len(self._parents))]
        index_of = {root: index for index, root in enumerate(dict.fromkeys(roots))}
        parts = []
        for root in index_of:
            allocation, start, end = self._ranges[root]
            offset = start - start % ALIGNMENT
            parts.append(Part(allocation, offset, end - offset))
        return tuple(parts), [index_of[root] for root in roots]

    def _find(self, value: int) -> int:
        while self._parents[value] != value:
            self._parents[value] = self._parents[self._parents[value]]
            value = self._parents[value]
        return value
