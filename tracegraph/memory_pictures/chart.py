"""A chart as data: shapes over two axes, drawn alike as SVG and with matplotlib."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

Points: TypeAlias = tuple[tuple[float, float], ...]

# Neighbours differ in hue and lightness; none is as grey as the marks below.
BLOCK_COLOURS = (
    "#4e79a7",
    "#f2a65a",
    "#6ba292",
    "#d1605e",
    "#8f7cb3",
    "#e3bd3f",
    "#5fa8d3",
    "#b5838d",
    "#7fa650",
    "#c97b3d",
    "#3d8f8b",
    "#a3a0d1",
)
SUMMED_COLOUR = "#c9ccd1"
LINE_COLOUR = "#2f3640"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TICKS = 6


@dataclasses.dataclass(frozen=True)
class Shape:
    """One area, or one line, in the units of the axes.

    Attributes:
        points: corners in order; an area is closed by itself.
        colour: as ``#4e79a7``.
        note: what it is, shown while the mouse is over it; empty for nothing.
        stack: lines under the note.
        label: text in its middle, left out where it does not fit.
        is_line: True for a line without an area.
    """

    points: Points
    colour: str
    note: str = ""
    stack: tuple[str, ...] = ()
    label: str = ""
    is_line: bool = False


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: what it counts, with the unit.
        low: value at its beginning.
        high: value at its end; greater than ``low`` for an axis that grows to the right or upwards.
        ticks: values with their texts.
        has_rows: True where every 1 of the axis is a row with a name.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    has_rows: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title: what it shows.
        subtitle: totals, and what was left out.
        x_axis: to the right.
        y_axis: upwards.
        shapes: in the order in which they are painted.
        legend: texts with their colours.
    """

    title: str
    subtitle: str
    x_axis: Axis
    y_axis: Axis
    shapes: tuple[Shape, ...]
    legend: tuple[tuple[str, str], ...]


def make_rectangle(left: float, bottom: float, right: float, top: float) -> Points:
    """Returns the corners of a rectangle."""
    return ((left, bottom), (right, bottom), (right, top), (left, top))


def pick_colour(index: int) -> str:
    """Returns the colour of the block with this number."""
    return BLOCK_COLOURS[index % len(BLOCK_COLOURS)]


def format_bytes(nbytes: float) -> str:
    """Returns a size with at most one decimal.

    Example:
        >>> format_bytes(512), format_bytes(2 << 20), format_bytes(1.25 * 2**30)
        ('512 B', '2 MiB', '1.2 GiB')
    """
    power = find_unit(nbytes)
    value = f"{nbytes / 1024**power:.1f}".removesuffix(".0")
    return f"{value} {_UNITS[power]}"


def find_unit(nbytes: float) -> int:
    """Returns the power of 1024 in which a size has one to four digits before the point."""
    power = 0
    while abs(nbytes) >= 1024 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    return power


def make_bytes_axis(label: str, highest: int) -> Axis:
    """Returns an axis from 0 to a little above ``highest`` bytes, all ticks in one unit.

    Example:
        >>> axis = make_bytes_axis("allocated", 84 << 20)
        >>> axis.label, [text for _, text in axis.ticks]
        ('allocated (MiB)', ['0', '20', '40', '60', '80'])
    """
    power = find_unit(highest)
    scale = 1024**power
    high = max(highest, 1) * 1.04
    ticks = tuple((value * scale, text) for value, text in list_ticks(high / scale))
    return Axis(f"{label} ({_UNITS[power]})", 0, high, ticks)


def make_count_axis(label: str, highest: int) -> Axis:
    """Returns an axis from 0 to ``highest`` with ticks at whole numbers.

    Example:
        >>> [text for _, text in make_count_axis("event", 2_500).ticks]
        ['0', '500', '1,000', '1,500', '2,000', '2,500']
        >>> [text for _, text in make_count_axis("event", 2).ticks]
        ['0', '1', '2']
    """
    high = max(highest, 1)
    ticks = tuple((v, f"{v:,.0f}") for v, _ in list_ticks(high) if v.is_integer())
    return Axis(label, 0, high, ticks)


def make_time_axis(label: str, highest: float) -> Axis:
    """Returns an axis from 0 to ``highest``, in the unit of the label.

    Example:
        >>> [text for _, text in make_time_axis("time (ms)", 0.6).ticks]
        ['0.0', '0.1', '0.2', '0.3', '0.4', '0.5', '0.6']
    """
    high = max(highest, 1e-3)
    return Axis(label, 0, high, list_ticks(high))


def list_ticks(high: float) -> tuple[tuple[float, str], ...]:
    """Returns round values from 0 to ``high`` with their texts, about six."""
    size = 1.0
    while size * 10 <= high / _TICKS:
        size *= 10
    while size > high / _TICKS:
        size /= 10
    step = min((size * factor for factor in (1, 2, 5, 10)), key=lambda s: abs(high / s - _TICKS))
    # Some quotients of decimal fractions come out a little too small.
    count = int(high / step + 1e-9)
    return tuple((i * step, _format_tick(i * step, step)) for i in range(count + 1))


def _format_tick(value: float, step: float) -> str:
    decimals = 0
    while decimals < 6 and abs(step * 10**decimals - round(step * 10**decimals)) > 1e-9:
        decimals += 1
    return f"{value:,.{decimals}f}"
