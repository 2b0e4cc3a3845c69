"""What `profile` does with the graph of a call, and which it cannot measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegraph.breaks.branching_graph import BranchingGraph
from tracegraph.capturing.progress import Progress
from tracegraph.constraints.frames import locate_caller
from tracegraph.graph_pictures.lines import NodeLines, find_buffer_lines
from tracegraph.graph_pictures.read_graph import list_sources, read_graph
from tracegraph.profiling.measure import measure_graph
from tracegraph.profiling.peaks import find_peaks
from tracegraph.profiling.profile import Profile
from tracegraph.profiling.summary import summarise_profile
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.replaying.jit_call import JitCall
from tracegraph.replaying.spread_graph import SpreadGraph
from tracegraph.runtime.default_device import read_properties
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import ReplayError


def profile_graph(captured: CapturedGraph, leaves: Sequence[Any], device: Device) -> Profile:
    """Returns the profile of a captured graph.

    Args:
        captured: the graph; it is not launched.
        leaves: one value per dynamic leaf.
        device: that it is on.

    Raises:
        OutOfMemoryError: there is no memory for a second instance.
    """
    definition, checked = captured.lowered.definition, captured.checked
    with Progress(f"profiling `{captured.name}`") as progress:
        progress.enter("read", "the graph")
        buffer_lines = find_buffer_lines(checked)
        lines = NodeLines(checked, captured.lowered, buffer_lines)
        data = read_graph(definition, lines.find, buffer_lines)
        nodes = list_sources(definition)
        measured = measure_graph(captured, leaves, device, data, nodes, progress)
    properties = read_properties(device.jax_device)
    places = [lines.find_place(node) for node in nodes]
    title = f"{device.name}, {properties.name}"
    return summarise_profile(data, nodes, places, measured, find_peaks(properties), title)


def find_profiled(name: str, graph: Any) -> CapturedGraph:
    """Returns what calls replay, if it is one graph of this process's device.

    Args:
        name: of the captured function.
        graph: what takes the calls of a signature; None if nothing does yet.

    Raises:
        ReplayError: it is no graph, or none of ours.
    """
    is_spread = isinstance(graph, SpreadGraph)
    if isinstance(graph, CapturedGraph) and graph.lowered.definition.slots and not is_spread:
        return graph
    if graph is None:
        what = "was not captured with these arguments, or its graph was released"
        why = "a profile times the nodes of the graph that calls replay"
        fix = f"call {name}(...) with them first"
    elif isinstance(graph, CapturedGraph) and not is_spread:
        raise make_nothing_error(name)
    elif isinstance(graph, JitCall):
        what = "runs as jax.jit with these arguments, so that it has no graph"
        why = "its eager parts made the graph slower than jax.jit, which took its place"
        fix = 'profile it with jax.profiler, or capture it with prefer="graph"'
    elif isinstance(graph, BranchingGraph):
        what = "is captured in several parts with these arguments"
        why = "it reads values in Python, and which part comes next depends on them"
        fix = "capture and profile the functions between the reads by themselves"
    else:
        what = "runs over several devices with these arguments"
        why = "a node is timed alone, and what exchanges arrays waits for the other devices"
        fix = "profile it with jax.profiler, or with arguments on one device"
    raise ReplayError(
        f"`{name}` {what}", where=f"profile, {locate_caller()}", why=why, fix=fix, anchor="profile"
    )


def make_nothing_error(name: str) -> ReplayError:
    """Returns the error of a graph without nodes.

    Args:
        name: of the captured function or block.
    """
    return ReplayError(
        f"`{name}` has nothing to profile",
        where=f"profile, {locate_caller()}",
        why="its graph has no node: it computes nothing",
        fix="profile what computes something from its arguments",
        anchor="profile",
    )
