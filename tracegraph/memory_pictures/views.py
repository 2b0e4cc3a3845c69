"""The charts of a snapshot: blocks over time, segments with their blocks, memory plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tracegraph.memory_pictures.blocks import (
    Band,
    BlockHistory,
    Entry,
    Level,
    Stack,
    find_blocks,
    locate_blocks,
    stack_blocks,
)
from tracegraph.memory_pictures.chart import (
    LINE_COLOUR,
    SUMMED_COLOUR,
    Axis,
    Chart,
    Points,
    Shape,
    format_bytes,
    make_bytes_axis,
    make_count_axis,
    make_rectangle,
    make_time_axis,
    pick_colour,
)

MOST_BLOCKS = 15_000
MOST_SEGMENTS = 48
STATE_COLOURS = {
    "active_allocated": "#4e79a7",
    "active_pending_free": "#d1605e",
    "inactive": "#eceff3",
}
_ROUNDING_COLOUR = "#b9cbe0"
_ROW_MARGIN = 0.14
_QUARTERS = tuple((quarter / 4, f"{quarter * 25} %") for quarter in range(5))


def draw_timeline(
    title: str,
    trace: Sequence[Entry],
    segments: Sequence[Entry],
    *,
    pool_id: tuple[int, ...] | None = None,
    has_time_axis: bool = False,
    most_points: int = 200_000,
) -> Chart:
    """Returns the chart of a pool's blocks over time, stacked, with the reserved bytes as a line.

    Args:
        title: names the device and the pool.
        trace: entries of one device, oldest first.
        segments: of the same device, at the end of the trace.
        pool_id: None for all pools.
        has_time_axis: the x axis counts milliseconds instead of events.
        most_points: bounds the size of the picture, see `stack_blocks`.
    """
    history = find_blocks(trace, segments, pool_id)
    stack = stack_blocks(history, MOST_BLOCKS, most_points)
    places = _place_steps(history, has_time_axis)
    shapes = [_draw_band(band, places) for band in stack.bands]
    is_complete = len(stack.bands) == len(history.blocks)
    if not is_complete:
        shapes.append(_draw_summed(stack, places))
    line = _list_edge(history.reserved, places)
    shapes.append(Shape(line, LINE_COLOUR, "reserved in segments", is_line=True))
    peak = max(nbytes for _, nbytes in stack.total)
    highest = max(peak, *(nbytes for _, nbytes in history.reserved))
    if has_time_axis:
        x_axis = make_time_axis("time (ms)", places[-1])
    else:
        x_axis = make_count_axis("event", history.step_count + 1)
    legend = [("reserved in segments", LINE_COLOUR), ("blocks, a colour each", pick_colour(0))]
    if not is_complete:
        legend.append(("smaller blocks, summed", SUMMED_COLOUR))
    return Chart(
        title,
        _describe_timeline(history, stack, peak),
        x_axis,
        make_bytes_axis("memory", highest),
        tuple(shapes),
        tuple(legend),
    )


def _describe_timeline(history: BlockHistory, stack: Stack, peak: int) -> str:
    at_end = [nbytes for step, nbytes in stack.total if step <= history.step_count][-1]
    text = (
        f"{history.step_count:,} events, {len(history.blocks):,} blocks; in use at the end "
        f"{format_bytes(at_end)}, peak {format_bytes(peak)}, "
        f"reserved at the end {format_bytes(history.reserved[-1][1])}"
    )
    if len(stack.bands) < len(history.blocks):
        text += f"; the {len(stack.bands):,} largest blocks are drawn, the others summed"
    return text


def _place_steps(history: BlockHistory, has_time_axis: bool) -> Sequence[float]:
    """Returns the x of every step, and of the end after the last one."""
    if not has_time_axis:
        return range(history.step_count + 2)
    times = [entry.get("time_us", 0) for entry in history.entries]
    start, end = (times[0], times[-1]) if times else (0, 0)
    # Room at both ends, so that blocks from before the trace and those still in use have a width.
    margin = max(end - start, 1) / 50
    milliseconds = [(time - start + margin) / 1000 for time in times]
    return [0.0, *itertools.accumulate(milliseconds, max), (end - start + 2 * margin) / 1000]


def _list_edge(level: Iterable[tuple[int, int]], places: Sequence[float]) -> Points:
    """Returns a staircase from the first step of a level to the end."""
    points: list[tuple[float, float]] = []
    for step, nbytes in level:
        x = places[min(step, len(places) - 1)]
        if points:
            points.append((x, points[-1][1]))
        points.append((x, nbytes))
    points.append((places[-1], points[-1][1]))
    return tuple(points)


def _draw_band(band: Band, places: Sequence[float]) -> Shape:
    end = places[min(band.block.last, len(places) - 1)]
    lower = _list_edge(band.offsets, places)
    lower = (*(point for point in lower if point[0] < end), (end, lower[-1][1]))
    nbytes = band.block.nbytes
    upper = tuple((x, y + nbytes) for x, y in reversed(lower))
    colour = pick_colour(band.number)
    return Shape((*lower, *upper), colour, describe_block(band), describe_stack(band.block.record))


def _draw_summed(stack: Stack, places: Sequence[float]) -> Shape:
    lower, upper = dict(stack.drawn), dict(stack.total)
    steps = sorted({*lower, *upper})
    bottoms = _fill(steps, lower)
    tops = _fill(steps, upper)
    edge = (*_list_edge(bottoms, places), *reversed(_list_edge(tops, places)))
    return Shape(edge, SUMMED_COLOUR, "smaller blocks, summed")


def _fill(steps: Iterable[int], level: Mapping[int, int]) -> Level:
    now = 0
    filled = []
    for step in steps:
        now = level.get(step, now)
        filled.append((step, now))
    return tuple(filled)


def describe_block(band: Band) -> str:
    """Returns size, address, stream, pool and life of a block in one line."""
    record, first = band.block.record, band.block.first
    parts = [
        f"{format_bytes(record['size'])} ({record['size']:,} bytes) at {record['addr']:#x}",
        f"stream {record['stream']}",
    ]
    if "pool_id" in record:
        parts.append(name_pool(record["pool_id"]))
    parts.append(f"from event {first}" if first else "from before the first event")
    return ", ".join(parts)


def describe_stack(record: Entry) -> tuple[str, ...]:
    """Returns the call stack of a trace entry or block, one line per frame, innermost first."""
    return tuple(
        f"{each.get('filename', '')}:{each.get('line', 0)} in {each.get('name', '')}"
        for each in record.get("frames") or ()
    )


def name_pool(pool_id: Iterable[int]) -> str:
    """Returns ``pool (3, 0)``, or ``default pool`` for (0, 0)."""
    numbers = tuple(pool_id)
    return f"pool ({', '.join(map(str, numbers))})" if any(numbers) else "default pool"


def draw_segments(title: str, segments: Sequence[Entry]) -> Chart:
    """Returns the chart of segments, one row each, with their blocks at their places.

    Args:
        title: names the device.
        segments: of one device.
    """
    largest = sorted(segments, key=lambda each: -each["total_size"])[:MOST_SEGMENTS]
    rows = sorted(largest, key=lambda each: (each.get("segment_pool_id", ()), each["address"]))
    shapes: list[Shape] = []
    for row, segment in enumerate(reversed(rows)):
        shapes += _draw_segment(row, segment)
    shapes.sort(key=lambda shape: abs(shape.points[1][0] - shape.points[0][0]))
    reserved = sum(each["total_size"] for each in segments)
    used = sum(
        block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] != "inactive"
    )
    subtitle = (
        f"{len(segments):,} segments, reserved {format_bytes(reserved)}, in use "
        f"{format_bytes(used)}; every row is one segment at full width"
    )
    if len(rows) < len(segments):
        subtitle += f"; the {len(rows)} largest segments are drawn"
    if len(shapes) > MOST_BLOCKS:
        subtitle += f"; the {MOST_BLOCKS:,} largest blocks are drawn"
    ticks = tuple((row + 0.5, _name_segment(each)) for row, each in enumerate(reversed(rows)))
    legend = (
        ("in use", STATE_COLOURS["active_allocated"]),
        ("lost to rounding", _ROUNDING_COLOUR),
        ("freed, awaits a stream", STATE_COLOURS["active_pending_free"]),
        ("free", STATE_COLOURS["inactive"]),
    )
    return Chart(
        title,
        subtitle,
        Axis("share of the segment", 0, 1, _QUARTERS),
        Axis("segment", 0, max(len(rows), 1), ticks, has_rows=True),
        tuple(shapes[-MOST_BLOCKS:]),
        legend,
    )


def _name_segment(segment: Entry) -> str:
    pool = name_pool(segment.get("segment_pool_id", (0, 0)))
    stream = f", stream {segment['stream']}" if segment["stream"] else ""
    return f"{format_bytes(segment['total_size'])}, {pool}{stream}"


def _draw_segment(row: int, segment: Entry) -> Iterator[Shape]:
    scale = max(segment["total_size"], 1)
    bottom, top = row + _ROW_MARGIN, row + 1 - _ROW_MARGIN
    for address, block in locate_blocks(segment):
        left = (address - segment["address"]) / scale
        right = left + block["size"] / scale
        state = block["state"]
        requested = block.get("requested_size", block["size"])
        note = (
            f"{format_bytes(block['size'])} ({block['size']:,} bytes) at {address:#x}, "
            f"{state.replace('_', ' ')}"
        )
        if state != "inactive":
            note += f", requested {requested:,} bytes"
        stack = describe_stack(block)
        middle = left + min(requested, block["size"]) / scale
        if state == "active_allocated" and middle < right:
            loss = f"lost to rounding: {block['size'] - requested:,} bytes; {note}"
            points = make_rectangle(middle, bottom, right, top)
            yield Shape(points, _ROUNDING_COLOUR, loss, stack)
            right = middle
        points = make_rectangle(left, bottom, right, top)
        yield Shape(points, STATE_COLOURS[state], note, stack)


def draw_plan(plan: Mapping[str, Any]) -> Chart:
    """Returns the chart of a memory plan: one rectangle per buffer, steps by arena offset.

    Args:
        plan: of `describe_plan`.
    """
    buffers = plan["buffers"]
    largest = sorted(range(len(buffers)), key=lambda i: -buffers[i]["bytes"])[:MOST_BLOCKS]
    shapes = tuple(_draw_buffer(i, buffers[i]) for i in largest if buffers[i]["bytes"])
    steps = max((each["last"] for each in buffers), default=0) + 1
    total = sum(each["bytes"] for each in buffers)
    arena_bytes = plan["arena_bytes"]
    highest = max([arena_bytes, *(each["offset"] + each["bytes"] for each in buffers)])
    subtitle = (
        f"{len(buffers):,} buffers, {steps:,} steps; arena {format_bytes(arena_bytes)}, buffers "
        f"side by side {format_bytes(total)}"
    )
    if plan.get("arena_address"):
        subtitle += f", at {plan['arena_address']:#x}"
    if len(largest) < len(buffers):
        subtitle += f"; the {len(largest):,} largest buffers are drawn"
    return Chart(
        f"Memory plan of {plan['name']}",
        subtitle,
        make_count_axis("step", steps),
        make_bytes_axis("offset in the arena", highest),
        shapes,
        (("buffers, a colour each", pick_colour(0)),),
    )


def _draw_buffer(index: int, buffer: Mapping[str, Any]) -> Shape:
    bottom, top = buffer["offset"], buffer["offset"] + buffer["bytes"]
    note = (
        f"{buffer['name']}: {format_bytes(buffer['bytes'])} ({buffer['bytes']:,} bytes) at offset "
        f"{bottom:,}, steps {buffer['first']} to {buffer['last']}"
    )
    points = make_rectangle(buffer["first"], bottom, buffer["last"] + 1, top)
    return Shape(points, pick_colour(index), note, label=buffer["name"])
