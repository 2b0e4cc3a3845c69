"""What was measured of a graph → its `Profile`: shares, starts, critical paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.records import NodeData, PartData
from tracegraph.profiling.critical_path import Schedule, schedule
from tracegraph.profiling.measure import Measured
from tracegraph.profiling.peaks import Peaks, count_operations
from tracegraph.profiling.profile import Profile
from tracegraph.profiling.records import NodeProfile, PartProfile
from tracegraph.runtime.definition.graph_nodes import Node

# Shown as such, so that times can be compared.
_SECONDS_OF_NOTE = 1.0


def summarise_profile(
    data: GraphData,
    nodes: Sequence[Node],
    places: Sequence[tuple[str, int]],
    measured: Measured,
    peaks: Peaks,
    device: str,
) -> Profile:
    """Returns a profile.

    Args:
        data: the graph as records.
        nodes: the node of its definition behind each record.
        places: scope and stream of each node.
        measured: its times.
        peaks: of the device.
        device: what a report calls it.
    """
    times = {index: found.warm_us or 0.0 for index, found in measured.times.items()}
    schedules = [_schedule_part(data, part, times) for part in data.parts]
    critical = {index for found in schedules for index in found.path}
    profiles: list[NodeProfile] = []
    for node, source, (scope, stream) in zip(data.nodes, nodes, places, strict=True):
        found = _describe(node, source, measured, peaks)
        start_us = schedules[node.part].starts[node.index]
        place = {"scope": scope, "stream": stream, "start_us": start_us}
        profiles.append(dataclasses.replace(found, is_critical=node.index in critical, **place))
    wholes = iter(measured.wholes)
    parts = tuple(
        _sum_part(data, part, found, times, None if part.kind == "body" else next(wholes))
        for part, found in zip(data.parts, schedules, strict=True)
    )
    notes = tuple(_list_notes(measured))
    return Profile(
        data.name, device, peaks, measured.floor_us, parts, tuple(profiles), data.edges, notes
    )


def _schedule_part(data: GraphData, part: PartData, times: Mapping[int, float]) -> Schedule:
    indices = [node.index for node in data.list_nodes(part.number)]
    waits = {index: data.dependencies(index) for index in indices}
    return schedule(indices, waits, times)


def _describe(node: NodeData, source: Node, measured: Measured, peaks: Peaks) -> NodeProfile:
    """Returns a node with its times and shares."""
    time = measured.times[node.index]
    operations, number_format = count_operations(source)
    peak = peaks.tensor_rates.get(number_format)
    return NodeProfile(
        node.index,
        node.part,
        node.kind,
        node.name,
        node.where,
        warm_us=time.warm_us,
        cold_us=time.cold_us,
        nbytes=node.nbytes,
        memory_share=_divide(node.nbytes, time.cold_us, peaks.memory_rate),
        operations=operations,
        tensor_share=_divide(operations, time.warm_us, peak) if operations else None,
        measured=measured.sources[node.index],
        note=time.note,
    )


def _divide(amount: int, us: float | None, peak: float | None) -> float | None:
    """Returns the share of a peak, None where it is not known."""
    return amount / (1e-6 * us) / peak if us and peak else None


def _sum_part(
    data: GraphData,
    part: PartData,
    found: Schedule,
    times: Mapping[int, float],
    whole_us: float | None,
) -> PartProfile:
    nodes = data.list_nodes(part.number)
    return PartProfile(
        part.number,
        part.kind,
        data.describe_part(part),
        whole_us,
        found.path,
        found.length_us,
        sum(times[node.index] for node in nodes),
        len(nodes),
    )


def _list_notes(measured: Measured) -> Iterator[str]:
    if measured.seconds >= _SECONDS_OF_NOTE:
        yield f"measured in {measured.seconds:.0f} s"
    counts: dict[str, int] = {}
    for found in measured.times.values():
        if found.note:
            counts[found.note] = counts.get(found.note, 0) + 1
    for note, count in counts.items():
        yield f"{count} node{'s' * (count > 1)}: {note}"
