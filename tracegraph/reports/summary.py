"""The summary of a report: what is captured and what it costs, in at most 40 lines.

Each section has so many lines at most that all of them together fit.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import jax

from tracegraph.capturing.pipeline import Capture
from tracegraph.constraints.constants import list_embedded, measure_bytes
from tracegraph.constraints.mismatch import print_leaf_type
from tracegraph.constraints.violation import Violation
from tracegraph.ir.origins import locate_origin
from tracegraph.jax_internals import describe_physical
from tracegraph.lowering.device_program import DeviceProgram
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.planning.short_names import shorten, shorten_names
from tracegraph.lowering.request import Role
from tracegraph.lowering.workspaces import measure_workspaces
from tracegraph.options import Options
from tracegraph.replacements.report import Replacement
from tracegraph.reports.differences import print_value
from tracegraph.reports.explain_gpu import (
    count_nodes,
    describe_device,
    describe_verification,
    list_turns,
)
from tracegraph.reports.recaptures import Recapture
from tracegraph.runtime.definition.placement import list_joint
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import count_noun, shorten_list
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall

MAX_LINES, MAX_COLUMNS, NAME_COLUMNS = 40, 140, 60
MAX_ARGUMENTS, MAX_REASONS, MAX_BUFFERS = 3, 3, 5

_ROLES = {Role.COPIED: "inputs", Role.DONATED: "state", Role.CONSTANT: "constants"}


@dataclasses.dataclass(frozen=True)
class Explained:
    """What a report is about.

    Attributes:
        prepared: the call.
        device: that it is captured for.
        checked: the traced graph.
        lowered: program, plan and nodes.
        kept: the capture, if it was captured already.
        history: why the function was captured anew, and which gradients it has graphs for.
        places: lines that say on which devices it is, where they are several.

    More than six fields because a report is about all of them.
    """

    prepared: PreparedCall
    device: Device
    checked: CheckedGraph
    lowered: Lowered
    kept: Capture | None
    history: Sequence[str]
    places: Sequence[str] = ()


def summarise(explained: Explained) -> str:
    """Returns the summary of what is captured, or can be."""
    checked, lowered, kept = explained.checked, explained.lowered, explained.kept
    options = explained.prepared.options
    verification = kept.verification if kept is not None else None
    verdict = "can be captured" if kept is None else "is captured"
    lines = [
        *describe_call(explained.prepared, explained.device, verdict),
        *explained.places,
        *_list_cuts(checked, lowered),
        *_list_probes(checked),
        *_list_comparison(explained),
        *list_replacements(
            explained.prepared.options,
            None if explained.kept is None else explained.kept.replacements,
        ),
        f"nodes: {count_nodes(lowered)}",
        *list_turns(lowered),
        *_list_roles(lowered),
        *_list_embedded(checked, lowered),
        *_list_largest(checked, lowered),
        *_list_copies(lowered.program),
        f"capture: {describe_times(kept.seconds if kept is not None else {})}",
        *_split(describe_verification(options, checked, lowered, verification)),
        *explained.history,
    ]
    if checked.notes:
        first = checked.notes[0]
        lines.append(f"notes: {len(checked.notes)}; {first.what} ({first.where})")
    return cut_lines(lines)


def describe_call(prepared: PreparedCall, device: Device, verdict: str) -> list[str]:
    """Returns what was asked for: the function, its options, the device and the arguments."""
    options = prepared.options
    asked = f"mode={options.mode!r}, outputs={options.outputs!r}"
    if not options.takes_control_flow:
        asked += f", control_flow={options.control_flow!r}"
    lines = [f"`{options.name}` {verdict} ({asked})"]
    if device.takes_kernels:
        lines.append(f"device: {describe_device(device)}")
    sizes = _measure_leaves(prepared)
    count = count_noun(len(sizes), "leaf", "leaves")
    arguments = _list_arguments(prepared, sizes)
    lines.append(f"arguments: {len(arguments)}, {count}, {sum(sizes):,} bytes")
    return [*lines, *limit_lines(arguments, MAX_ARGUMENTS, "argument")]


def list_recapture(recapture: Recapture | None) -> list[str]:
    """Returns why the function was captured anew the last time."""
    if recapture is None:
        return []
    return [f"captured anew: {recapture}", *limit_lines(recapture.differences, 1, "difference")]


def cut_lines(lines: Iterable[str]) -> str:
    """Returns lines as a text; a line that is too long for a terminal loses its end."""
    return "\n".join(shorten(line, MAX_COLUMNS) for line in lines)


def _measure_leaves(prepared: PreparedCall) -> list[int]:
    """Returns the bytes of each dynamic leaf; a typed key has those of its key data."""
    types = (describe_physical(leaf) for leaf in prepared.signature.leaves)
    return [math.prod(shape) * dtype.itemsize for shape, dtype in types]


def _list_arguments(prepared: PreparedCall, sizes: Sequence[int]) -> list[str]:
    """Returns one line per argument: of a tree, how many leaves and bytes."""
    bound, leaves = prepared.bound, prepared.signature.leaves
    values = [*bound.args, *(bound.kwargs[key] for key in sorted(bound.kwargs))]
    lines = []
    start = 0
    for value, argument in zip(values, prepared.list_arguments(), strict=True):
        stop = start + argument.tree.num_leaves
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(value)]
        if not paths:
            lines.append(f"{type(value).__name__} without leaves")
            continue
        name = prepared.names[start].removesuffix(jax.tree_util.keystr(paths[0]))
        leaf = leaves[start]
        kind = f"{type(value).__name__}, {count_noun(stop - start, 'leaf', 'leaves')}"
        if not paths[0]:
            kind = print_leaf_type(leaf.shape, leaf.dtype, leaf.weak_type)
            kind += ", in host memory" if leaf.is_on_host else ""
        donated = ", donated" if argument.is_donated else ""
        lines.append(f"{name}: {kind}, {sum(sizes[start:stop]):,} bytes{donated}")
        start = stop
    statics = prepared.list_static_values()
    return [*lines, *(f"{name}: {print_value(value)}" for name, value in statics)]


def _list_cuts(checked: CheckedGraph, lowered: Lowered) -> list[str]:
    """Returns how the function is cut into graphs and eager parts, and why."""
    stages = lowered.definition.stages
    graphs = sum(stage.is_captured for stage in stages)
    eager = len(stages) - graphs
    if not eager:
        return ["cuts: none, all is one graph"]
    lines = [*list_reasons(checked.uncapturable.values()), *_list_joint(lowered)]
    head = f"cuts: {count_noun(graphs, 'graph')}, {count_noun(eager, 'eager part')}"
    return [head, *limit_lines(lines, MAX_REASONS, "reason")]


def list_reasons(violations: Iterable[Violation]) -> list[str]:
    """Returns why ops run eagerly, each reason once with its first line."""
    reasons: dict[str, list[str]] = {}
    for violation in violations:
        reasons.setdefault(violation.what, []).append(violation.where.split(", ")[0])
    return [
        f"eager because {what} ({places[0]}{_and_more(places)})" for what, places in reasons.items()
    ]


def _list_joint(lowered: Lowered) -> list[str]:
    """Returns one line for each call of XLA that several processes make together."""
    lines = []
    for node in list_joint(lowered.definition):
        nbytes = sum(member.source.nbytes for member in node.members)
        kinds = dict.fromkeys(member.exchange.kind.value for member in node.members)
        lines.append(f"eager because processes exchange {nbytes:,} bytes a GPU: {', '.join(kinds)}")
    return lines


def _list_probes(checked: CheckedGraph) -> list[str]:
    """Returns one line that names the probes; none without any."""
    names = shorten_list([repr(each.name) for each in checked.probes])
    return [f"probes: {', '.join(names)}"] if names else []


def _list_comparison(explained: Explained) -> list[str]:
    """Returns how calls run where a part is eager, and why."""
    kept, options = explained.kept, explained.prepared.options
    if kept is not None and kept.comparison is not None:
        return [f"calls run {kept.comparison}"]
    is_cut = any(not stage.is_captured for stage in explained.lowered.definition.stages)
    if kept is not None or not is_cut or options.prefer == "graph":
        return []
    return ["calls run as the faster one of the graph and jax.jit, timed at the first call"]


def list_replacements(options: Options, replacements: Sequence[Replacement] | None) -> list[str]:
    """Returns what became of ops that something faster can compute; None before the capture."""
    if options.numerics == "xla":
        return []
    if replacements is None:
        return ["replaced: what is faster, timed at the first call"]
    if not replacements:
        return ["replaced: nothing"]
    others = [each for each in replacements if not each.is_used]
    left_out = others[MAX_REASONS:]
    shown = [f"  {each}" for each in replacements if each not in left_out]
    more = [f"  and {count_noun(len(left_out), 'more replacement')}"] if left_out else []
    return ["replaced:", *shown, *more]


def _and_more(places: Sequence[str]) -> str:
    return f" and {len(places) - 1} more" if len(places) > 1 else ""


def _list_roles(lowered: Lowered) -> list[str]:
    """Returns the bytes of the pool by what they are for."""
    program = lowered.program
    roles: dict[str, dict[str, int]] = {role: {} for role in (*_ROLES.values(), "results")}
    lent = {slot.name: slot.nbytes for slot in lowered.definition.slots if slot.is_lent}
    for spec in program.inputs:
        if spec.buffer.name not in lent:
            roles[_ROLES[spec.role]][spec.buffer.name] = spec.buffer.nbytes
    given = {spec.buffer.name for spec in program.inputs}
    outputs = {output.buffer.name for output in program.outputs if output.alias is None}
    temporaries: dict[str, int] = {}
    in_host_memory = [buffer.nbytes for buffer in program.buffers if buffer.is_host]
    for buffer in program.buffers:
        if buffer.name in given or buffer.is_host:
            continue
        kind = "constants" if buffer.content is not None else "results"
        is_kept = buffer.content is not None or buffer.name in outputs
        (roles[kind] if is_kept else temporaries)[buffer.name] = buffer.nbytes
    reserved_bytes = lowered.definition.arena_size.reserved_bytes
    lines = [f"pool: {reserved_bytes:,} bytes, known before the first run"]
    for role, sizes in roles.items():
        if sizes:
            lines.append(
                f"  {role}: {count_noun(len(sizes), 'buffer')}, {sum(sizes.values()):,} bytes"
            )
    if lent:
        count, nbytes = count_noun(len(lent), "argument"), sum(lent.values())
        lines.append(f"  not in it: {count}, {nbytes:,} bytes, read where the caller has them")
    if in_host_memory:
        count, nbytes = count_noun(len(in_host_memory), "buffer"), sum(in_host_memory)
        lines.append(f"  not in it: {count}, {nbytes:,} bytes, in host memory, page-locked")
    if temporaries:
        count, nbytes = count_noun(len(temporaries), "buffer"), sum(temporaries.values())
        scratch_bytes = lowered.definition.arena_size.scratch_bytes
        lines.append(f"  temporaries: {count}, {nbytes:,} bytes, in {scratch_bytes:,} of the arena")
    workspaces = measure_workspaces(lowered.definition)
    if workspaces.count:
        lines.append(f"  among them {workspaces}")
    return lines


def _list_embedded(checked: CheckedGraph, lowered: Lowered) -> list[str]:
    """Says which closed-over arrays have no buffer: XLA's program has their values."""
    embedded = list_embedded(checked.graph, lowered.definition.inputs)
    nbytes = sum(map(measure_bytes, embedded))
    count = count_noun(len(embedded), "closed-over array")
    return [f"in XLA's program: {count}, {nbytes:,} bytes"] if embedded else []


def _list_largest(checked: CheckedGraph, lowered: Lowered) -> list[str]:
    """Returns the largest buffers with their types, and the user's line where it is known."""
    program = lowered.program
    largest = sorted(program.buffers, key=lambda buffer: (-buffer.nbytes, buffer.name))
    shown = [buffer for buffer in largest[:MAX_BUFFERS] if buffer.nbytes]
    if not shown:
        return []
    names = shorten_names((buffer.name for buffer in shown), NAME_COLUMNS)
    origins = _find_origins(checked, program)
    rows = [
        (
            f"{buffer.nbytes:,}",
            print_leaf_type(buffer.shape, buffer.dtype, buffer.weak_type),
            names[buffer.name],
            origins.get(buffer.name, ""),
        )
        for buffer in shown
    ]
    return ["largest buffers", *_align(rows)]


def _find_origins(checked: CheckedGraph, program: DeviceProgram) -> dict[str, str]:
    """Returns where a buffer gets its value: the user's line, an argument, or a node."""
    origins: dict[str, str] = {}
    for step in program.steps:
        for use in step.writes:
            origins.setdefault(use.buffer, f"written by {shorten(step.name, NAME_COLUMNS)}")
    for op in checked.graph.ops:
        for value in op.results:
            origins[f"%{value.number}"] = locate_origin(op.origin)
    origins |= {each.name: "constant" for each in program.buffers if each.content is not None}
    kinds = {
        Role.COPIED: "argument",
        Role.DONATED: "argument, donated",
        Role.CONSTANT: "closed over",
    }
    return origins | {spec.buffer.name: kinds[spec.role] for spec in program.inputs}


def _list_copies(program: DeviceProgram) -> list[str]:
    """Says what a call moves besides the work of the graph."""
    lines = []
    for role, text in (
        (Role.COPIED, "copied in, or read where it is if it cannot change"),
        (Role.DONATED, "donated: copied in once, resident from then on"),
    ):
        sizes = [spec.buffer.nbytes for spec in program.inputs if spec.role is role]
        if sizes:
            lines.append(f"{count_noun(len(sizes), 'input')}, {sum(sizes):,} bytes: {text}")
    fresh = [output.buffer.nbytes for output in program.outputs if output.alias is None]
    resident = [output.buffer.nbytes for output in program.outputs if output.alias is not None]
    if fresh:
        lines.append(
            f"{count_noun(len(fresh), 'result')}, {sum(fresh):,} bytes: returned, copied where the "
            "next call would overwrite a value that is still alive"
        )
    if resident:
        count = count_noun(len(resident), "result")
        lines.append(f"{count}, {sum(resident):,} bytes: resident, updated in place")
    return ["per call", *(f"  {line}" for line in lines or ["nothing"])]


def describe_times(seconds: Mapping[str, float]) -> str:
    """Returns the seconds of a capture, in all and by phase."""
    if not seconds:
        return "at the first call"
    phases = ", ".join(f"{phase} {value:.1f}" for phase, value in seconds.items())
    return f"{sum(seconds.values()):.1f} s ({phases})"


def _split(verification: str) -> list[str]:
    """Returns the result of a verification, its tolerance and what it does not say, all in full."""
    first, *others = verification.split("; ", 2)
    texts = [f"verification: {first}", *(f"  {each}" for each in others)]
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, MAX_COLUMNS, subsequent_indent="    ")
    ]


def limit_lines(lines: Sequence[str], most: int, noun: str) -> list[str]:
    """Returns indented lines, the last of which counts those that are left out."""
    shown = [f"  {line}" for line in lines[:most]]
    left_out = len(lines) - len(shown)
    return [*shown, f"  and {count_noun(left_out, f'more {noun}')}"] if left_out else shown


def _align(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"  {size:>{widths[0]}}  {kind:{widths[1]}}  {name:{widths[2]}}  {origin}".rstrip()
        for size, kind, name, origin in rows
    ]
