"""The report of `explain`: what is captured, how, what it costs, and why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.ir.printer import print_dtype
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.request import Role
from tracegraph.lowering.workspaces import measure_workspaces
from tracegraph.options import Options
from tracegraph.reports.explain_gpu import (
    count_nodes,
    describe_device,
    describe_verification,
    list_compiled_regions,
)
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import CaptureError, UnsupportedError
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import LeafType
from tracegraph.verification.report import VerificationReport

_MAX_LEAVES = 40


def explain_capture(
    prepared: PreparedCall,
    device: Device,
    lower: Callable[[], LoweredCapture],
    verification: VerificationReport | None = None,
) -> str:
    """Returns the report of one capture.

    Args:
        prepared: the call.
        device: that it is captured for.
        lower: traces, checks, compiles and plans it.
        verification: of the graph, if it was captured already.
    """
    options = prepared.options
    takes_kernels = device.takes_kernels
    sections = [_title("signature", _list_signature(prepared))]
    if takes_kernels:
        sections.append(_title("device", [describe_device(device)]))
    try:
        capture = lower()
    except (CaptureError, UnsupportedError) as error:
        sections.append(_title("violations", str(error).splitlines()))
        return _join(options, "cannot be captured", sections)
    checked, lowered = capture.checked, capture.lowered
    counts = [count_nodes(lowered)] if takes_kernels else []
    workspaces = [str(measure_workspaces(lowered.definition))] if takes_kernels else []
    pool_bytes = lowered.definition.arena_size.reserved_bytes
    sections += [
        _title("graph", str(checked).splitlines()),
        _title("passes", [str(report) for report in checked.reports]),
        _title("regions", _list_regions(checked, lowered)),
        _title("memory plan", str(lowered.plan).splitlines()),
        _title("nodes", [*counts, *str(lowered.definition).splitlines()]),
        _title("per call", _list_copies(lowered)),
        _title("pool", [f"{pool_bytes:,} bytes, known before the first run", *workspaces]),
    ]
    text = describe_verification(options, checked, lowered, verification)
    sections.append(_title("verification", [text]))
    if checked.notes:
        sections.append(_title("notes", "\n".join(map(str, checked.notes)).splitlines()))
    return _join(options, "can be captured", sections)


def _join(options: Options, verdict: str, sections: list[str]) -> str:
    head = f"`{options.name}` {verdict} (mode={options.mode!r}, outputs={options.outputs!r})"
    return "\n\n".join([head, *sections])


def _title(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" if line else "" for line in lines)])


def _list_signature(prepared: PreparedCall) -> list[str]:
    signature, names = prepared.signature, prepared.names
    lines = [
        f"{name}: {_print_leaf(leaf)}"
        for name, leaf in zip(names[:_MAX_LEAVES], signature.leaves, strict=False)
    ]
    if len(names) > _MAX_LEAVES:
        lines.append(f"... and {len(names) - _MAX_LEAVES} more leaves")
    lines += [f"static argument {key}: {value!r}" for key, value in signature.statics]
    return lines or ["no arguments"]


def _print_leaf(leaf: LeafType) -> str:
    sizes = ",".join(map(str, leaf.shape))
    return f"{print_dtype(leaf.dtype)}[{sizes}]{' (weak type)' if leaf.weak_type else ''}"


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
        lines.append(
            f"{step.name}: {how}, stream {step.stream}, "
            f"reads {_count(step.reads, 'buffer')} ({reads:,} bytes), "
            f"writes {len(step.writes)} ({writes:,} bytes)"
        )
    return lines


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _list_copies(lowered: Lowered) -> list[str]:
    """Says what a call moves besides the work of the graph."""
    program = lowered.program
    lines = []
    for role, text in (
        (Role.COPIED, "copied in, or read where it is if it cannot change"),
        (Role.DONATED, "donated: copied in once, resident from then on"),
        (Role.CONSTANT, "constant: copied in at capture"),
    ):
        sizes = [spec.buffer.nbytes for spec in program.inputs if spec.role is role]
        if sizes:
            lines.append(f"{_count(sizes, 'input')}, {sum(sizes):,} bytes: {text}")
    fresh = [output.buffer.nbytes for output in program.outputs if output.alias is None]
    resident = [output.buffer.nbytes for output in program.outputs if output.alias is not None]
    if fresh:
        lines.append(
            f"{_count(fresh, 'result')}, {sum(fresh):,} bytes: returned, copied where the next "
            "call would overwrite a value that is still alive"
        )
    if resident:
        count = _count(resident, "result")
        lines.append(f"{count}, {sum(resident):,} bytes: resident, updated in place")
    return lines or ["nothing"]
