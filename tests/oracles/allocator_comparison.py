"""Compares what our allocator did with what PyTorch's did, after every operation of a trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.oracles.allocator_traces import Entry, Result, SegmentRow, Step, Trace, format_segments
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator

FAILURES = ("oom", "error", "skipped")
# What happens together comes in the order of hash tables of PyTorch's: of streams and of pools.
UNORDERED = frozenset(("free_completed", "segment_free", "segment_unmap"))
# PyTorch shows the setting that it began with, also after it was changed.
STALE_STATISTICS = ("max_split_size",)


class Difference(NamedTuple):
    """One thing that our allocator did otherwise.

    Attributes:
        trace: name of the trace.
        number: of the operation.
        operation: its name and arguments.
        what: "result", "history", "segments", "provider", or the key of a statistic.
        wanted: what PyTorch did.
        got: what ours did.
    """

    trace: str
    number: int
    operation: tuple[Any, ...]
    what: str
    wanted: Any
    got: Any

    def __str__(self) -> str:
        place = f"{self.trace}, operation {self.number} {self.operation}: {self.what}"
        return f"{place}\n  PyTorch {str(self.wanted)[:400]}\n  ours    {str(self.got)[:400]}"


class Comparison:
    """All that was different so far.

    Args:
        trace: that is played.
        allocator: ours.

    Attributes:
        differences: in order.
        has_restored: a checkpoint was restored. PyTorch has forgotten then what was requested,
            and its peaks depend on the order of a hash table: these are not compared any more.
    """

    def __init__(self, trace: Trace, allocator: CachingAllocator) -> None:
        self.differences: list[Difference] = []
        self.has_restored = False
        self._trace, self._allocator = trace, allocator
        self._statistics = dict(trace.baseline)
        self._last_statistics: dict[str, int] = {}
        self._distances: dict[str, int] = {}
        # The numbers of pools differ; which pool is which shows when one is first seen.
        self._pool_ids: dict[tuple[int, ...], tuple[int, ...]] = {}

    def note(self, index: int, what: str, wanted: Any, got: Any) -> None:
        """Adds a difference."""
        steps = self._trace.steps
        operation = steps[index].operation if index < len(steps) else ("end",)
        difference = Difference(self._trace.name, index, operation, what, wanted, got)
        self.differences.append(difference)

    def compare(self, index: int, result: Result) -> None:
        """Compares result, history, statistics and segments after an operation."""
        step = self._trace.steps[index]
        if not is_same_result(step.result, result):
            self.note(index, "result", step.result, result)
        self._compare_history(index, step)
        self._compare_statistics(index, step)
        self.compare_segments(index)

    def compare_segments(self, index: int) -> None:
        """Compares all segments, if the trace has them after this operation."""
        if index not in self._trace.segments:
            return
        rows = {row[0]: row for row in format_segments(self._allocator.snapshot())}
        for wanted in self._trace.segments[index]:
            got = rows.pop(wanted[0], None)
            if got is None or not self._is_same_segment(wanted, got):
                self.note(index, "segments", wanted, got)
        for got in rows.values():
            self.note(index, "segments", None, got)

    def _compare_history(self, index: int, step: Step) -> None:
        # An entry about missing memory has the free bytes of the device in place of an address.
        got = [
            Entry(entry["action"], entry.get("addr", 0), entry["size"], entry["stream"])
            for entry in self._allocator.history.read_entries()
        ]
        wanted = [e._replace(address=0) if e.action == "oom" else e for e in step.entries]
        if self.has_restored:
            got, wanted = (
                [entry._replace(nbytes=0) for entry in entries] for entries in (got, wanted)
            )
        is_restoring = step.operation[0] == "checkpoint_set"
        if not is_restoring and sort_runs(got) != sort_runs(wanted):
            self.note(index, "history", wanted, got)

    def _compare_statistics(self, index: int, step: Step) -> None:
        got = self._allocator.statistics.to_dict()
        # Ours, if they change as PyTorch's have.
        expected = self._last_statistics
        for key, change in step.changes.items():
            self._statistics[key] = self._statistics.get(key, 0) + change
            expected[key] = expected.get(key, 0) + change
        self._last_statistics = got
        if got == expected:
            return
        for key, wanted in self._statistics.items():
            distance = wanted - got.get(key, 0)
            # A counter that is off stays off: it is noted whenever it gets further off.
            if distance != self._distances.get(key, 0) and self._is_comparable(key):
                self._distances[key] = distance
                self.note(index, key, wanted, got.get(key))

    def _is_comparable(self, key: str) -> bool:
        if key.startswith("reserved_bytes_by_private_pools") or key in STALE_STATISTICS:
            return False
        is_lasting = key.endswith(".current") and not key.startswith("requested_bytes")
        return is_lasting or not self.has_restored

    def _is_same_segment(self, wanted: SegmentRow, got: SegmentRow) -> bool:
        pool_id = self._pool_ids.setdefault(got[7], wanted[7])
        got = (*got[:7], pool_id, *got[8:])
        if self.has_restored:
            return drop_requested(wanted) == drop_requested(got)
        return wanted == got


def sort_runs(entries: Iterable[Entry]) -> list[Entry]:
    """Returns a history in which what happens together and has no order is sorted."""
    runs = itertools.groupby(entries, key=lambda entry: entry.action)
    return [
        entry for action, run in runs for entry in (sorted(run) if action in UNORDERED else run)
    ]


def drop_requested(row: SegmentRow) -> SegmentRow:
    """Returns a segment without the bytes that were requested."""
    blocks = tuple((address, nbytes, state) for address, nbytes, _, state in row[9])
    return (*row[:4], *row[5:9], blocks)


def is_failure(result: Result, kind: str) -> bool:
    """Says whether an operation failed in this way, one of ``FAILURES``."""
    return isinstance(result, tuple) and len(result) == 2 and result[0] == kind


def is_same_result(wanted: Result, got: Result) -> bool:
    """Says whether two answers are equal; the words of errors are not compared."""
    for kind in FAILURES:
        if is_failure(wanted, kind) or is_failure(got, kind):
            return is_failure(wanted, kind) and is_failure(got, kind)
    return wanted == got
