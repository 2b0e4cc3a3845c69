"""Which node has which number, of those inside of branches, loops and calls of libraries.

Note [Numbers inside].
The driver numbers the nodes of a graph in the order in which they were added, and then goes on with
what is inside of them, owner by owner. How many nodes a branch or a loop has is known; how many a
library has put into its graph is not. So all ways to deal out the numbers are tried at once: each
owner gets its run of them, in the order of the owners, where a run must have the names of the
bodies' kernels, and lie in time between what its owner waits for and what waits for its owner. A
number that has the same node in all ways that are left is that node's. Others have none: a wrong
label is worse than none. If no way is left, the trace is of another graph, as of one that begins as
this one does and goes on. In what order the driver numbers what is deeper is not known, so that
from the first branch or loop on that holds another one, or a call of a library, none has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tracegraph.graph_pictures.records import NodeData
from tracegraph.graph_pictures.trace_executions import (
    Execution,
    LaunchedGraph,
    find_difference,
    holds_nodes,
    read_launch,
)
from tracegraph.graph_pictures.trace_file import TraceEvent

# A few tell as much as all, and a long trace has thousands.
_MOST_REPLAYS = 8
# A handler may have enqueued nothing.
_MAY_BE_EMPTY = "ffi_call"


@dataclasses.dataclass(frozen=True)
class _Item:
    """What takes one number, or any count of them in a row.

    Attributes:
        owner: place in the graph of the node that it is inside of.
        node: whose event it is; None beyond what is known, inside of the owner or a later one.
        repeats: takes any count of numbers, not one.
        must: takes a number that is in the trace.
    """

    owner: int
    node: NodeData | None
    repeats: bool = False
    must: bool = False


def number_inside(graph: LaunchedGraph, execution: Execution) -> dict[int, NodeData] | None:
    """Returns the nodes by their numbers, of those inside that are known for sure.

    What is inside of a call of a library has the call's node. See Note [Numbers inside]. None if
    there is no way to deal out the numbers: then they are not those of this graph.

    Args:
        graph: what was captured.
        execution: replays of it.
    """
    numbers = range(len(graph.nodes), max(execution.events, default=0) + 1)
    items = list(_list_items(graph))
    launches = {launch: i for i, launch in enumerate(execution.launches[:_MOST_REPLAYS])}
    windows = _find_windows(graph, execution, launches)
    events = [execution.events.get(number, []) for number in numbers]
    allowed = [_find_allowed(items, each, windows, launches) for each in events]
    found: dict[int, NodeData] = {}
    for number, taken in zip(numbers, _deal_out(items, allowed), strict=True):
        if not taken:
            return None
        takers = [items[place].node for place in _list_bits(taken)]
        if takers[0] is not None and all(taker is takers[0] for taker in takers):
            found[number] = takers[0]
    return found


def _list_items(graph: LaunchedGraph) -> Iterator[_Item]:
    for place, node in enumerate(graph.nodes):
        if not holds_nodes(node):
            continue
        inside = graph.bodies.get(node.index)
        if inside is None:
            if node.kind != _MAY_BE_EMPTY:
                yield _Item(place, node, must=True)
            yield _Item(place, node, repeats=True)
        elif any(map(holds_nodes, inside)):
            yield _Item(place, None, repeats=True)
            return
        else:
            yield from (_Item(place, each) for each in inside)


@dataclasses.dataclass(frozen=True)
class _Windows:
    """When what is inside of each node of a graph may start, by replay and place."""

    earliest: NDArray[np.float64]
    latest: NDArray[np.float64]

    def find_open(self, first: NDArray[np.float64], last: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Returns for each place whether what started at these times may be inside of its node."""
        is_open = (self.earliest <= first[:, None]) & (last[:, None] <= self.latest)
        return np.asarray(is_open.all(axis=0))


def _find_windows(
    graph: LaunchedGraph, execution: Execution, launches: Mapping[str, int]
) -> _Windows:
    """Only starts are compared: by a programmatic edge, a kernel starts before another's end."""
    nodes = graph.nodes
    shape = len(launches), len(nodes)
    earliest, latest = np.full(shape, -np.inf), np.full(shape, np.inf)
    starts = [_read_starts(execution.events.get(i, []), launches)[0] for i in range(len(nodes))]
    is_seen = [bool(np.isfinite(start).all()) for start in starts]
    offset = nodes[0].index if nodes else 0
    pairs = [(edge.first - offset, edge.second - offset) for edge in graph.edges]
    for a, b in sorted(pairs):
        bound = starts[a] if is_seen[a] else earliest[:, a]
        earliest[:, b] = np.maximum(earliest[:, b], bound)
    for a, b in sorted(pairs, key=lambda pair: -pair[1]):
        bound = starts[b] if is_seen[b] else latest[:, b]
        latest[:, a] = np.minimum(latest[:, a], bound)
    return _Windows(earliest, latest)


def _read_starts(
    events: Iterable[TraceEvent], launches: Mapping[str, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the first and the last start in each replay; for none, what fits everywhere."""
    first, last = np.full(len(launches), np.inf), np.full(len(launches), -np.inf)
    for event in events:
        replay = launches.get(read_launch(event))
        if replay is not None:
            first[replay] = min(first[replay], event["ts"])
            last[replay] = max(last[replay], event["ts"])
    return first, last


def _find_allowed(
    items: Sequence[_Item],
    events: Sequence[TraceEvent],
    windows: _Windows,
    launches: Mapping[str, int],
) -> int:
    """Returns the places of the items that may take the number of these events, as bits."""
    is_open = windows.find_open(*_read_starts(events, launches)).tolist()
    last = max((place for place, each in enumerate(is_open) if each), default=-1)
    bits = 0
    for place, item in enumerate(items):
        is_free = item.owner <= last if item.node is None else is_open[item.owner]
        if is_free and _fits_name(item.node, events):
            bits |= 1 << place
    return bits


def _fits_name(node: NodeData | None, events: Sequence[TraceEvent]) -> bool:
    """False for a node of a body whose events have other names; what libraries launch has any."""
    if node is None or holds_nodes(node):
        return True
    return not any(find_difference(node, event) for event in events)


def _deal_out(items: Sequence[_Item], allowed: Sequence[int]) -> list[int]:
    """Returns for each number the items that take it in one way or another, as bits."""
    repeating = sum(1 << place for place, item in enumerate(items) if item.repeats)
    last_must = max((place for place, item in enumerate(items) if item.must), default=-1)
    ends = ((1 << len(items) + 1) - 1) >> last_must + 1 << last_must + 1
    before: list[int] = []
    reached = 1
    for each in allowed:
        taken = _skip_on(reached, repeating) & each
        before.append(taken)
        reached = (taken & ~repeating) << 1 | taken & repeating
    after: list[int] = []
    good = ends
    for each in reversed(allowed):
        good = _skip_back(good, repeating)
        good = each & (~repeating & good >> 1 | repeating & good)
        after.append(good)
    return [a & b for a, b in zip(before, reversed(after), strict=True)]


def _skip_on(places: int, repeating: int) -> int:
    """Returns places with those after them that are reached without taking a number."""
    while (further := places | (places & repeating) << 1) != places:
        places = further
    return places


def _skip_back(places: int, repeating: int) -> int:
    """Returns places with those before them from which they are reached in this way."""
    while (further := places | places >> 1 & repeating) != places:
        places = further
    return places


def _list_bits(bits: int) -> list[int]:
    """Returns the places of the bits that are set."""
    places: list[int] = []
    while bits:
        places.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return places
