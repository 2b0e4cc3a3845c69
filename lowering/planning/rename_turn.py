"""Rename: within a turn of a loop, each value that nothing outside of it sees gets its own place.

Note [Values of a turn]
XLA gives each iteration of a loop the same temporaries, and within an iteration the same bytes to
one value after another. In the body of a WHILE node, which holds several iterations, a step would
wait for the last readers of the value before: the first steps of an iteration for kernels of the
one before that save what the backward pass needs, a matmul for a kernel that adds what an earlier
one has left. So values are taken apart, as those of the whole program are in Note [Splitting is
safe], and placed such that bytes are used anew an iteration after their last use.

What a turn finds in memory, and what it leaves there, keeps the place that XLA chose; so after each
turn memory is as if nothing had been moved. So does what branches and inner loops touch: whether
they write is not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from tracegraph.lowering.device_program import ConditionalStep, DeviceStep, GraphStep, list_uses
from tracegraph.lowering.planning.lifetimes import Lifetime
from tracegraph.lowering.planning.memory_plan import align, plan_memory
from tracegraph.lowering.planning.split_temporaries import Split, split_allocations
from tracegraph.runtime.definition.nodes import BufferUse, FillNode

# Where values of an iteration are larger, kernels take longer than it takes to start the next one.
RENAMED_BYTES = 4 << 20


def rename_turn(
    iterations: Sequence[Sequence[GraphStep]], add_temporary: Callable[[int], BufferUse]
) -> list[GraphStep]:
    """Returns the steps of all iterations, with values in places of their own.

    See Note [Values of a turn].

    Args:
        iterations: the steps of each, in program order.
        add_temporary: returns so many new bytes; called once, where there is something to move.
    """
    steps = [step for each in iterations for step in each]
    if len(iterations) < 2:
        return steps
    split = _split(steps)
    values = _choose(_find_inner(steps, split), len(iterations))
    if not values:
        return steps
    slack = max(map(len, iterations))
    later = [dataclasses.replace(each, last=each.last + slack) for each in values.values()]
    plan = plan_memory("turn", later)
    place = add_temporary(plan.arena_bytes)

    def move(step: GraphStep, parts: Mapping[BufferUse, int]) -> GraphStep:
        def relocate(use: BufferUse) -> BufferUse:
            number = parts.get(use, -1)
            if number not in values:
                return use
            start = place.offset + plan.offsets[str(number)] - split.parts[number].offset
            return BufferUse(place.buffer, start + use.offset, use.nbytes)

        return step.move(relocate)

    return [move(step, parts) for step, parts in zip(steps, split.steps[1:], strict=True)]


def _split(steps: Sequence[GraphStep]) -> Split:
    """Returns the values of a turn; the first step writes, and the last reads, all that is used."""
    touched = join_ranges(use for step in steps for use in list_uses(step))
    begin = DeviceStep(FillNode("begin", touched[0]), reads=(), writes=tuple(touched))
    return split_allocations([begin, *steps], {use.buffer for use in touched}, touched)


def _find_inner(steps: Sequence[GraphStep], split: Split) -> dict[int, Lifetime]:
    """Returns the values, by their numbers, that begin and end within a turn of kernels."""
    begin, *others = split.steps
    fixed = {*begin.values(), *split.results.values()}
    found: dict[int, Lifetime] = {}
    for index, (step, parts) in enumerate(zip(steps, others, strict=True)):
        if isinstance(step, ConditionalStep):
            fixed.update(parts.values())
        for number in parts.values():
            first = found[number].first if number in found else index
            found[number] = Lifetime(str(number), split.parts[number].nbytes, first, index)
    return {number: value for number, value in found.items() if number not in fixed}


def _choose(values: Mapping[int, Lifetime], count: int) -> dict[int, Lifetime]:
    """Returns as many values as fit into memory, the smallest first."""
    chosen: dict[int, Lifetime] = {}
    room = RENAMED_BYTES * count
    for number, value in sorted(values.items(), key=lambda entry: entry[1].nbytes):
        room -= align(value.nbytes)
        if room < 0:
            break
        chosen[number] = value
    return chosen


def join_ranges(uses: Iterable[BufferUse]) -> list[BufferUse]:
    """Returns the fewest ranges with the same bytes; ranges that only touch stay two.

    Example:
        >>> join_ranges([BufferUse("a", 4, 4), BufferUse("a", 0, 5), BufferUse("a", 8, 1)])
        [BufferUse(buffer='a', offset=0, nbytes=8), BufferUse(buffer='a', offset=8, nbytes=1)]
    """
    joined: list[BufferUse] = []
    for use in sorted({use for use in uses if use.nbytes}):
        before = joined[-1] if joined else None
        if before is None or not before.overlaps(use):
            joined.append(use)
            continue
        end = max(before.offset + before.nbytes, use.offset + use.nbytes)
        joined[-1] = BufferUse(use.buffer, before.offset, end - before.offset)
    return joined
