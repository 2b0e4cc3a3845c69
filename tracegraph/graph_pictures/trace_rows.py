"""Rows of a profiler's timeline that show the user's scopes over the events of a graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from tracegraph.graph_pictures.trace_executions import read_launch
from tracegraph.graph_pictures.trace_file import TraceEvent

# A trace counts in microseconds with fractions; slices are cut in whole nanoseconds.
_NS = 1000
_MARK = "tracegraph_graph_id"


def make_rows(
    events: Sequence[TraceEvent], labelled: Iterable[TraceEvent], name: str, graph_id: int
) -> tuple[list[TraceEvent], list[TraceEvent]]:
    """Returns the names of further rows, one for each row of a graph's events, and their slices.

    Args:
        events: of the whole trace.
        labelled: of the graph, each with its scope.
        name: of the captured function.
        graph_id: of its executable graph.
    """
    rows: dict[tuple[int, int], list[TraceEvent]] = {}
    for event in labelled:
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    taken = [tid for event in events if isinstance(tid := event.get("tid"), int)]
    names: list[TraceEvent] = []
    slices: list[TraceEvent] = []
    for tid, ((pid, source), each) in enumerate(sorted(rows.items()), max(taken, default=0) + 1):
        found = list(_cut_slices(each))
        if not found:
            continue
        title, order = _read_row(events, pid, source)
        place = {"ph": "M", "pid": pid, "tid": tid}
        arguments = {"name": f"scopes of `{name}` on {title}", _MARK: graph_id}
        names.append({**place, "name": "thread_name", "args": arguments})
        names.append({**place, "name": "thread_sort_index", "args": {"sort_index": order}})
        slices += [{"ph": "X", "pid": pid, "tid": tid, **one} for one in found]
    return names, slices


def drop_rows(events: Iterable[TraceEvent], graph_id: int) -> list[TraceEvent]:
    """Returns the events of a trace without the rows that `make_rows` has made for a graph.

    Args:
        events: of the whole trace.
        graph_id: of the executable graph.
    """
    events = list(events)
    old = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event.get("args", {}).get(_MARK) == graph_id
    }
    return [event for event in events if (event.get("pid"), event.get("tid")) not in old]


def split_scope(scope: str) -> tuple[str, ...]:
    """Returns the user's scopes of a node from the outermost on, without jit and the primitive.

    Args:
        scope: as ``jit(step)/layer/dot_general``; a slash inside of parentheses parts nothing.

    Example:
        >>> split_scope("jit(step)/transpose(jvp(layer/head))/dot_general")
        ('transpose(jvp(layer/head))',)
    """
    parts, depth = [""], 0
    for letter in scope:
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    named = itertools.dropwhile(lambda part: part.startswith("jit("), parts[:-1])
    return tuple(part for part in named if part)


def _read_row(events: Iterable[TraceEvent], pid: int, tid: int) -> tuple[str, int]:
    """Returns the name and the place of a row."""
    title, order = f"row {tid}", tid
    for event in events:
        if event.get("ph") != "M" or (event.get("pid"), event.get("tid")) != (pid, tid):
            continue
        title = event.get("args", {}).get("name", title)
        order = event.get("args", {}).get("sort_index", order)
    return title, order


def _cut_slices(events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """Yields the slices of a row: neighbours of one replay share those of their common scopes."""
    open_slices: list[tuple[str, int]] = []
    launch, end = "", 0
    for event in sorted(events, key=lambda event: event["ts"]):
        start = round(event["ts"] * _NS)
        scopes = split_scope(event["args"].get("scope", ""))
        kept = 0
        if read_launch(event) == launch:
            kept = _count_common([name for name, _ in open_slices], scopes)
        # By a programmatic edge, a kernel starts before the last has ended: no slices overlap.
        yield from _close(open_slices, kept, min(end, start))
        open_slices += [(name, start) for name in scopes[kept:]]
        is_new = read_launch(event) != launch
        launch = read_launch(event)
        stop = round((event["ts"] + event.get("dur", 0)) * _NS)
        end = stop if is_new else max(end, stop)
    yield from _close(open_slices, 0, end)


def _close(open_slices: list[tuple[str, int]], kept: int, end: int) -> Iterator[TraceEvent]:
    """Yields the inner slices, and keeps the outer ones open."""
    while len(open_slices) > kept:
        path = "/".join(name for name, _ in open_slices)
        name, start = open_slices.pop()
        times = {"ts": start / _NS, "dur": (end - start) / _NS}
        yield {"name": name, **times, "args": {"scope": path}}


def _count_common(before: Sequence[str], after: Sequence[str]) -> int:
    """Returns how many scopes are the same from the outermost on."""
    count = 0
    while count < min(len(before), len(after)) and before[count] == after[count]:
        count += 1
    return count
