"""The report of a capture over several devices: devices, mesh, shardings, collectives, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from tracegraph.capturing.pipeline import Capture
from tracegraph.constraints.spread import print_mesh, print_sharding
from tracegraph.lowering.compile_spread import SpreadProgram
from tracegraph.lowering.lower import Lowered
from tracegraph.reports.summary import cut_lines, describe_call, describe_times
from tracegraph.runtime.definition.placement import list_joint
from tracegraph.runtime.device import Device
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.result_names import name_results

MAX_KINDS, MAX_NAMED_DEVICES = 6, 8


def summarise_spread(
    prepared: PreparedCall,
    device: Device,
    program: SpreadProgram,
    kept: Capture | None,
    history: Sequence[str],
) -> str:
    """Returns the summary of a capture over several devices.

    Args:
        prepared: the call.
        device: JAX's default one.
        program: of XLA.
        kept: the capture, if it was captured already.
        history: why the function was captured anew, and which gradients it has graphs for.
    """
    verdict = "can be captured" if kept is None else "is captured"
    head, *arguments = describe_call(prepared, device, verdict)
    lines = [
        head,
        _describe_devices(program),
        *arguments,
        "cuts: none, all is one program that every device runs",
        *([f"calls run {kept.comparison}"] if kept is not None and kept.comparison else []),
        *_list_collectives(program),
        *_list_memory(program.executable),
        f"capture: {describe_times(kept.seconds if kept is not None else {})}",
        f"verification: {_describe_verification(prepared, kept)}",
        *history,
    ]
    return cut_lines(lines)


def list_places(program: SpreadProgram, lowered: Lowered) -> list[str]:
    """Returns the lines of a capture whose devices have a graph each: devices and collectives.

    Args:
        program: of XLA, for all of them.
        lowered: what each does.
    """
    found = ", ".join(map(str, program.collectives[:MAX_KINDS])) or "none"
    joint = len(list_joint(lowered.definition))
    how = "kernels in each graph"
    if joint:
        calls = "once" if joint == 1 else f"{joint} times"
        how = f"{how}, and over processes XLA is called {calls} between two graphs"
    return [_describe_devices(program), f"collectives: {how}: {found}"]


def list_shardings(
    prepared: PreparedCall, program: SpreadProgram, checked: CheckedGraph
) -> list[str]:
    """Returns one line per argument and per result: where each device's part is.

    Args:
        prepared: the call.
        program: of XLA.
        checked: the traced graph.
    """
    given = [leaf.sharding for leaf in prepared.signature.leaves]
    lines = [
        f"{name}: {print_sharding(sharding) if sharding is not None else 'as XLA wants it'}"
        for name, sharding in zip(prepared.names, given, strict=True)
    ]
    pairs = zip(name_results(checked.out_tree, checked.probes), program.results, strict=True)
    return [*lines, *(f"{path}: {print_sharding(sharding)}" for path, sharding in pairs)]


def _describe_devices(program: SpreadProgram) -> str:
    devices = program.devices
    named = ", ".join(map(str, devices[:MAX_NAMED_DEVICES]))
    rest = ", ..." if len(devices) > MAX_NAMED_DEVICES else ""
    meshes = {
        print_mesh(sharding.mesh)
        for sharding in program.results
        if isinstance(sharding, NamedSharding)
    }
    mesh = f", mesh {' and '.join(sorted(meshes))}" if meshes else ""
    return f"devices: {len(devices)} ({named}{rest}){mesh}"


def _list_collectives(program: SpreadProgram) -> list[str]:
    found: Sequence[Any] = program.collectives
    if not found:
        return ["collectives: none"]
    lines = [f"  {each}" for each in found[:MAX_KINDS]]
    return [f"collectives: {sum(each.count for each in found)}, inside of the program", *lines]


def _list_memory(executable: jax.stages.Compiled) -> list[str]:
    memory: Any = executable.memory_analysis()
    if memory is None:
        return []
    return [
        "memory on each device, none of it in a pool",
        f"  arguments: {memory.argument_size_in_bytes:,} bytes, read where they are",
        f"  results: {memory.output_size_in_bytes:,} bytes, "
        f"{memory.alias_size_in_bytes:,} of them updated in place",
        f"  temporaries: {memory.temp_size_in_bytes:,} bytes",
    ]


def _describe_verification(prepared: PreparedCall, kept: Capture | None) -> str:
    if kept is not None:
        return str(kept.verification)
    if not prepared.options.verify:
        return "none: verify=False"
    return "at the first call: two replays compared with XLA's executable on every device"
