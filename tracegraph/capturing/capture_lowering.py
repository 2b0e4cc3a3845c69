"""From a checked function to its lowering; in partial mode what no graph holds is cut out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tracegraph.capturing.progress import Progress
from tracegraph.capturing.unlowered import find_refused, find_unlowered
from tracegraph.constraints.violation import Violation
from tracegraph.ir.graph import Graph
from tracegraph.jax_internals import describe_physical
from tracegraph.lowering.beside import Beside, Preparation
from tracegraph.lowering.compile_gpu import prepare_reading
from tracegraph.lowering.lower import Lowered, lower_request
from tracegraph.lowering.warm_memory import warm_memory
from tracegraph.options import Options
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import UnsupportedError
from tracegraph.tracing.checked_graph import CheckedGraph, FirstTrace, make_request
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.verification.difference import is_large, prepare_difference

# What reading a program takes of the heap, for each op of its graph.
WARM_BYTES = 16 << 10
# Compilations that may follow one another before a refused region runs eagerly as a whole.
MAX_PRECISE_CUTS = 3


def lower_capture(
    first: FirstTrace,
    options: Options,
    prepared: PreparedCall,
    device: Device,
    progress: Progress,
) -> tuple[CheckedGraph, Lowered]:
    """Lowers a function for a device, and checks by its second trace what the first left open.

    In partial mode on a GPU, ops that become work that no graph holds run eagerly: those that are
    known by name, then those that lowering refuses. They are added to ``uncapturable``, each with
    its reason, so that `explain` lists them.

    Args:
        first: the function; its second trace is made while XLA compiles, and in any case before
            this returns.
        options: how it is captured.
        prepared: the call that is captured.
        device: to lower for.
        progress: is told of each region.

    Returns:
        What was lowered, and its lowering.

    Raises:
        CaptureError: the second trace differs from the first.
        UnsupportedError: XLA's program holds what no graph holds; in partial mode, for a reason
            that lies in no op.
    """
    beside = Beside(
        "check", first.trace_again, _list_preparations(device, options, first.checked.graph)
    )
    lower = functools.partial(_lower, options, prepared, device, progress, first.call, beside)
    try:
        if options.mode == "partial" and device.takes_kernels:
            lowered = _lower_cut(first.checked, lower)
        else:
            lowered = first.checked, lower(first.checked)
    except Exception:
        # What differs from trace to trace may be the reason, and is told first.
        beside.finish()
        raise
    if not beside.is_done:
        progress.enter(beside.stage)
        beside.finish()
    return lowered


def _list_preparations(device: Device, options: Options, graph: Graph) -> list[Preparation]:
    """Returns what a capture on a GPU does once per process or type: better while XLA compiles."""
    if not device.takes_kernels:
        return []
    preparations: list[Preparation] = [
        ("lower", prepare_reading),
        ("lower", functools.partial(warm_memory, WARM_BYTES * len(graph.ops))),
    ]
    if _has_op(graph, "dot_general"):
        preparations.append(("instantiate", device.preload_libraries))
    types = [describe_physical(operand.aval) for operand in graph.outputs]
    in_place = {index for index, _ in graph.aliases}
    fresh = [each for index, each in enumerate(types) if index not in in_place]
    if options.outputs == "fresh":
        preparations += [
            ("verify", functools.partial(device.prepare_result, *each))
            for each in dict.fromkeys(fresh)
        ]
    # Sums in an order that is left to chance: then results are not equal bit for bit.
    if options.verify and _has_op(graph, "scatter-add"):
        preparations += [
            ("verify", functools.partial(prepare_difference, *each, device.jax_device))
            for each in dict.fromkeys(types)
            if is_large(jax.ShapeDtypeStruct(*each))
        ]
    return preparations


def _has_op(graph: Graph, name: str) -> bool:
    return any(
        op.primitive.name == name or any(_has_op(inner, name) for _, inner in op.subgraphs)
        for op in graph.ops
    )


def _lower_cut(
    checked: CheckedGraph, lower: Callable[..., Lowered]
) -> tuple[CheckedGraph, Lowered]:
    """Lowers with all that no graph holds cut out."""
    checked = _cut(checked, find_unlowered(checked.graph))
    cuts = 0
    while True:
        try:
            return checked, lower(checked, is_marked=True)
        except UnsupportedError as error:
            found = find_refused(
                checked.graph,
                error.refused,
                checked.uncapturable.keys(),
                is_precise=cuts < MAX_PRECISE_CUTS,
            )
            if not found:
                raise
        checked = _cut(checked, found)
        cuts += 1


def _cut(checked: CheckedGraph, found: Mapping[int, Violation]) -> CheckedGraph:
    # The reason that was found first stays.
    reasons = dict(sorted({**found, **checked.uncapturable}.items()))
    return dataclasses.replace(checked, uncapturable=reasons)


def _lower(
    options: Options,
    prepared: PreparedCall,
    device: Device,
    progress: Progress,
    call: Callable[..., list[Any]],
    beside: Beside,
    checked: CheckedGraph,
    *,
    is_marked: bool = False,
) -> Lowered:
    progress.enter("lower")
    request = make_request(
        checked, options, prepared.call, prepared.names, is_marked=is_marked, traced=call
    )
    count = len(request.regions)
    return lower_request(
        request,
        device.jax_device,
        on_stage=lambda stage, name: progress.enter(stage, f"{name} of {count}" if name else ""),
        updates_in_place=device.updates_in_place,
        takes_kernels=device.takes_kernels,
        beside=beside,
        on_planned=device.prepare_arena,
    )
