"""The memory plan: an offset in the arena for every buffer, chosen before anything runs.

Pure Python: lifetimes in, offsets out, no device. Buffers whose lifetimes are disjoint may share
bytes. Finding the smallest arena is NP-hard; greedy placement in a few orders, each buffer into the
tightest gap that is free during its whole life, comes close to the lower bound in practice.

Note [Kept and scratch]. An arena has two parts. What holds a value between two replays (inputs,
state, constants, results) is *kept*, at the bottom, side by side. Temporaries are *scratch*, behind
it: between two replays those bytes mean nothing, so the graphs of one pool have their scratch in
the same memory, whatever the order in which they are replayed. Inputs that are *lent* have their
places behind the end of the arena: Note [Lent inputs] in `lent_inputs.py`.

Note [Host memory]. A function may keep values in host memory (`jax.memory.Space.Host`), as
`jax.checkpoint` does with what it offloads. XLA plans that memory apart, in allocations of their
own, and these stay whole: what they save is memory of the device. A graph has page-locked memory
for them as long as it lives; their places here are behind the end of the arena, too.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tracegraph.lowering.planning.lifetimes import Lifetime
from tracegraph.lowering.planning.plan_text import format_lifetimes
from tracegraph.runtime.definition.graph import ArenaSize
from tracegraph.runtime.errors import InternalError, count_noun

ALIGNMENT = 256
# Other orders than the first are tried for so many buffers at most, and only where the arena takes
# more than this share of what lives at one step.
MANY_BUFFERS = 1000
NEARLY_LEAST = 1.01
REPORTED_PROBLEMS = 5


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Where the buffers of one captured function lie in its arena.

    Attributes:
        name: the captured function's name.
        lifetimes: every buffer with its size and lifetime.
        offsets: bytes from the start of the arena, by buffer name; behind its end for what is lent
            or in host memory.
        arena_bytes: size of the arena.
        kept_bytes: size of its lower part, see Note [Kept and scratch].
    """

    name: str
    lifetimes: tuple[Lifetime, ...]
    offsets: Mapping[str, int]
    arena_bytes: int
    kept_bytes: int = 0

    @property
    def arena_size(self) -> ArenaSize:
        """Bytes of its two parts."""
        return ArenaSize(self.kept_bytes, self.arena_bytes - self.kept_bytes)

    @property
    def sum_bytes(self) -> int:
        """Bytes that all buffers take side by side, each rounded up to the alignment."""
        return sum(align(each.nbytes) for each in self.lifetimes if not each.is_outside)

    @property
    def lent_bytes(self) -> int:
        """Bytes of the inputs that are read in the caller's memory."""
        return sum(each.nbytes for each in self.lifetimes if each.is_lent)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(each.nbytes for each in self.lifetimes if each.is_host)

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Bytes kept, and the most bytes of scratch alive at one step: no arena can be smaller."""
        return self.kept_bytes + _find_peak(_list_scratch(self.lifetimes))

    def __str__(self) -> str:
        return format_plan(self)


def plan_memory(
    name: str, lifetimes: Iterable[Lifetime], *, wanted_bytes: int = sys.maxsize
) -> MemoryPlan:
    """Chooses an offset for every buffer such that buffers alive at one step do not overlap.

    The same lifetimes always give the same plan.

    Args:
        name: the captured function's name.
        lifetimes: every buffer with its size in bytes and its lifetime in steps.
        wanted_bytes: what the arena should take at most, if there is a way.

    Returns:
        A verified plan; every offset is a multiple of ``ALIGNMENT``.

    Example:
        >>> plan = plan_memory("f", [Lifetime("a", 512, 0, 1), Lifetime("b", 512, 2, 3)])
        >>> plan.arena_bytes, plan.sum_bytes
        (512, 1024)
    """
    lifetimes = tuple(lifetimes)
    scratch = _list_scratch(lifetimes)
    stacked, kept_bytes = _stack_kept(lifetimes)
    placed, base, searched = _stack(scratch, kept_bytes)
    peak_bytes = kept_bytes + _find_peak(scratch)
    enough_bytes = max(peak_bytes, min(int(NEARLY_LEAST * peak_bytes), wanted_bytes))
    first, *others = PLACEMENT_ORDERS
    best = _place(sorted(searched, key=first), base)
    for key in others if len(searched) <= MANY_BUFFERS else ():
        if best[1] > enough_bytes:
            found = _place(sorted(searched, key=key), base, limit_bytes=best[1])
            best = min(best, found, key=operator.itemgetter(1))
    offsets, arena_bytes = best
    offsets = {**stacked, **placed, **offsets, **_stack_outside(lifetimes, arena_bytes)}
    plan = MemoryPlan(name, lifetimes, offsets, arena_bytes, kept_bytes)
    verify_plan(plan)
    return plan


def verify_plan(plan: MemoryPlan) -> None:
    """Checks everything that a replay relies on.

    Args:
        plan: any plan.

    Raises:
        InternalError: two live buffers overlap; an offset is missing, negative or not aligned; a
            buffer reaches outside the arena; the arena is larger than the sum of the buffers or
            smaller than their peak.
    """
    problems = find_plan_problems(plan)
    if not problems:
        return
    shown = problems[:REPORTED_PROBLEMS]
    if len(problems) > REPORTED_PROBLEMS:
        shown.append(f"and {len(problems) - REPORTED_PROBLEMS} more")
    raise InternalError(
        f"the memory plan of `{plan.name}` is wrong: {'; '.join(shown)}",
        where=f"arena of {plan.arena_bytes:,} bytes with {len(plan.lifetimes):,} buffers",
        why="a replay writes to these addresses without any further check",
    )


def find_plan_problems(plan: MemoryPlan) -> list[str]:
    """Returns what is wrong with a plan, see `verify_plan`."""
    if problems := list(_find_malformed(plan)):
        return problems
    return [*_find_misplaced(plan), *_find_overlaps(plan), *_find_wrong_totals(plan)]


def format_plan(plan: MemoryPlan) -> str:
    """Returns the plan as a table: offset, bytes and lifetime of each buffer, in arena order.

    The rows are those of `format_lifetimes`; the last line is the summary.

    Args:
        plan: the plan to print.

    Example:
        >>> print(format_plan(plan_memory("f", [Lifetime("a", 512, 0, 1)])))
        memory plan of `f`: 1 buffer, 2 steps
          buffer  offset  bytes  steps  lifetime
          a            0    512   0..1  ██
          arena 512 bytes, kept 0, sum 512, peak 512, saved 0.0 %
    """
    step_count = max((lifetime.last + 1 for lifetime in plan.lifetimes), default=0)
    title = f"memory plan of `{plan.name}`: "
    title += f"{count_noun(len(plan.lifetimes), 'buffer')}, {count_noun(step_count, 'step')}"
    lines = [title, *format_lifetimes(plan.lifetimes, plan.offsets, step_count)]
    sum_bytes = plan.sum_bytes
    saved = 100 * (1 - plan.arena_bytes / sum_bytes) if sum_bytes else 0.0
    lent = f", lent {plan.lent_bytes:,}" if plan.lent_bytes else ""
    lines.append(
        f"  arena {plan.arena_bytes:,} bytes, kept {plan.kept_bytes:,}, sum {sum_bytes:,}, "
        f"peak {plan.peak_bytes:,}, saved {saved:.1f} %{lent}"
    )
    return "\n".join(lines)


def _by_size(lifetime: Lifetime) -> tuple[int, int]:
    return -lifetime.nbytes, lifetime.first


def _by_first_step(lifetime: Lifetime) -> tuple[int, int]:
    return lifetime.first, -lifetime.nbytes


def _by_area(lifetime: Lifetime) -> tuple[int, int]:
    return -align(lifetime.nbytes) * (lifetime.last - lifetime.first + 1), lifetime.first


PLACEMENT_ORDERS: tuple[Callable[[Lifetime], tuple[int, int]], ...] = (
    _by_size,
    _by_area,
    _by_first_step,
)


def _list_scratch(lifetimes: Iterable[Lifetime]) -> list[Lifetime]:
    return [lifetime for lifetime in lifetimes if not lifetime.is_kept]


def _stack_kept(lifetimes: Iterable[Lifetime]) -> tuple[dict[str, int], int]:
    """Returns the offsets of what is kept, side by side, and their end."""
    offsets: dict[str, int] = {}
    end = 0
    for lifetime in lifetimes:
        if lifetime.is_kept and not lifetime.is_outside:
            offsets[lifetime.name] = end if lifetime.nbytes else 0
            end += align(lifetime.nbytes)
    return offsets, end


def _stack_outside(lifetimes: Iterable[Lifetime], arena_bytes: int) -> dict[str, int]:
    """Returns the offsets of what is lent or in host memory, side by side behind the arena."""
    outside = [lifetime for lifetime in lifetimes if lifetime.is_outside]
    ends = itertools.accumulate((align(each.nbytes) for each in outside), initial=arena_bytes)
    return {each.name: start for each, start in zip(outside, ends, strict=False)}


def _stack(lifetimes: Sequence[Lifetime], base: int) -> tuple[dict[str, int], int, list[Lifetime]]:
    """Places what needs no search: empty buffers, and those that live during all steps.

    Returns:
        Their offsets from ``base`` on, the end of the stack, and the lifetimes that remain.
    """
    final = max((lifetime.last for lifetime in lifetimes), default=0)
    offsets: dict[str, int] = {}
    end = base
    searched: list[Lifetime] = []
    for lifetime in lifetimes:
        if not lifetime.nbytes:
            offsets[lifetime.name] = 0
        elif lifetime.first <= 0 and lifetime.last >= final:
            offsets[lifetime.name] = end
            end += align(lifetime.nbytes)
        else:
            searched.append(lifetime)
    return offsets, end, searched


def _place(
    ordered: Sequence[Lifetime], base: int, *, limit_bytes: int = sys.maxsize
) -> tuple[dict[str, int], int]:
    """Returns offsets from ``base`` on, and the arena size, when placed in this order.

    Stops, with an offset short, once the arena takes ``limit_bytes``.
    """
    offsets: dict[str, int] = {}
    arena_bytes = base
    placed: list[tuple[int, int, int, int]] = []
    for lifetime in ordered:
        if arena_bytes >= limit_bytes:
            break
        nbytes = align(lifetime.nbytes)
        start = _find_gap(placed, lifetime, base, nbytes)
        bisect.insort(placed, (start, start + nbytes, lifetime.first, lifetime.last))
        offsets[lifetime.name] = start
        arena_bytes = max(arena_bytes, start + nbytes)
    return offsets, arena_bytes


def _find_gap(
    placed: Sequence[tuple[int, int, int, int]], lifetime: Lifetime, base: int, nbytes: int
) -> int:
    """Returns the start of the tightest gap from ``base`` on, or the end of all that is there.

    What is placed (start, end, first and last step) is in the way if it lives with ``lifetime``.
    """
    born, dies = lifetime.first, lifetime.last
    cursor = base
    best_start, best_room = -1, sys.maxsize
    # Most of what is placed is not in the way: a comprehension passes it by in half of the time.
    near = [(each[0], each[1]) for each in placed if each[2] <= dies and each[3] >= born]
    for start, end in near:
        if nbytes <= start - cursor < best_room:
            best_start, best_room = cursor, start - cursor
            # Nothing is tighter than an exact fit.
            if best_room == nbytes:
                break
        # Not `max`: a call in the innermost loop of planning would double its time.
        if end > cursor:
            cursor = end
    return best_start if best_start >= 0 else cursor


def _find_malformed(plan: MemoryPlan) -> Iterator[str]:
    names: set[str] = set()
    for lifetime in plan.lifetimes:
        if lifetime.name in names:
            yield f"`{lifetime.name}` has two lifetimes"
        names.add(lifetime.name)
        if lifetime.name not in plan.offsets:
            yield f"`{lifetime.name}` has no offset"
        if lifetime.nbytes < 0 or not 0 <= lifetime.first <= lifetime.last:
            yield (
                f"`{lifetime.name}` has {lifetime.nbytes} bytes "
                f"and lives over steps {lifetime.first}..{lifetime.last}"
            )


def _find_misplaced(plan: MemoryPlan) -> Iterator[str]:
    for lifetime in plan.lifetimes:
        offset = plan.offsets[lifetime.name]
        if offset < 0:
            yield f"`{lifetime.name}` has the negative offset {offset}"
        if offset % ALIGNMENT:
            yield f"the offset {offset} of `{lifetime.name}` is not a multiple of {ALIGNMENT}"
        end = offset + lifetime.nbytes
        if lifetime.is_outside:
            if offset < plan.arena_bytes or not lifetime.is_kept:
                what = "lent" if lifetime.is_lent else "in host memory"
                yield f"`{lifetime.name}` is {what}, and stands at {offset} in the arena"
            continue
        if end > plan.arena_bytes:
            yield f"`{lifetime.name}` reaches outside the arena, to {end}"
        if lifetime.is_kept and end > plan.kept_bytes:
            yield f"`{lifetime.name}` is kept, and reaches into the scratch, to {end}"
        if not lifetime.is_kept and lifetime.nbytes and offset < plan.kept_bytes:
            yield f"`{lifetime.name}` is a temporary, and stands at {offset} in the kept part"


def _find_overlaps(plan: MemoryPlan) -> Iterator[str]:
    """Sweeps over the steps; as long as all is well, only neighbours in the arena can collide."""
    taken = [lifetime for lifetime in plan.lifetimes if lifetime.nbytes]
    events = [(lifetime.first, 1, index) for index, lifetime in enumerate(taken)]
    events += [(lifetime.last + 1, 0, index) for index, lifetime in enumerate(taken)]
    live: list[tuple[int, int]] = []
    for _, is_start, index in sorted(events):
        entry = (plan.offsets[taken[index].name], index)
        position = bisect.bisect_left(live, entry)
        if not is_start:
            del live[position]
            continue
        for _, other in live[max(position - 1, 0) : position + 1]:
            if _collides(plan, taken[index], taken[other]):
                yield f"`{taken[other].name}` and `{taken[index].name}` overlap while both live"
        live.insert(position, entry)


def _collides(plan: MemoryPlan, one: Lifetime, other: Lifetime) -> bool:
    one_offset, other_offset = plan.offsets[one.name], plan.offsets[other.name]
    return one_offset < other_offset + other.nbytes and other_offset < one_offset + one.nbytes


def _find_wrong_totals(plan: MemoryPlan) -> Iterator[str]:
    if plan.arena_bytes > plan.sum_bytes:
        yield f"the arena is larger than the sum of its buffers, {plan.sum_bytes} bytes"
    if plan.arena_bytes < plan.peak_bytes:
        yield f"the arena is smaller than what lives at one step, {plan.peak_bytes} bytes"


def find_least_bytes(lifetimes: Iterable[Lifetime]) -> int:
    """Returns the bytes that no arena with these lifetimes goes below.

    Args:
        lifetimes: every buffer.

    Example:
        >>> find_least_bytes([Lifetime("a", 512, 0, 1), Lifetime("b", 512, 2, 3)])
        512
    """
    lifetimes = tuple(lifetimes)
    kept = [each for each in lifetimes if each.is_kept and not each.is_outside]
    return sum(align(each.nbytes) for each in kept) + _find_peak(_list_scratch(lifetimes))


def _find_peak(lifetimes: Iterable[Lifetime]) -> int:
    changes: dict[int, int] = {}
    for lifetime in lifetimes:
        nbytes = align(lifetime.nbytes)
        changes[lifetime.first] = changes.get(lifetime.first, 0) + nbytes
        changes[lifetime.last + 1] = changes.get(lifetime.last + 1, 0) - nbytes
    peak = live = 0
    for step in sorted(changes):
        live += changes[step]
        peak = max(peak, live)
    return peak


def align(nbytes: int) -> int:
    """Returns the bytes that a buffer takes in the arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
