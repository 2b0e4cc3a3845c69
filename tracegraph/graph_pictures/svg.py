"""`GraphData` → one SVG file that needs nothing else: a row per level, the critical path marked."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator

from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.layout import Layout, lay_out
from tracegraph.graph_pictures.records import EdgeData, NodeData, PartData

BOX_WIDTH, BOX_HEIGHT = 190, 36
LANE_WIDTH, LEVEL_HEIGHT = 214, 66
# Of the bend of an edge that passes a box: three quarters of it are beside the box.
AROUND = 144
MARGIN, TITLE_HEIGHT = 20, 34
NAME_COLUMNS = 28
# By what a node does; other kinds are calls of libraries.
COLORS = {
    "kernel": "#dbeafe",
    "memcpy": "#fef3c7",
    "memset": "#f3f4f6",
    "call": "#dcfce7",
    "if": "#fae8ff",
    "while": "#fae8ff",
    "switch": "#fae8ff",
}
LIBRARY_COLOR = "#ffedd5"
STYLE = """
text { font: 12px sans-serif; fill: #111; }
.title { font-size: 14px; font-weight: bold; }
.small { font-size: 10px; fill: #444; }
rect { stroke: #6b7280; }
path { fill: none; stroke: #9ca3af; stroke-width: 1.2; }
.early { stroke-dasharray: 4 3; }
rect.critical { stroke: #dc2626; stroke-width: 2.5; }
path.critical { stroke: #dc2626; stroke-width: 2.5; }
"""


def draw_svg(data: GraphData) -> str:
    """Returns a graph as the text of an SVG file.

    Each graph, eager part and body is a block of its own. What waits for nothing is in its first
    row. A tooltip has a node's kernel, bytes, buffers and line.

    Args:
        data: the graph.
    """
    blocks: list[str] = []
    top, width = MARGIN + TITLE_HEIGHT + 16, 3 * LANE_WIDTH
    for part in data.parts:
        layout = lay_out(data, part.number)
        blocks += [f'<g transform="translate({MARGIN} {top})">']
        blocks += [*_draw_part(data, part, layout), "</g>"]
        top += TITLE_HEIGHT + max(layout.levels, 1) * LEVEL_HEIGHT
        width = max(width, layout.lanes * LANE_WIDTH)
    width += 2 * MARGIN
    heading = f"{data.name}: {len(data.nodes)} nodes, {len(data.edges)} edges"
    key = "red: the critical path, by bytes; dashed: the second kernel may start early"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
            f'viewBox="0 0 {width} {top}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{top}" style="fill:#fff;stroke:none"/>',
            f'<text class="title" x="{MARGIN}" y="{MARGIN + 8}">{escape(heading)}</text>',
            f'<text class="small" x="{MARGIN}" y="{MARGIN + 24}">{key}</text>',
            *blocks,
            "</svg>",
            "",
        ]
    )


def _draw_part(data: GraphData, part: PartData, layout: Layout) -> Iterator[str]:
    yield f'<text class="title" y="14">{escape(data.describe_part(part))}</text>'
    nodes = data.list_nodes(part.number)
    if not nodes:
        yield f'<text class="small" y="{TITLE_HEIGHT}">no nodes</text>'
    path = data.critical_path(part.number)
    steps = {*itertools.pairwise(path)}
    # Edges first, so that boxes are over them.
    for node in nodes:
        for edge in data.edges_into(node.index):
            yield _draw_edge(edge, layout, is_critical=(edge.first, edge.second) in steps)
    for node in nodes:
        yield from _draw_node(node, layout, is_critical=node.index in path)


def _draw_edge(edge: EdgeData, layout: Layout, *, is_critical: bool) -> str:
    (x1, y1), (x2, y2) = (_find_corner(layout, index) for index in (edge.first, edge.second))
    x1, x2, y1 = x1 + BOX_WIDTH // 2, x2 + BOX_WIDTH // 2, y1 + BOX_HEIGHT
    bend = (y2 - y1) // 2
    # One that passes other levels in the same lane goes around their boxes.
    side = AROUND if x1 == x2 and y2 - y1 > LEVEL_HEIGHT else 0
    classes = ["early"] * (edge.port == "programmatic") + ["critical"] * is_critical
    return (
        f'<path class="{" ".join(classes)}" data-edge="{edge.first} {edge.second}" '
        f'd="M{x1} {y1}C{x1 + side} {y1 + bend} {x2 + side} {y2 - bend} {x2} {y2}"/>'
    )


def _draw_node(node: NodeData, layout: Layout, *, is_critical: bool) -> Iterator[str]:
    x, y = _find_corner(layout, node.index)
    classes = "critical" if is_critical else ""
    color = COLORS.get(node.kind, LIBRARY_COLOR)
    yield f'<g id="n{node.index}"><title>{escape(_describe(node))}</title>'
    yield (
        f'<rect class="{classes}" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
        f'rx="5" fill="{color}"/>'
    )
    name = node.name if len(node.name) <= NAME_COLUMNS else f"{node.name[: NAME_COLUMNS - 1]}…"
    detail = f"{node.kind}, {node.nbytes:,} bytes"
    yield f'<text x="{x + 8}" y="{y + 15}">{node.index}: {escape(name)}</text>'
    yield f'<text class="small" x="{x + 8}" y="{y + 29}">{escape(detail)}</text></g>'


def _find_corner(layout: Layout, index: int) -> tuple[int, int]:
    lane, level = layout.places[index]
    return lane * LANE_WIDTH, TITLE_HEIGHT + level * LEVEL_HEIGHT


def _describe(node: NodeData) -> str:
    lines = [str(node), node.where]
    for verb, uses in (("reads", node.reads), ("writes", node.writes)):
        lines += [f"{verb} {use.buffer}[{use.offset}:{use.offset + use.nbytes}]" for use in uses]
    return "\n".join(line for line in lines if line)


def escape(text: str) -> str:
    """Returns a text for XML, which has no control characters, not even as numbers."""
    return html.escape("".join(c if c.isprintable() or c == "\n" else "?" for c in text))
