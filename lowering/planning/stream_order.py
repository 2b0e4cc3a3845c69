"""The order of steps: what the streams declare, and what the buffers need.

Sets of steps are bitsets: bit ``i`` of an int stands for step ``i``. Steps are in program order, so
every edge goes from a lower index to a higher one and no graph search is needed.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from tracegraph.lowering.device_program import BufferUse, DeviceProgram, Step
from tracegraph.runtime.errors import CaptureError

REPORTED_HAZARDS = 8


class HazardKind(enum.Enum):
    """Why two steps on the same bytes must keep their order."""

    READ_AFTER_WRITE = "read after write"
    WRITE_AFTER_READ = "write after read"
    WRITE_AFTER_WRITE = "write after write"


@dataclasses.dataclass(frozen=True)
class Hazard:
    """Two steps that touch a common byte, at least one of them writing.

    Attributes:
        kind: which of the two writes.
        first: index of the step that comes first in program order.
        second: index of the step that must wait for it.
        buffer: name of the buffer that both touch.
    """

    kind: HazardKind
    first: int
    second: int
    buffer: str


def find_ancestors(count: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Returns for each step the bitset of all steps that are ordered before it.

    Args:
        count: number of steps.
        edges: pairs of step indices; the first must finish before the second.

    Raises:
        CaptureError: an edge goes backwards, to itself, or to a step that does not exist.

    Example:
        >>> find_ancestors(3, [(0, 1), (1, 2)])
        (0, 1, 3)
    """
    return _join_predecessors(_group_predecessors(count, edges))


def reduce_edges(count: int, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the fewest edges that declare the same order, sorted (the transitive reduction).

    Args:
        count: number of steps.
        edges: pairs of step indices; the first must finish before the second.

    Raises:
        CaptureError: an edge goes backwards, to itself, or to a step that does not exist.

    Example:
        >>> reduce_edges(3, [(0, 1), (1, 2), (0, 2)])
        ((0, 1), (1, 2))
    """
    grouped = _group_predecessors(count, edges)
    ancestors = _join_predecessors(grouped)
    reduced: list[tuple[int, int]] = []
    for index, predecessors in enumerate(grouped):
        covered = 0
        for predecessor in sorted(predecessors, reverse=True):
            if not covered >> predecessor & 1:
                reduced.append((predecessor, index))
            covered |= ancestors[predecessor] | 1 << predecessor
    return tuple(sorted(reduced))


def find_hazards(program: DeviceProgram) -> tuple[Hazard, ...]:
    """Returns the pairs of steps whose order the buffers need, in program order.

    A step that a later write covers whole is not paired with what comes after that write: the two
    pairs in between already order it.

    Args:
        program: the steps with the byte ranges that they read and write.

    Returns:
        Each pair once per kind and buffer, sorted by its second step, then by its first.
    """
    reads: dict[str, list[tuple[int, BufferUse]]] = {}
    writes: dict[str, list[tuple[int, BufferUse]]] = {}
    hazards: dict[Hazard, None] = {}
    for index, step in enumerate(program.steps):
        found = [
            *_pair(HazardKind.READ_AFTER_WRITE, writes, index, step.reads),
            *_pair(HazardKind.WRITE_AFTER_READ, reads, index, step.writes),
            *_pair(HazardKind.WRITE_AFTER_WRITE, writes, index, step.writes),
        ]
        hazards.update(dict.fromkeys(sorted(found, key=lambda hazard: hazard.first)))
        for use in step.writes:
            _drop_covered(reads, use)
            _drop_covered(writes, use)
        _remember(reads, index, step.reads)
        _remember(writes, index, step.writes)
    return tuple(hazards)


def verify_order(program: DeviceProgram) -> None:
    """Checks that the declared order of the streams covers every hazard.

    Args:
        program: the steps, and the order that streams and waits declare.

    Raises:
        CaptureError: two steps touch the same bytes and neither waits for the other; all such
            pairs are named.
    """
    ancestors = find_ancestors(len(program.steps), program.edges)
    if not _has_unordered(program.steps, ancestors):
        return
    missing = [
        hazard
        for hazard in find_hazards(program)
        if not ancestors[hazard.second] >> hazard.first & 1
    ]
    if missing:
        raise CaptureError(
            _describe(program.steps, missing[0]),
            where=_locate(program, missing),
            why="streams run side by side; without a wait the order of the two is left to chance",
            fix=_advise(program.steps, missing[0]),
            anchor="stream-wait",
        )


def _has_unordered(steps: Sequence[Step], ancestors: Sequence[int]) -> bool:
    """True when two unordered steps touch one buffer and one of them writes it, at any bytes."""
    touching: dict[str, int] = defaultdict(int)
    writing: dict[str, int] = defaultdict(int)
    for index, step in enumerate(steps):
        own = 1 << index
        unordered = ~(ancestors[index] | own)
        for use in step.reads:
            if writing[use.buffer] & unordered:
                return True
            touching[use.buffer] |= own
        for use in step.writes:
            if touching[use.buffer] & unordered:
                return True
            touching[use.buffer] |= own
            writing[use.buffer] |= own
    return False


def _group_predecessors(count: int, edges: Iterable[tuple[int, int]]) -> list[set[int]]:
    grouped: list[set[int]] = [set() for _ in range(count)]
    for first, second in edges:
        if not 0 <= first < second < count:
            raise CaptureError(
                f"edge {first} -> {second} does not go forward through {count} steps",
                where="order of the steps",
                why="steps are in program order, so a step can only wait for an earlier one",
                fix="internal error in tracegraph: please report this text",
                anchor="internal",
            )
        grouped[second].add(first)
    return grouped


def _join_predecessors(grouped: Sequence[set[int]]) -> tuple[int, ...]:
    ancestors = [0] * len(grouped)
    for index, predecessors in enumerate(grouped):
        for predecessor in predecessors:
            ancestors[index] |= ancestors[predecessor] | 1 << predecessor
    return tuple(ancestors)


def _pair(
    kind: HazardKind,
    earlier: dict[str, list[tuple[int, BufferUse]]],
    index: int,
    uses: Sequence[BufferUse],
) -> Iterator[Hazard]:
    for use in uses:
        for first, past in earlier.get(use.buffer, ()):
            if _shares_a_byte(past, use):
                yield Hazard(kind, first, index, use.buffer)


def _shares_a_byte(one: BufferUse, other: BufferUse) -> bool:
    return one.nbytes > 0 and other.nbytes > 0 and one.overlaps(other)


def _drop_covered(earlier: dict[str, list[tuple[int, BufferUse]]], write: BufferUse) -> None:
    if write.buffer in earlier:
        earlier[write.buffer] = [
            (index, past) for index, past in earlier[write.buffer] if not _covers(write, past)
        ]


def _covers(use: BufferUse, past: BufferUse) -> bool:
    return use.offset <= past.offset and past.offset + past.nbytes <= use.offset + use.nbytes


def _remember(
    earlier: dict[str, list[tuple[int, BufferUse]]], index: int, uses: Sequence[BufferUse]
) -> None:
    for use in uses:
        earlier.setdefault(use.buffer, []).append((index, use))


def _describe(steps: Sequence[Step], hazard: Hazard) -> str:
    first, second = steps[hazard.first], steps[hazard.second]
    later, earlier = {
        HazardKind.READ_AFTER_WRITE: ("reads", "writes"),
        HazardKind.WRITE_AFTER_READ: ("overwrites", "reads"),
        HazardKind.WRITE_AFTER_WRITE: ("overwrites", "writes"),
    }[hazard.kind]
    return (
        f"`{second.name}` on stream {second.stream} {later} `{hazard.buffer}` without waiting for "
        f"`{first.name}` on stream {first.stream}, which {earlier} it"
    )


def _locate(program: DeviceProgram, missing: Sequence[Hazard]) -> str:
    shown = [
        f"step {hazard.first} `{program.steps[hazard.first].name}` "
        f"(stream {program.steps[hazard.first].stream}), "
        f"step {hazard.second} `{program.steps[hazard.second].name}` "
        f"(stream {program.steps[hazard.second].stream}): "
        f"{hazard.kind.value} of `{hazard.buffer}`"
        for hazard in missing[:REPORTED_HAZARDS]
    ]
    if len(missing) > REPORTED_HAZARDS:
        shown.append(f"and {len(missing) - REPORTED_HAZARDS} more")
    return f"`{program.name}`, " + "; ".join(shown)


def _advise(steps: Sequence[Step], hazard: Hazard) -> str:
    first, second = steps[hazard.first], steps[hazard.second]
    if first.stream == second.stream:
        # The user's stream order covers it; lowering has lost an edge.
        return "internal error in tracegraph: please report this text"
    return (
        f"let stream {second.stream} wait for stream {first.stream} before `{second.name}`, "
        "as in `second.wait_stream(first)`, or use one stream"
    )
