"""Alternate iterations: every second iteration of a turn computes in temporaries of its own.

Note [Alternating iterations]
XLA gives each iteration of a loop the same temporaries. In the body of a WHILE node, which holds
several iterations, the first steps of one would wait for the last readers of the one before: for
kernels that save what the backward pass needs, and that nothing else waits for. With two sets of
temporaries they run beside the next iteration.

What an iteration passes on to the next keeps its place, and the last iteration of a turn computes
in the places that XLA chose, so after each turn memory is as if there were one set. Moved are only
bytes that every iteration writes before it reads them. What branches and inner loops touch stays:
whether they write is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from tracegraph.lowering.device_program import ConditionalStep, GraphStep, list_uses
from tracegraph.lowering.planning.first_reads import find_needed
from tracegraph.lowering.planning.memory_plan import ALIGNMENT, align
from tracegraph.runtime.nodes import BufferUse

# Where temporaries are larger, kernels take longer than it takes to start the next one.
SECOND_SET_BYTES = 4 << 20


def alternate_iterations(
    iterations: Sequence[Sequence[GraphStep]], add_temporary: Callable[[int], BufferUse]
) -> list[GraphStep]:
    """Returns the steps of all iterations, every second one with temporaries of its own.

    Args:
        iterations: the steps of each, in program order.
        add_temporary: returns so many new bytes; called once, where there is something to move.
    """
    moved = _choose(_find_local(iterations)) if len(iterations) > 1 else []
    if not moved:
        return [step for steps in iterations for step in steps]
    places = _place(moved)
    second = add_temporary(places[-1] + align(moved[-1].nbytes + ALIGNMENT))
    by_buffer: dict[str, list[tuple[BufferUse, int]]] = defaultdict(list)
    for use, place in zip(moved, places, strict=True):
        # An address keeps its remainder, which kernels may rely on.
        by_buffer[use.buffer].append((use, place + use.offset % ALIGNMENT - use.offset))

    def relocate(use: BufferUse) -> BufferUse:
        for whole, distance in by_buffer.get(use.buffer, ()):
            if whole.overlaps(use):
                return BufferUse(second.buffer, use.offset + distance, use.nbytes)
        return use

    last = len(iterations) - 1
    return [
        step.move(relocate) if (last - index) % 2 else step
        for index, steps in enumerate(iterations)
        for step in steps
    ]


def _find_local(iterations: Sequence[Sequence[GraphStep]]) -> list[BufferUse]:
    """Returns the pieces that each iteration writes before it reads them, as far as it does."""
    needed = join_ranges(use for steps in iterations for use in find_needed(steps))
    needed += [
        use
        for steps in iterations
        for step in steps
        if isinstance(step, ConditionalStep)
        for use in list_uses(step)
    ]
    fixed = join_ranges(needed)
    written = [join_ranges(use for step in steps for use in step.writes) for steps in iterations]
    touched = join_ranges(use for steps in iterations for step in steps for use in list_uses(step))
    return [
        piece
        for piece in touched
        if not any(piece.overlaps(use) for use in fixed)
        # What only some iterations write would be left in the wrong place by the last one.
        and len({_cut(piece, uses) for uses in written}) == 1
    ]


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


def _cut(piece: BufferUse, uses: Sequence[BufferUse]) -> tuple[BufferUse, ...]:
    return tuple(use for use in uses if use.overlaps(piece))


def _choose(pieces: Sequence[BufferUse]) -> list[BufferUse]:
    """Returns as many pieces as fit, the smallest first."""
    chosen: list[BufferUse] = []
    room = SECOND_SET_BYTES
    for piece in sorted(pieces, key=lambda each: each.nbytes):
        room -= align(piece.nbytes + ALIGNMENT)
        if room < 0:
            break
        chosen.append(piece)
    return chosen


def _place(pieces: Sequence[BufferUse]) -> list[int]:
    """Returns an offset for each piece, with room for the remainder of its address."""
    places, end = [], 0
    for piece in pieces:
        places.append(end)
        end += align(piece.nbytes + ALIGNMENT)
    return places
