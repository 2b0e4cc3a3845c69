"""Charts as SVG text. A shape that has a note carries the number of its note."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator

from tracegraph.memory_pictures.chart import LINE_COLOUR, Chart, Points, Shape

WIDTH = 1180
PLOT_HEIGHT = 420
ROW_HEIGHT = 26
# More shapes are thin, and would be nothing but their borders.
MOST_BORDERED = 150
_TOP, _BOTTOM, _RIGHT = 14, 46, 20
_LETTER_WIDTH = 6.4
_TEXT_COLOUR, _GRID_COLOUR, _FRAME_COLOUR = "#4a5260", "#e6e9ee", "#b4bac4"


def draw_svg(chart: Chart, number_note: Callable[[Shape], int]) -> str:
    """Returns a chart as an ``<svg>`` element; title, subtitle and legend are left to the page.

    Args:
        chart: what to draw.
        number_note: gives the number by which the page finds the note of a shape.
    """
    left = find_left_margin(chart)
    height = find_plot_height(chart)
    to_x, to_y = _make_scales(chart, left, height)
    lines = [
        f'<svg viewBox="0 0 {WIDTH} {height + _TOP + _BOTTOM}" role="img" '
        f'aria-label="{html.escape(chart.title)}">',
        *_draw_grid(chart, left, height, to_x, to_y),
        *_draw_shapes(chart, number_note, to_x, to_y),
        f'<rect x="{left}" y="{_TOP}" width="{WIDTH - left - _RIGHT}" height="{height}" '
        f'fill="none" stroke="{_FRAME_COLOUR}"/>',
        "</svg>",
    ]
    return "\n".join(lines)


def find_left_margin(chart: Chart) -> int:
    """Returns how much room the texts of the y axis take, in pixels."""
    longest = max((len(text) for _, text in chart.y_axis.ticks), default=0)
    return round(longest * _LETTER_WIDTH) + 44


def find_plot_height(chart: Chart) -> int:
    """Returns the height of the plot in pixels, which follows from the rows where there are any."""
    if not chart.y_axis.has_rows:
        return PLOT_HEIGHT
    rows = round(chart.y_axis.high)
    return max(3, rows) * ROW_HEIGHT


def _make_scales(
    chart: Chart, left: int, height: int
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    x, y = chart.x_axis, chart.y_axis
    x_scale = (WIDTH - left - _RIGHT) / (x.high - x.low)
    y_scale = height / (y.high - y.low)

    def to_x(value: float) -> float:
        return left + (value - x.low) * x_scale

    def to_y(value: float) -> float:
        return _TOP + height - (value - y.low) * y_scale

    return to_x, to_y


def _draw_grid(
    chart: Chart,
    left: int,
    height: int,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
) -> Iterator[str]:
    right, bottom = WIDTH - _RIGHT, _TOP + height
    for value, text in chart.y_axis.ticks:
        y = _number(to_y(value))
        yield f'<path d="M{left} {y}H{right}" stroke="{_GRID_COLOUR}"/>'
        yield _text(left - 8, to_y(value) + 4, text, "end")
    for value, text in chart.x_axis.ticks:
        x = _number(to_x(value))
        yield f'<path d="M{x} {_TOP}V{bottom}" stroke="{_GRID_COLOUR}"/>'
        yield _text(to_x(value), bottom + 18, text, "middle")
    yield _text((left + right) / 2, bottom + 38, chart.x_axis.label, "middle")
    middle = _TOP + height / 2
    turned = f' transform="rotate(-90 14 {_number(middle)})"'
    yield _text(14, middle, chart.y_axis.label, "middle", turned)


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return (
        f'<text x="{_number(x)}" y="{_number(y)}" fill="{_TEXT_COLOUR}" '
        f'text-anchor="{anchor}"{more}>{html.escape(text)}</text>'
    )


def _draw_shapes(
    chart: Chart,
    number_note: Callable[[Shape], int],
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
) -> Iterator[str]:
    stroke = "#ffffff" if len(chart.shapes) < MOST_BORDERED else "none"
    yield f'<g stroke="{stroke}" stroke-width="0.6">'
    for shape in chart.shapes:
        path = _trace_path([(to_x(x), to_y(y)) for x, y in shape.points])
        note = f' data-n="{number_note(shape)}"' if shape.note else ""
        if shape.is_line:
            yield (
                f'<path d="{path}" fill="none" stroke="{LINE_COLOUR}" stroke-width="1.6" '
                f'stroke-dasharray="6 3"{note}/>'
            )
            continue
        yield f'<path d="{path}Z" fill="{shape.colour}"{note}/>'
    yield "</g>"
    for shape in chart.shapes:
        if shape.label:
            yield from _draw_label(shape, to_x, to_y)


def _draw_label(
    shape: Shape, to_x: Callable[[float], float], to_y: Callable[[float], float]
) -> Iterator[str]:
    (x0, y0), (x1, y1) = find_corners(shape.points)
    width, height = to_x(x1) - to_x(x0), to_y(y0) - to_y(y1)
    if height < 14 or width < len(shape.label) * _LETTER_WIDTH + 8:
        return
    x, y = _number(to_x((x0 + x1) / 2)), _number(to_y((y0 + y1) / 2) + 4)
    text = html.escape(shape.label)
    yield f'<text x="{x}" y="{y}" fill="white" class="in" text-anchor="middle">{text}</text>'


def find_corners(points: Points) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the least and the greatest corner of a shape's bounding rectangle."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return (min(xs), min(ys)), (max(xs), max(ys))


def _trace_path(points: list[tuple[float, float]]) -> str:
    parts = []
    before = ("", "")
    for i, (x, y) in enumerate(points):
        now = _number(x), _number(y)
        if i == 0:
            parts.append(f"M{now[0]} {now[1]}")
        elif now[0] != before[0] and now[1] != before[1]:
            parts.append(f"L{now[0]} {now[1]}")
        elif now[0] != before[0]:
            parts.append(f"H{now[0]}")
        elif now[1] != before[1]:
            parts.append(f"V{now[1]}")
        before = now
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
