"""Recorded traces of PyTorch's caching allocator: what was asked of it, and all that it did.

A file of traces is JSON, compressed. `tests.gpu.torch_allocator` records traces, and
`tests.oracles.allocator_player` plays them against our allocator.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import lzma
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

FORMAT = 1
SMALLEST = 9 | lzma.PRESET_EXTREME
KINDS = ("small_pool", "large_pool")

# What an operation returned: an address, a word, None, or ("oom" | "error" | "skipped", text).
Result: TypeAlias = Any
# Address, total, allocated, active and requested bytes, stream, type, pool id, is expandable,
# and the blocks: address, bytes, requested bytes, state.
SegmentRow: TypeAlias = tuple[Any, ...]


class Entry(NamedTuple):
    """One entry of the allocator's own history.

    Attributes:
        action: "alloc", "free_requested", "free_completed", "segment_alloc", ...
        address: of the block or segment; the free bytes of the device for "oom".
        nbytes: as the history has it.
        stream: handle of the stream.
    """

    action: str
    address: int
    nbytes: int
    stream: int


class Step(NamedTuple):
    """One operation and what it did.

    Attributes:
        operation: its name and arguments, see tests/oracles/allocator_operations.py.
        result: what it returned.
        changes: what it added to each statistic.
        entries: what it added to the history.
    """

    operation: tuple[Any, ...]
    result: Result
    changes: Mapping[str, int]
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class Trace:
    """One trace. More than six fields because it is a file format.

    Attributes:
        name: says what it is about.
        settings: of the allocator, as in ``PYTORCH_ALLOC_CONF``.
        streams: handle of each stream; operations name streams by their index here.
        total_bytes: of the device.
        baseline: statistics before the first step.
        steps: in order.
        segments: all segments after a step, by its index; those at the end under ``len(steps)``.
    """

    name: str
    settings: str
    streams: tuple[int, ...]
    total_bytes: int
    baseline: Mapping[str, int]
    steps: tuple[Step, ...]
    segments: Mapping[int, tuple[SegmentRow, ...]]


def format_segments(segments: Iterable[Mapping[str, Any]]) -> Iterator[SegmentRow]:
    """Returns the segments of a snapshot as rows."""
    for segment in segments:
        yield (
            segment["address"],
            segment["total_size"],
            segment["allocated_size"],
            segment["active_size"],
            segment["requested_size"],
            segment["stream"],
            segment["segment_type"],
            tuple(segment["segment_pool_id"]),
            segment["is_expandable"],
            tuple(
                (block["address"], block["size"], block["requested_size"], block["state"])
                for block in segment["blocks"]
            ),
        )


def write_traces(
    path: pathlib.Path, traces: Iterable[Trace], device: str, *, preset: int = 0
) -> None:
    """Writes traces to a file.

    Args:
        path: of the file.
        traces: in order.
        device: on which they were recorded, with the version of PyTorch.
        preset: of the compression; ``SMALLEST`` takes seconds.
    """
    content = {"format": FORMAT, "device": device, "traces": [_pack(trace) for trace in traces]}
    text = json.dumps(content, separators=(",", ":"))
    path.write_bytes(lzma.compress(text.encode(), preset=preset))


def read_traces(path: pathlib.Path) -> tuple[Trace, ...]:
    """Returns the traces of a file.

    Raises:
        ValueError: the file has another format.
    """
    content = json.loads(lzma.decompress(path.read_bytes()))
    if content["format"] != FORMAT:
        raise ValueError(f"{path} has format {content['format']}, wanted {FORMAT}")
    return tuple(_unpack(packed) for packed in content["traces"])


def _pack(trace: Trace) -> dict[str, Any]:
    # One column of equal things compresses better than rows of different ones.
    return {
        "name": trace.name,
        "settings": trace.settings,
        "streams": trace.streams,
        "total_bytes": trace.total_bytes,
        "baseline": trace.baseline,
        "operations": [step.operation for step in trace.steps],
        "results": [step.result for step in trace.steps],
        "changes": [_subtract(step.changes) for step in trace.steps],
        "entries": [step.entries for step in trace.steps],
        "segments": {str(index): rows for index, rows in trace.segments.items()},
    }


def _unpack(packed: Mapping[str, Any]) -> Trace:
    columns = (packed["operations"], packed["results"], packed["changes"], packed["entries"])
    steps = [
        Step(
            tuple(operation),
            _freeze(result),
            _add(rest),
            tuple(Entry(*entry) for entry in entries),
        )
        for operation, result, rest, entries in zip(*columns, strict=True)
    ]
    return Trace(
        packed["name"],
        packed["settings"],
        tuple(packed["streams"]),
        packed["total_bytes"],
        packed["baseline"],
        tuple(steps),
        {int(index): _freeze(rows) for index, rows in packed["segments"].items()},
    )


def _subtract(changes: Mapping[str, int]) -> dict[str, int]:
    """Leaves out what follows from other statistics: a file shrinks to two thirds."""
    keys = {*changes, *(other for key in changes for other in _list_sums(key))}
    rest = {key: changes.get(key, 0) - _predict(key, changes) for key in sorted(keys)}
    return {key: value for key, value in rest.items() if value}


def _add(rest: Mapping[str, int]) -> dict[str, int]:
    """Puts back what `_subtract` has left out."""
    keys = {*rest, *(other for key in rest for other in _list_sums(key))}
    changes: dict[str, int] = {}
    # A statistic follows from those before it in this order.
    for key in sorted(keys, key=_get_rank):
        changes[key] = rest.get(key, 0) + _predict(key, changes)
    return {key: value for key, value in changes.items() if value}


def _predict(key: str, changes: Mapping[str, int]) -> int:
    """Returns what a change is if all is the sum of small and large, and what is left came."""
    added, taken = _list_parts(key)
    total = 0
    for name in added:
        total += changes.get(name, 0)
    for name in taken:
        total -= changes.get(name, 0)
    return total


@functools.cache
def _list_parts(key: str) -> tuple[list[str], list[str]]:
    """Returns the statistics of which a statistic is the sum, and those that are taken from it."""
    parts = key.split(".")
    if len(parts) < 2 or parts[-1] == "peak":
        return [], []
    if len(parts) == 3 and parts[1] == "all":
        metric, _, field = parts
        return [f"{metric}.{kind}.{field}" for kind in KINDS], []
    if parts[-1] == "current":
        place = ".".join(parts[:-1])
        return [f"{place}.allocated"], [f"{place}.freed"]
    return [], []


@functools.cache
def _list_sums(key: str) -> list[str]:
    """Returns the statistics that `_predict` derives from this one, directly or not."""
    parts = key.split(".")
    if len(parts) < 2:
        return []
    names = [key, ".".join([*parts[:-1], "current"])]
    return [*names, *(name.replace(f".{kind}.", ".all.") for kind in KINDS for name in names)]


@functools.cache
def _get_rank(key: str) -> tuple[bool, bool]:
    return ".all." in key, key.endswith(".current")


def _freeze(value: Any) -> Any:
    """Lists become tuples all the way down, as they were before JSON."""
    return tuple(_freeze(part) for part in value) if isinstance(value, (list, tuple)) else value
