"""Which blocks lived when, out of a snapshot's trace, and how they stack up over time.

Pure data. A trace may begin in the middle: a block that is freed but never allocated in it, or in
use at the end without any entry, was allocated before the first entry.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Entry: TypeAlias = Mapping[str, Any]
# Steps at which something changes, with the bytes from then on.
Level: TypeAlias = tuple[tuple[int, int], ...]

_RESERVING = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_ACTIVE = ("active_allocated", "active_pending_free")


@dataclasses.dataclass(frozen=True)
class LiveBlock:
    """A block, and the steps from which and until which it was in use.

    Attributes:
        record: address ``addr``, bytes ``size``, ``stream`` and ``frames``, as a trace entry.
        first: step of its allocation; 0 if it was allocated before the trace.
        last: step of its end; one past the last step if it is still in use.
    """

    record: Entry
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Its requested size."""
        return self.record["size"]


@dataclasses.dataclass(frozen=True)
class BlockHistory:
    """What happened in one pool, or in all pools of a device.

    Attributes:
        entries: allocations, ends and changes of segments; entry i makes step i + 1.
        blocks: all blocks, by first step.
        reserved: bytes of segments, from step to step.
    """

    entries: tuple[Entry, ...]
    blocks: tuple[LiveBlock, ...]
    reserved: Level

    @property
    def step_count(self) -> int:
        """Number of steps; step 0 is the time before the first entry."""
        return len(self.entries)


@dataclasses.dataclass(frozen=True)
class Band:
    """A block as the picture has it.

    Attributes:
        block: the block.
        number: of the block in its history, for the colour.
        offsets: steps at which its lower edge changes, with the bytes below it from then on.
    """

    block: LiveBlock
    number: int
    offsets: list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Stack:
    """The bands of a timeline.

    Attributes:
        bands: of the drawn blocks.
        drawn: bytes of drawn blocks in use, from step to step.
        total: bytes of all blocks in use, from step to step.
    """

    bands: tuple[Band, ...]
    drawn: Level
    total: Level


def list_pools(trace: Iterable[Entry], segments: Iterable[Entry]) -> list[tuple[int, ...]]:
    """Returns the ids of the pools that a trace and its segments name, in order."""
    ids = {tuple(entry["pool_id"]) for entry in trace if "pool_id" in entry}
    ids |= {tuple(each["segment_pool_id"]) for each in segments if "segment_pool_id" in each}
    return sorted(ids)


def find_blocks(
    trace: Sequence[Entry], segments: Sequence[Entry], pool_id: tuple[int, ...] | None = None
) -> BlockHistory:
    """Returns the blocks of one pool, or of all.

    Args:
        trace: entries of one device, oldest first.
        segments: of the same device, at the end of the trace.
        pool_id: None for all pools.
    """
    if pool_id is not None:
        trace = [entry for entry in trace if tuple(entry.get("pool_id", ())) == pool_id]
        segments = [each for each in segments if tuple(each.get("segment_pool_id", ())) == pool_id]
    has_completed = any(entry["action"] == "free_completed" for entry in trace)
    end = "free_completed" if has_completed else "free_requested"
    kept = ("alloc", end, *_RESERVING)
    entries = tuple(entry for entry in trace if entry["action"] in kept)
    blocks = sorted(_match(entries, segments, end), key=lambda block: block.first)
    return BlockHistory(entries, tuple(blocks), _follow_reserved(entries, segments))


def _match(entries: Sequence[Entry], segments: Iterable[Entry], end: str) -> Iterator[LiveBlock]:
    open_blocks: dict[int, tuple[Entry, int]] = {}
    for step, entry in enumerate(entries, 1):
        if entry["action"] not in ("alloc", end):
            continue
        record, first = open_blocks.pop(entry["addr"], (None, 0))
        if record is not None:
            yield LiveBlock(record, first, step)
        elif entry["action"] == end:
            yield LiveBlock(entry, 0, step)
        if entry["action"] == "alloc":
            open_blocks[entry["addr"]] = entry, step
    for record in _list_active(segments):
        if record["addr"] not in open_blocks:
            yield LiveBlock(record, 0, len(entries) + 1)
    for record, first in open_blocks.values():
        yield LiveBlock(record, first, len(entries) + 1)


def _list_active(segments: Iterable[Entry]) -> Iterator[Entry]:
    for segment in segments:
        for address, block in locate_blocks(segment):
            if block["state"] in _ACTIVE:
                yield {
                    "addr": address,
                    "size": block.get("requested_size", block["size"]),
                    "stream": segment["stream"],
                    "frames": block.get("frames", []),
                }


def locate_blocks(segment: Entry) -> Iterator[tuple[int, Entry]]:
    """Yields the blocks of a segment with their addresses, which follow from the sizes before."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield address, block
        address += block["size"]


def _follow_reserved(entries: Sequence[Entry], segments: Iterable[Entry]) -> Level:
    changes = [_RESERVING.get(entry["action"], 0) * entry["size"] for entry in entries]
    # The end is known exactly; the beginning follows from it.
    now = sum(segment["total_size"] for segment in segments) - sum(changes)
    level = [(0, now)]
    for step, change in enumerate(changes, 1):
        if change:
            now += change
            level.append((step, now))
    return tuple(level)


def stack_blocks(history: BlockHistory, most_blocks: int, most_points: int) -> Stack:
    """Stacks the largest blocks on each other, newest on top; when one is freed, those above sink.

    Args:
        history: of `find_blocks`.
        most_blocks: how many blocks are drawn at most.
        most_points: how often their lower edges may change together, at least 1; the number of
            drawn blocks is halved until they do not change more often.
    """
    by_size = sorted(range(len(history.blocks)), key=lambda i: -history.blocks[i].nbytes)
    count = min(most_blocks, len(by_size))
    bands = _stack(history, by_size[:count], most_points)
    while bands is None:
        count //= 2
        bands = _stack(history, by_size[:count], most_points)
    drawn = _add_up(band.block for band in bands)
    return Stack(tuple(bands), drawn, _add_up(history.blocks))


def _stack(history: BlockHistory, numbers: Iterable[int], most_points: int) -> list[Band] | None:
    # Blocks are numbered by first step, so that a later one has the greater number.
    bands = [Band(history.blocks[number], number, []) for number in sorted(numbers)]
    begins = [(band.block.first, 1, i) for i, band in enumerate(bands)]
    lasts = [(band.block.last, 0, i) for i, band in enumerate(bands)]
    ends = [end for end in lasts if end[0] <= history.step_count]
    live: list[int] = []
    top = points = 0
    for step, is_begin, i in sorted(begins + ends):
        nbytes = bands[i].block.nbytes
        if is_begin:
            bands[i].offsets.append((step, top))
            live.append(i)
            top += nbytes
            continue
        place = bisect.bisect_left(live, i)
        del live[place]
        top -= nbytes
        points += len(live) - place + 1
        if points > most_points:
            return None
        for above in live[place:]:
            bands[above].offsets.append((step, bands[above].offsets[-1][1] - nbytes))
    return bands


def _add_up(blocks: Iterable[LiveBlock]) -> Level:
    changes = {0: 0}
    for block in blocks:
        changes[block.first] = changes.get(block.first, 0) + block.nbytes
        changes[block.last] = changes.get(block.last, 0) - block.nbytes
    steps = sorted(changes)
    return tuple(zip(steps, itertools.accumulate(changes[step] for step in steps), strict=True))
