"""A profile as one SVG: time from left to right, a lane for what may run beside other nodes."""

from __future__ import annotations

from collections.abc import Iterator

from tracegraph.graph_pictures.svg import escape
from tracegraph.profiling.critical_path import Schedule, assign_lanes
from tracegraph.profiling.graph_times import GraphTimes
from tracegraph.profiling.profile_text import write_text
from tracegraph.profiling.records import NodeProfile, PartProfile

MARGIN, WIDTH, LANE_HEIGHT, BOX_HEIGHT = 20, 1560, 22, 18
TITLE_HEIGHT, AXIS_HEIGHT = 26, 20
TICKS = 10
# Narrower boxes have no text, and no box is narrower than one that can be seen.
TEXT_WIDTH, LEAST_WIDTH, CHARACTER_WIDTH = 40.0, 0.5, 6.2
STYLE = """
text { font: 11px sans-serif; fill: #111; }
.title { font-size: 14px; font-weight: bold; }
.small { font-size: 10px; fill: #444; }
rect { stroke: #6b7280; stroke-width: 0.4; fill: #dbeafe; }
rect.critical { fill: #fecaca; stroke: #dc2626; stroke-width: 1; }
rect.paper { fill: #fff; stroke: none; }
line { stroke: #d1d5db; }
line.end { stroke: #111; stroke-dasharray: 4 3; }
"""


def draw_picture(profile: GraphTimes) -> str:
    """Returns a profile as the text of an SVG file.

    Each part is a block of its own. A node starts when those that it waits for have ended, as if
    there were room for all. The dashed line is what the part takes as a whole. A tooltip has what
    is known of a node.

    Args:
        profile: what was measured.
    """
    blocks: list[str] = []
    top = MARGIN + TITLE_HEIGHT + 14
    for part in profile.parts:
        nodes = [node for node in profile.nodes if node.part == part.number]
        drawn, height = _draw_part(part, nodes)
        blocks += [f'<g transform="translate({MARGIN} {top})">', *drawn, "</g>"]
        top += height
    width = WIDTH + 2 * MARGIN
    heading = f"{profile.name} on {profile.device}: {profile.whole_us:.1f} us"
    key = "red: the critical path by warm times; dashed: what the whole part takes"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
            f'viewBox="0 0 {width} {top}">',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{width}" height="{top}"/>',
            f'<text class="title" x="{MARGIN}" y="{MARGIN + 8}">{escape(heading)}</text>',
            f'<text class="small" x="{MARGIN}" y="{MARGIN + 24}">{key}</text>',
            *blocks,
            "</svg>",
            "",
        ]
    )


def draw_html(profile: GraphTimes) -> str:
    """Returns the picture and the report as one HTML page.

    Args:
        profile: what was measured.
    """
    return (
        '<!DOCTYPE html>\n<html><head><meta charset="utf-8">'
        f"<title>{escape(profile.name)}</title></head>\n<body>\n"
        f"<pre>{escape(write_text(profile))}</pre>\n{draw_picture(profile)}</body></html>\n"
    )


def _draw_part(part: PartProfile, nodes: list[NodeProfile]) -> tuple[list[str], int]:
    times = {node.index: node.warm_us or 0.0 for node in nodes}
    found = Schedule({node.index: node.start_us for node in nodes}, part.path, part.path_us)
    lanes = assign_lanes(found, times)
    rows = max(lanes.values(), default=0) + 1
    end_us = max(part.path_us, part.whole_us or 0.0) or 1.0
    scale = WIDTH / end_us
    bottom = TITLE_HEIGHT + rows * LANE_HEIGHT
    drawn = [f'<text class="title" y="14">{escape(part.title)}</text>']
    drawn += _draw_axis(end_us, bottom)
    if part.whole_us is not None:
        x = part.whole_us * scale
        drawn.append(
            f'<line class="end" x1="{x:.1f}" x2="{x:.1f}" y1="{TITLE_HEIGHT}" y2="{bottom}"/>'
        )
    for node in nodes:
        drawn += _draw_node(node, lanes[node.index], scale)
    return drawn, bottom + AXIS_HEIGHT + TITLE_HEIGHT


def _draw_axis(end_us: float, bottom: int) -> Iterator[str]:
    for tick in range(TICKS + 1):
        x = WIDTH * tick / TICKS
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TITLE_HEIGHT}" y2="{bottom}"/>'
        anchor = "end" if tick == TICKS else "start"
        text = f"{end_us * tick / TICKS:.4g} us"
        place = f'x="{x:.1f}" y="{bottom + 12}" text-anchor="{anchor}"'
        yield f'<text class="small" {place}>{text}</text>'


def _draw_node(node: NodeProfile, lane: int, scale: float) -> Iterator[str]:
    x, y = node.start_us * scale, TITLE_HEIGHT + lane * LANE_HEIGHT
    width = max((node.warm_us or 0.0) * scale, LEAST_WIDTH)
    critical = ' class="critical"' if node.is_critical else ""
    yield f'<g id="n{node.index}"><title>{escape(str(node))}</title>'
    yield (f'<rect{critical} x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BOX_HEIGHT}"/>')
    if width >= TEXT_WIDTH:
        name = node.name[: int((width - 6) / CHARACTER_WIDTH)]
        yield f'<text x="{x + 3:.2f}" y="{y + 13}">{escape(name)}</text>'
    yield "</g>"
