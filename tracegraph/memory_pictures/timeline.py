"""Pictures of a memory snapshot: timelines of pools, segments with blocks, plans of graphs.

``python -m tracegraph memory SNAPSHOT`` writes them as one HTML file, which is self-contained, and
as PNG. Snapshots of PyTorch are drawn too.
"""

from __future__ import annotations

import pathlib
from typing import Any

from tracegraph.memory_pictures.blocks import list_pools
from tracegraph.memory_pictures.chart import Chart, format_bytes
from tracegraph.memory_pictures.page import draw_page
from tracegraph.memory_pictures.png import write_image
from tracegraph.memory_pictures.views import draw_plan, draw_segments, draw_timeline, name_pool
from tracegraph.runtime.errors import count_noun

MOST_POOLS = 24
MOST_PLANS = 24
MOST_PLANS_IN_IMAGE = 4
# Bound the size of the page: about twenty letters for each.
POINTS_OF_ALL, POINTS_OF_POOLS = 200_000, 200_000


def draw_memory(
    snapshot: dict[str, Any], *, title: str = "Memory", has_time_axis: bool = False
) -> str:
    """Returns all pictures of a snapshot as one HTML document that needs nothing else.

    Args:
        snapshot: of `read_snapshot` or `build_snapshot`.
        title: heading of the page.
        has_time_axis: timelines count milliseconds instead of events.

    Example:
        >>> page = draw_memory({"segments": [], "device_traces": [[]]}, title="Nothing yet")
        >>> "<h1>Nothing yet</h1>" in page
        True
    """
    sections: list[tuple[str, list[Chart]]] = []
    for device in _list_devices(snapshot):
        name = f"device {device}"
        sections += [
            (f"Blocks over time, {name}", _draw_timelines(snapshot, device, has_time_axis)),
            (f"Segments, {name}", [_draw_segments(snapshot, device)]),
        ]
    sections.append(("Memory plans of captured graphs", _draw_plans(snapshot)))
    return draw_page(title, describe_snapshot(snapshot), sections)


def write_page(
    path: str | pathlib.Path, snapshot: dict[str, Any], *, has_time_axis: bool = False
) -> None:
    """Writes `draw_memory` into a file.

    Args:
        path: of the new file.
        snapshot: of `read_snapshot` or `build_snapshot`.
        has_time_axis: timelines count milliseconds instead of events.
    """
    title = f"Memory: {pathlib.Path(path).stem}"
    page = draw_memory(snapshot, title=title, has_time_axis=has_time_axis)
    pathlib.Path(path).write_text(page, encoding="utf-8")


def write_png(
    path: str | pathlib.Path, snapshot: dict[str, Any], *, has_time_axis: bool = False
) -> None:
    """Draws the same into a PNG file: of each device all pools together, then the largest plans.

    Args:
        path: of the new file.
        snapshot: of `read_snapshot` or `build_snapshot`.
        has_time_axis: timelines count milliseconds instead of events.

    Raises:
        ConfigError: matplotlib is not installed, which the extra ``plots`` brings.
    """
    charts: list[Chart] = []
    for device in _list_devices(snapshot):
        charts.append(_draw_timeline(snapshot, device, None, has_time_axis, POINTS_OF_ALL))
        charts.append(_draw_segments(snapshot, device))
    write_image(path, charts + _draw_plans(snapshot)[:MOST_PLANS_IN_IMAGE])


def describe_snapshot(snapshot: dict[str, Any]) -> str:
    """Returns what a snapshot holds, in one line.

    Example:
        >>> describe_snapshot({"segments": [], "device_traces": [[], []]})
        '2 devices, 0 segments with 0 B, in use 0 B, 0 trace entries, 0 memory plans'
    """
    segments = snapshot["segments"]
    reserved = sum(segment["total_size"] for segment in segments)
    used = sum(
        block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] != "inactive"
    )
    entries = sum(len(trace) for trace in snapshot["device_traces"])
    devices = len(snapshot["device_traces"])
    return (
        f"{count_noun(devices, 'device')}, {len(segments):,} segments with "
        f"{format_bytes(reserved)}, in use {format_bytes(used)}, {entries:,} trace entries, "
        f"{len(snapshot.get('tracegraph_plans', ())):,} memory plans"
    )


def _list_devices(snapshot: dict[str, Any]) -> list[int]:
    """Returns the devices of which something is known; the first one if there is none."""
    used = {segment["device"] for segment in snapshot["segments"]}
    used |= {device for device, trace in enumerate(snapshot["device_traces"]) if trace}
    return sorted(used) or [0]


def _pick_segments(snapshot: dict[str, Any], device: int) -> list[dict[str, Any]]:
    return [segment for segment in snapshot["segments"] if segment["device"] == device]


def _pick_trace(snapshot: dict[str, Any], device: int) -> list[dict[str, Any]]:
    traces = snapshot["device_traces"]
    return traces[device] if device < len(traces) else []


def _draw_timelines(snapshot: dict[str, Any], device: int, has_time_axis: bool) -> list[Chart]:
    trace, segments = _pick_trace(snapshot, device), _pick_segments(snapshot, device)
    charts = [_draw_timeline(snapshot, device, None, has_time_axis, POINTS_OF_ALL)]
    pools = list_pools(trace, segments)
    if len(pools) < 2:
        return charts
    sizes = dict.fromkeys(pools, 0)
    for segment in segments:
        if "segment_pool_id" in segment:
            sizes[tuple(segment["segment_pool_id"])] += segment["total_size"]
    largest = sorted(pools, key=lambda pool: -sizes[pool])[:MOST_POOLS]
    points = POINTS_OF_POOLS // len(largest)
    for pool in sorted(largest):
        charts.append(_draw_timeline(snapshot, device, pool, has_time_axis, points))
    return charts


def _draw_timeline(
    snapshot: dict[str, Any],
    device: int,
    pool_id: tuple[int, ...] | None,
    has_time_axis: bool,
    most_points: int,
) -> Chart:
    name = "all pools" if pool_id is None else name_pool(pool_id)
    return draw_timeline(
        f"Blocks over time, device {device}, {name}",
        _pick_trace(snapshot, device),
        _pick_segments(snapshot, device),
        pool_id=pool_id,
        has_time_axis=has_time_axis,
        most_points=most_points,
    )


def _draw_segments(snapshot: dict[str, Any], device: int) -> Chart:
    return draw_segments(f"Segments of device {device}", _pick_segments(snapshot, device))


def _draw_plans(snapshot: dict[str, Any]) -> list[Chart]:
    plans = sorted(snapshot.get("tracegraph_plans", ()), key=lambda plan: -plan["arena_bytes"])
    return [draw_plan(plan) for plan in plans[:MOST_PLANS]]
