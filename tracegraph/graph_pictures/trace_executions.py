"""The executable CUDA graphs that a trace has replays of, and which of them is a given one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from tracegraph.graph_pictures.records import EdgeData, NodeData
from tracegraph.graph_pictures.trace_file import TraceEvent

_LAUNCH = re.compile(r"grid:(\d+),(\d+),(\d+) block:(\d+),(\d+),(\d+)")
# What the driver calls them differs by size and direction: memcpy128, MemcpyD2D, Memset 0.
_OF_THE_DRIVER = ("memcpy", "memset")
_NUMBER_BITS = 32


@dataclasses.dataclass(frozen=True)
class LaunchedGraph:
    """A part of a capture that is one CUDA graph.

    Attributes:
        nodes: without those inside of its branches and loops.
        edges: between them.
        bodies: the nodes inside of each branch and loop, body by body, by its index.
    """

    nodes: tuple[NodeData, ...]
    edges: tuple[EdgeData, ...]
    bodies: Mapping[int, tuple[NodeData, ...]]

    @property
    def has_kernels(self) -> bool:
        """True if it has a kernel whose name is known."""
        return any(node.kernel is not None for node in self.nodes)


@dataclasses.dataclass(frozen=True)
class Execution:
    """The replays of one executable graph.

    Attributes:
        graph_id: the driver's number of it.
        events: of its nodes, by the number of the node.
    """

    graph_id: int
    events: dict[int, list[TraceEvent]]

    @property
    def launches(self) -> list[str]:
        """What tells its replays apart, in the order of the trace."""
        each = (read_launch(event) for events in self.events.values() for event in events)
        return list(dict.fromkeys(each))

    def __str__(self) -> str:
        count = len(self.launches)
        return f"{self.graph_id} ({count} replay{'s' * (count != 1)})"


def read_launch(event: TraceEvent) -> str:
    """Returns what all events of one launch share."""
    return str(event["args"].get("correlation_id", ""))


def find_executions(events: Iterable[TraceEvent]) -> dict[int, Execution]:
    """Returns the executable graphs of a trace by their numbers.

    CUPTI numbers nodes in 64 bits: the upper half is the number of the executable graph. The number
    of the graph alone is missing where a node is inside of a branch or a loop.

    Args:
        events: of the trace.
    """
    found: dict[int, Execution] = {}
    for event in events:
        arguments = event.get("args")
        text = arguments.get("cuda_graph_node_id") if isinstance(arguments, dict) else None
        is_complete = event.get("ph") == "X" and {"pid", "tid", "ts"} <= event.keys()
        if not is_complete or not str(text).isdecimal():
            continue
        graph_id, number = divmod(int(str(text)), 1 << _NUMBER_BITS)
        execution = found.setdefault(graph_id, Execution(graph_id, {}))
        execution.events.setdefault(number, []).append(event)
    return found


def holds_nodes(node: NodeData) -> bool:
    """True for a branch, a loop or a call of a library: a profiler sees what is inside of it."""
    is_plain = node.kind in ("kernel", *_OF_THE_DRIVER) or node.kind.startswith("event ")
    return not is_plain


def find_mismatch(graph: LaunchedGraph, execution: Execution) -> str:
    """Returns in what an executable graph differs from a graph; an empty text if it fits.

    Args:
        graph: what was captured.
        execution: replays of an executable graph.
    """
    nodes = graph.nodes
    for number, events in sorted(execution.events.items()):
        if number < len(nodes):
            differences = (find_difference(nodes[number], event) for event in events)
            found = next(filter(None, differences), "")
        else:
            is_inside = any(map(holds_nodes, nodes))
            found = "" if is_inside else f"is more than the {len(nodes)} nodes here"
        if found:
            return f"its node {number} {found}"
    unseen = (i for i, node in enumerate(nodes) if node.kernel and i not in execution.events)
    missing = next(unseen, None)
    return "" if missing is None else f"it has no kernel at node {missing}, {nodes[missing].name}"


def find_difference(node: NodeData, event: TraceEvent) -> str:
    """Returns in what an event is not that of a node; an empty text if it may be.

    Args:
        node: a kernel, memcpy or memset; others have no event.
        event: of the trace.
    """
    name = str(event.get("name", ""))
    if node.kernel is None:
        is_same = node.kind in _OF_THE_DRIVER and node.kind in name.lower()
        return "" if is_same else f"is {name}, and {node.kind} {node.name} here"
    if not _is_symbol(name, node.kernel.symbol):
        return f"is {name}, and {node.kernel.symbol} here"
    launch = _LAUNCH.search(str(event["args"].get("kernel_details", "")))
    dims = (*node.kernel.grid, *node.kernel.block)
    if launch is None or tuple(map(int, launch.groups())) == dims:
        return ""
    return f"is {name} of {launch.group()}, and has other blocks here"


def _is_symbol(name: str, symbol: str) -> bool:
    """True if a trace has this name for a kernel: C++'s are demangled there."""
    if name == symbol or not symbol.startswith("_Z"):
        return name == symbol
    # `void ns::f<4>(float*)` is mangled with 1f in it.
    words = re.findall(r"\w+", re.split(r"[<(]", name)[0])
    return bool(words) and f"{len(words[-1])}{words[-1]}" in symbol
