"""The order that streams and waits declare, checked against the bytes that the steps share."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

from tracegraph.lowering.device_program import DeviceProgram, Step
from tracegraph.lowering.planning.byte_edges import find_edges, find_unordered_pair, lay_apart
from tracegraph.lowering.planning.step_order import find_ancestors, is_chain
from tracegraph.runtime.errors import CaptureError, InternalError

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


def verify_order(program: DeviceProgram) -> None:
    """Checks that the declared order of the streams covers every hazard.

    Args:
        program: the steps, and the order that streams and waits declare.

    Raises:
        CaptureError: two steps touch the same bytes and neither waits for the other; the waits
            that are missing are named.
        InternalError: the two are on one stream, whose order needs no wait of the user.
    """
    # The steps of one stream follow one another: most programs are such a chain.
    if is_chain(len(program.steps), program.edges):
        return
    steps, addresses = program.steps, lay_apart(program.buffers)
    pair = find_unordered_pair(steps, program.edges, addresses)
    if pair is None:
        return
    ancestors = find_ancestors(len(steps), program.edges)
    # The waits that cover everything; not every pair, of which most follow from these.
    missing = [
        (first, second)
        for first, second in find_edges(steps, addresses)
        if not ancestors[second] >> first & 1
    ]
    missing.sort(key=lambda edge: (edge[1], edge[0]))
    hazards = [hazard for edge in missing or [pair] for hazard in _list_hazards(steps, *edge)]
    hazard = hazards[0]
    what, where = _describe(steps, hazard), _locate(program, hazards)
    if steps[hazard.first].stream == steps[hazard.second].stream:
        raise InternalError(what, where=where, why="steps of one stream wait for one another")
    raise CaptureError(
        what,
        where=where,
        why="streams run side by side; without a wait the order of the two is left to chance",
        fix=_advise(steps, hazard),
        anchor="stream-wait",
    )


def _list_hazards(steps: Sequence[Step], first: int, second: int) -> Iterator[Hazard]:
    """Yields the hazards between two steps, each once."""
    one, other = steps[first], steps[second]
    for kind, earlier, later in (
        (HazardKind.READ_AFTER_WRITE, one.writes, other.reads),
        (HazardKind.WRITE_AFTER_READ, one.reads, other.writes),
        (HazardKind.WRITE_AFTER_WRITE, one.writes, other.writes),
    ):
        shared = [use.buffer for use in later if any(map(use.overlaps, earlier))]
        for buffer in dict.fromkeys(shared):
            yield Hazard(kind, first, second, buffer)


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
    return (
        f"let stream {second.stream} wait for stream {first.stream} before `{second.name}`, "
        "as in `second.wait_stream(first)`, or use one stream"
    )
