"""Pictures of graphs: every node and edge is there once, no box covers another, XML is whole."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from tests.fakes.cuda_on_host import kernel
from tests.fakes.definitions import make_definition, make_stage
from tests.tracegraph.graph_pictures.graphs import make_mixed, read
from tracegraph.graph_pictures import svg
from tracegraph.graph_pictures.dot import draw_dot
from tracegraph.graph_pictures.dump import find_drawer
from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.layout import Layout, lay_out
from tracegraph.graph_pictures.svg import draw_svg
from tracegraph.runtime.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"
MIXED = read(make_mixed())


def make_random(seed: int) -> GraphData:
    """Returns the records of a random graph of kernels."""
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    pairs = [(a, b) for b in range(count) for a in range(b) if rng.random() < 2 / count]
    nodes = [kernel(f"k{index}", "x", "y") for index in range(count)]
    return read(make_definition(make_stage(*nodes, edges=pairs)))


GRAPHS = {"mixed": MIXED, **{f"random {seed}": make_random(seed) for seed in range(12)}}
CASES = pytest.mark.parametrize("data", GRAPHS.values(), ids=GRAPHS.keys())


def find_wrong_places(data: GraphData, part: int, layout: Layout) -> list[str]:
    """Returns what is wrong with a layout."""
    wrong: list[str] = []
    places = layout.places
    if sorted(places) != [node.index for node in data.list_nodes(part)]:
        wrong.append("other nodes than those of the part")
    if len(set(places.values())) != len(places):
        wrong.append("two nodes at one place")
    for index, (lane, level) in places.items():
        before = [places[each][1] for each in data.dependencies(index)]
        if level != max(before, default=-1) + 1:
            wrong.append(f"node {index} is not right below what it waits for")
        if not (0 <= lane < layout.lanes and level < layout.levels):
            wrong.append(f"node {index} is outside")
    critical = [places[index] for index in data.critical_path(part)]
    if any(lane for lane, _ in critical):
        wrong.append("the critical path is not straight")
    return wrong


@CASES
def test_layouts(data: GraphData) -> None:
    for part in data.parts:
        assert find_wrong_places(data, part.number, lay_out(data, part.number)) == []


def test_a_wrong_layout_is_noticed() -> None:
    layout = lay_out(MIXED, 0)
    places = {**layout.places, 2: layout.places[1]}
    moved = dataclasses.replace(layout, places=places)
    assert "two nodes at one place" in find_wrong_places(MIXED, 0, moved)
    moved = dataclasses.replace(layout, places={**layout.places, 0: (0, 1)})
    assert any("below" in each for each in find_wrong_places(MIXED, 0, moved))


@CASES
def test_a_picture_has_every_node_and_edge_once(data: GraphData) -> None:
    root = ElementTree.fromstring(draw_svg(data))
    groups = [each for each in root.iter(f"{SVG}g") if "id" in each.attrib]
    assert sorted(each.attrib["id"] for each in groups) == sorted(f"n{n.index}" for n in data.nodes)
    drawn = [each.attrib["data-edge"] for each in root.iter(f"{SVG}path")]
    assert sorted(drawn) == sorted(f"{edge.first} {edge.second}" for edge in data.edges)


@CASES
def test_boxes_are_inside_and_cover_nothing(data: GraphData) -> None:
    root = ElementTree.fromstring(draw_svg(data))
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    boxes: list[tuple[int, int]] = []
    for block in root.findall(f"{SVG}g"):
        left, top = map(int, re.findall(r"\d+", block.attrib["transform"]))
        for box in block.iter(f"{SVG}rect"):
            boxes.append((left + int(box.attrib["x"]), top + int(box.attrib["y"])))
    assert all(x + svg.BOX_WIDTH <= width and y + svg.BOX_HEIGHT <= height for x, y in boxes)
    for index, (x, y) in enumerate(boxes):
        for other_x, other_y in boxes[:index]:
            assert abs(x - other_x) >= svg.BOX_WIDTH or abs(y - other_y) >= svg.BOX_HEIGHT


def test_the_critical_path_and_early_edges_are_marked() -> None:
    root = ElementTree.fromstring(draw_svg(MIXED))
    red = [
        g.attrib["id"]
        for g in root.iter(f"{SVG}g")
        if g.find(f"{SVG}rect[@class='critical']") is not None
    ]
    paths = [MIXED.critical_path(part.number) for part in MIXED.parts]
    assert red == [f"n{index}" for path in paths for index in sorted(path)]
    edges = {each.attrib["data-edge"]: each.attrib["class"] for each in root.iter(f"{SVG}path")}
    assert [edge for edge, classes in edges.items() if "early" in classes.split()] == ["0 1"]
    steps = {f"{a} {b}" for path in paths for a, b in itertools.pairwise(path)}
    assert {edge for edge, classes in edges.items() if "critical" in classes.split()} == steps


def test_a_tooltip_tells_all_of_a_node() -> None:
    root = ElementTree.fromstring(draw_svg(MIXED))
    (title,) = [g.findtext(f"{SVG}title") for g in root.iter(f"{SVG}g") if g.get("id") == "n1"]
    assert title == (
        "1: kernel left<&>, 1 blocks of 32 threads, 32 bytes\nline of left<&>\n"
        "reads a[0:16]\nwrites flag[0:16]"
    )


def test_a_picture_needs_nothing_else() -> None:
    text = draw_svg(MIXED)
    assert "script" not in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


def test_control_characters_are_no_xml() -> None:
    node = dataclasses.replace(MIXED.nodes[0], name="a\x00\x1b\nb")
    data = dataclasses.replace(MIXED, nodes=(node, *MIXED.nodes[1:]))
    assert "0: a??" in "".join(ElementTree.fromstring(draw_svg(data)).itertext())


@CASES
def test_dot_text_has_every_node_and_edge_once(data: GraphData) -> None:
    text = draw_dot(data)
    pattern = r"^ +n(\d+) \[label=\"(?:[^\"\\]|\\.)*\"(?:, color=red)?\];$"
    nodes = re.findall(pattern, text, re.M)
    assert sorted(map(int, nodes)) == [node.index for node in data.nodes]
    edges = re.findall(
        r"^ +n(\d+) -> n(\d+) \[style=(solid|dashed)(?:, color=red)?\];$", text, re.M
    )
    styles = {"complete": "solid", "programmatic": "dashed"}
    assert sorted((int(a), int(b), style) for a, b, style in edges) == sorted(
        (edge.first, edge.second, styles[edge.port]) for edge in data.edges
    )
    assert text.count("{") == text.count("}") == 1 + len(data.parts)


def test_the_name_of_a_file_says_what_is_drawn() -> None:
    assert find_drawer("a.svg") is find_drawer("b/A.SVG") is draw_svg
    assert find_drawer("a.dot") is draw_dot
    paths: tuple[Any, ...] = ("a", "a.png", "svg", "", None, 3)
    for path in paths:
        with pytest.raises(ConfigError) as raised:
            find_drawer(path)
        assert raised.value.what == f"`path` is {path!r}"
        assert ".svg" in raised.value.fix
