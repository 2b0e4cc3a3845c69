"""The report of a function that reads traced values: its breaks, what they cost, and its graphs."""

from __future__ import annotations

from collections.abc import Sequence

from tracegraph.breaks.branching_graph import BranchingGraph
from tracegraph.breaks.node import MAX_BRANCHES, MAX_PARTS, PartNode
from tracegraph.breaks.reads import READ_NAMES
from tracegraph.capturing.pipeline import Capture
from tracegraph.constraints.violation import Violation
from tracegraph.reports.report import Report
from tracegraph.reports.summary import (
    cut_lines,
    describe_call,
    describe_times,
    limit_lines,
    list_reasons,
    list_replacements,
)
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import count_noun
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall

_MAX_BREAKS, _MAX_SHOWN = 12, 4


def explain_breaks(
    prepared: PreparedCall,
    device: Device,
    graph: BranchingGraph,
    kept: Capture,
    history: Sequence[str],
    parts: dict[str, str],
) -> Report:
    """Returns the report of a function that is captured part by part.

    Args:
        prepared: the call.
        device: that it is captured for.
        graph: the tree of its parts.
        kept: its capture.
        history: why the function was captured anew, and which gradients it has graphs for.
        parts: the long parts that are known already.
    """
    nodes = [node for _, node in graph.list_nodes()]
    graphs = [node.part.checked for node in nodes if node.part is not None]
    breaks = [line for node in nodes for line in _describe_break(node)]
    eager = {
        index: violation
        for number, checked in enumerate(graphs)
        for index, violation in _list_eager(number, checked)
    }
    head = f"cuts: {count_noun(len(graphs), 'graph')}, {count_noun(len(breaks), 'break')}"
    lines = [
        *describe_call(prepared, device, "is captured in parts"),
        f"{head}; at most {MAX_BRANCHES} branches per break, {MAX_PARTS} parts",
        *limit_lines(breaks, _MAX_BREAKS, "break"),
        *limit_lines(list_reasons(eager.values()), 3, "reason"),
        "calls run these graphs, with Python's decisions between: jax.jit cannot run the function",
        *list_replacements(
            prepared.options,
            [each for node in nodes if node.part is not None for each in node.part.replacements],
        ),
        f"pool: {graph.pool.count_bytes():,} bytes, shared by all of them",
        f"capture: {describe_times(kept.seconds)}",
        f"verification: {kept.verification.skipped}",
        *history,
    ]
    parts = {**parts, "breaks": "\n".join(breaks) or "none has been met yet"}
    return Report("\n".join([cut_lines(lines), 'more: show="signature,breaks"']), parts)


def explain_reads(
    prepared: PreparedCall, device: Device, read: Violation, history: Sequence[str]
) -> Report:
    """Returns the report of a function that reads traced values and was not called yet."""
    lines = [
        *describe_call(prepared, device, "can be captured in parts"),
        "cuts: at host reads; what is read at a call decides which parts are captured",
        f"  {read.what} ({read.where})",
        *history,
    ]
    return Report(cut_lines(lines))


def _describe_break(node: PartNode) -> list[str]:
    """Returns what a node reads, where, what it costs, and how often each branch was taken."""
    read = node.read
    if read is None:
        return []
    taken = [f"{node.shown[key]} {count}" for key, count in node.hits.items()]
    shown = ", ".join(taken[:_MAX_SHOWN])
    if len(taken) > _MAX_SHOWN:
        shown += f" and {len(taken) - _MAX_SHOWN} more"
    rest = f"; {node.uncaptured} op by op" if node.uncaptured else ""
    size = count_noun(read.nbytes, "byte")
    name = READ_NAMES[read.kind]
    return [f"{name} at {read.where}: {size} fetched; taken: {shown or 'none'}{rest}"]


def _list_eager(number: int, checked: CheckedGraph) -> list[tuple[tuple[int, int], Violation]]:
    return [((number, index), each) for index, each in checked.uncapturable.items()]
