"""Charts as one PNG image, drawn by matplotlib where it is installed."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from tracegraph.memory_pictures.chart import LINE_COLOUR, Chart
from tracegraph.memory_pictures.svg import MOST_BORDERED, WIDTH, find_corners, find_plot_height
from tracegraph.runtime.errors import ConfigError

DOTS_PER_INCH = 110
_LETTER_SHARE = 6.8 / WIDTH


def write_image(path: str | pathlib.Path, charts: Sequence[Chart]) -> None:
    """Draws charts into a PNG file, one below the other.

    Args:
        path: of the new file.
        charts: one or more.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"cannot draw {path}: {error}",
            where="memory timeline, PNG",
            why="PNG images are drawn by matplotlib, which tracegraph does not install by itself",
            fix='pip install "tracegraph-jax[plots]", or write the HTML page, which needs nothing',
            anchor="snapshot",
        ) from error
    heights = [find_plot_height(chart) + 130 for chart in charts]
    figure = Figure(
        figsize=(WIDTH / DOTS_PER_INCH, sum(heights) / DOTS_PER_INCH), layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(len(charts), 1, height_ratios=heights, squeeze=False)
    for axes, chart in zip(grid[:, 0], charts, strict=True):
        _draw_chart(axes, chart)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _draw_chart(axes: Any, chart: Chart) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    areas = [shape for shape in chart.shapes if not shape.is_line]
    axes.add_collection(
        PolyCollection(
            [shape.points for shape in areas],
            facecolors=[shape.colour for shape in areas],
            edgecolors="white" if len(areas) < MOST_BORDERED else "none",
            linewidths=0.4,
        )
    )
    for shape in chart.shapes:
        if shape.is_line:
            xs, ys = zip(*shape.points, strict=True)
            axes.plot(xs, ys, color=LINE_COLOUR, linewidth=1.1, linestyle=(0, (5, 2.5)))
        elif shape.label:
            _draw_label(axes, chart, shape.points, shape.label)
    x_axis, y_axis = chart.x_axis, chart.y_axis
    axes.set_xlim(x_axis.low, x_axis.high)
    axes.set_ylim(y_axis.low, y_axis.high)
    # Names in a snapshot are not formulas.
    plain: dict[str, Any] = {"parse_math": False, "color": "#4a5260", "fontsize": 8}
    axes.set_xticks([v for v, _ in x_axis.ticks], [text for _, text in x_axis.ticks], **plain)
    axes.set_yticks([v for v, _ in y_axis.ticks], [text for _, text in y_axis.ticks], **plain)
    axes.set_xlabel(x_axis.label, **plain)
    axes.set_ylabel(y_axis.label, **plain)
    axes.set_axisbelow(True)
    axes.grid(color="#e6e9ee", linewidth=0.8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_color("#b4bac4")
    axes.set_title(chart.title, loc="left", fontsize=11, pad=34, parse_math=False)
    axes.text(0, 1.0, chart.subtitle, transform=axes.transAxes, verticalalignment="bottom", **plain)
    handles = [Patch(facecolor=colour, label=text) for text, colour in chart.legend]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=1.8,
        ncols=4,
        fontsize=8,
        frameon=False,
    )


def _draw_label(axes: Any, chart: Chart, points: Any, label: str) -> None:
    (x0, y0), (x1, y1) = find_corners(points)
    width = (x1 - x0) / (chart.x_axis.high - chart.x_axis.low)
    height = (y1 - y0) / (chart.y_axis.high - chart.y_axis.low) * find_plot_height(chart)
    if height < 14 or width < (len(label) + 2) * _LETTER_SHARE:
        return
    axes.text(
        (x0 + x1) / 2,
        (y0 + y1) / 2,
        label,
        color="white",
        fontsize=8,
        horizontalalignment="center",
        verticalalignment="center",
        parse_math=False,
    )
