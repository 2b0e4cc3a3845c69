"""The report of `explain`: what is captured, how, what it costs, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegraph.breaks.branching_graph import BranchingGraph
from tracegraph.breaks.make_branching import find_read_violation
from tracegraph.capturing.pipeline import Capture, CapturePipeline
from tracegraph.capturing.spread_graphs import LoweredSpreadGraphs
from tracegraph.constraints.mismatch import print_leaf_type
from tracegraph.constraints.spread import print_sharding
from tracegraph.lowering.compile_spread import SpreadProgram
from tracegraph.lowering.lower import Lowered
from tracegraph.replaying.spread_graph import SpreadGraph
from tracegraph.reports.differences import print_value
from tracegraph.reports.explain_breaks import explain_breaks, explain_reads
from tracegraph.reports.explain_gpu import list_compiled_regions
from tracegraph.reports.explain_spread import list_places, list_shardings, summarise_spread
from tracegraph.reports.report import PARTS, Report
from tracegraph.reports.summary import (
    MAX_LINES,
    Explained,
    describe_call,
    summarise,
)
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import CaptureError, UnsupportedError
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall


def explain_capture(
    prepared: PreparedCall,
    device: Device,
    pipeline: CapturePipeline,
    kept: Capture | None,
    history: Sequence[str],
    gradients: Sequence[str],
) -> Report:
    """Returns the report of one capture.

    Args:
        prepared: the call.
        device: that it is captured for.
        pipeline: lowers the call, if it was not captured yet.
        kept: the capture, if there is one; nothing is traced or compiled then.
        history: why the function was captured anew, and what runs instead of a graph.
        gradients: which gradients it has graphs for, the first line in short.
    """
    parts = {"signature": "\n".join(_list_signature(prepared))}
    if gradients:
        parts["gradients"] = "\n".join(gradients[1:])
    history = [*history, *gradients[:1]]
    if kept is not None and isinstance(kept.graph, BranchingGraph):
        return explain_breaks(prepared, device, kept.graph, kept, history, parts)
    if kept is not None:
        capture: Any = kept.graph
    else:
        try:
            capture = pipeline.run_to_lowered()
        except (CaptureError, UnsupportedError) as error:
            read = find_read_violation(error, prepared.options)
            if read is not None:
                return explain_reads(prepared, device, read, history)
            parts["violations"] = str(error)
            head = describe_call(prepared, device, "cannot be captured")
            return Report(_limit(head, parts["violations"], history), parts)
    checked, lowered = capture.checked, capture.lowered
    if isinstance(lowered, SpreadProgram):
        parts |= {"ir": str(checked).rstrip("\n"), "passes": "\n".join(map(str, checked.reports))}
        parts["regions"] = "\n".join(list_shardings(prepared, lowered, checked))
        text = summarise_spread(prepared, device, lowered, kept, history)
        return Report(f"{text}\n{_name_parts(parts)}", parts)
    parts |= {
        "ir": str(checked).rstrip("\n"),
        "passes": "\n".join(map(str, checked.reports)),
        "regions": "\n".join(_list_regions(checked, lowered)),
        "plan": str(lowered.plan),
        "nodes": str(lowered.definition),
    }
    if checked.notes:
        parts["notes"] = "\n".join(map(str, checked.notes))
    places: list[str] = []
    if isinstance(capture, SpreadGraph | LoweredSpreadGraphs):
        places = list_places(capture.program, lowered)
        shardings = list_shardings(prepared, capture.program, checked)
        parts["regions"] = "\n".join([parts["regions"], *shardings])
    summary = summarise(Explained(prepared, device, checked, lowered, kept, history, places))
    return Report(f"{summary}\n{_name_parts(parts)}", parts)


def _limit(head: list[str], violations: str, tail: Sequence[str]) -> str:
    """Returns the report of what cannot be captured, with as many violations as there is room."""
    lines = [f"  {line}" for line in violations.splitlines() if line]
    tail = [*tail, 'more: show="signature,violations"']
    room = MAX_LINES - len(head) - len(tail) - 1
    if len(lines) > room:
        lines = [*lines[: room - 1], f"  and {len(lines) - room + 1} more lines"]
    return "\n".join([*head, "violations", *lines, *tail])


def _name_parts(parts: dict[str, str]) -> str:
    return f'more: show="{",".join(name for name in PARTS if name in parts)}"'


def _list_signature(prepared: PreparedCall) -> list[str]:
    signature = prepared.signature
    lines = [
        f"{name}: {print_leaf_type(leaf.shape, leaf.dtype, leaf.weak_type)}"
        + (f", {print_sharding(leaf.sharding)}" if leaf.sharding is not None else "")
        + (", in host memory" if leaf.is_on_host else "")
        for name, leaf in zip(prepared.names, signature.leaves, strict=True)
    ]
    lines += [f"{name}: {print_value(value)}" for name, value in prepared.list_static_values()]
    return lines or ["no arguments"]


def _list_regions(checked: CheckedGraph, lowered: Lowered) -> list[str]:
    lines = list_compiled_regions(lowered) if lowered.takes_kernels else _list_calls(lowered)
    for violation in checked.uncapturable.values():
        lines += [f"eager because {violation.what}", f"  where: {violation.where}"]
    return lines or ["none: every result is an argument or a constant"]


def _list_calls(lowered: Lowered) -> list[str]:
    lines, eager = [], lowered.eager_regions
    for step in lowered.program.steps:
        how = "eager" if step.name in eager else "captured"
        reads = sum(use.nbytes for use in step.reads)
        writes = sum(use.nbytes for use in step.writes)
        buffers = "buffer" if len(step.reads) == 1 else "buffers"
        lines.append(
            f"{step.name}: {how}, stream {step.stream}, "
            f"reads {len(step.reads)} {buffers} ({reads:,} bytes), "
            f"writes {len(step.writes)} ({writes:,} bytes)"
        )
    return lines
