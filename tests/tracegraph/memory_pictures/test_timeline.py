"""Pictures of snapshots: the blocks that they draw, the page around them, the image."""

import html.parser
import itertools
import json
import re
import sys
from xml.etree import ElementTree

import pytest

from tests.oracles import error_lines
from tests.runtime.memory.snapshots.test_snapshot import PLAN, make_recorded
from tracegraph.memory_pictures.blocks import BlockHistory, LiveBlock, find_blocks, stack_blocks
from tracegraph.memory_pictures.chart import format_bytes, list_ticks, make_bytes_axis
from tracegraph.memory_pictures.timeline import (
    describe_snapshot,
    draw_memory,
    write_page,
    write_png,
)
from tracegraph.memory_pictures.views import MOST_BLOCKS, draw_plan, draw_segments, draw_timeline
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.snapshots.snapshot import build_snapshot, describe_plan

MIB = 1 << 20


@pytest.fixture(scope="module")
def snapshot():
    return build_snapshot([make_recorded()], AllocatorConfig(), plans=[PLAN])


def note(action, address, nbytes, time_us=0, **more):
    entry = {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": time_us}
    return entry | more


def make_segment(*sizes, address=0, **more):
    """A segment of blocks in use, as (bytes, state) or bytes."""
    blocks = [
        {"size": size, "state": "active_allocated"}
        if isinstance(size, int)
        else {"size": size[0], "state": size[1]}
        for size in sizes
    ]
    total = sum(block["size"] for block in blocks)
    head = {"device": 0, "address": address, "total_size": total, "stream": 0}
    return {**head, "blocks": blocks, **more}


def list_lives(history):
    return [(block.record["addr"], block.first, block.last) for block in history.blocks]


def test_which_blocks_lived_when():
    trace = [
        note("alloc", 0, 10),
        note("free_requested", 0, 10),
        note("free_completed", 0, 10),
        note("oom", 0, 99),
        note("alloc", 0, 20),
        note("free_completed", 100, 30),
    ]
    segments = [make_segment(20, 80, (30, "inactive"))]
    history = find_blocks(trace, segments)
    assert history.step_count == 4
    # The one at 100 was there before the trace, the one at 20 before and after it.
    assert list_lives(history) == [(100, 0, 4), (20, 0, 5), (0, 1, 2), (0, 3, 5)]


@pytest.mark.parametrize(
    ("trace", "lives"),
    [
        ([], []),
        ([note("free_completed", 0, 10)], [(0, 0, 1)]),
        # Its end was left out of the trace: another block has its address.
        ([note("alloc", 0, 10), note("alloc", 0, 20)], [(0, 1, 2), (0, 2, 3)]),
        # Completions were left out of the whole trace.
        ([note("alloc", 0, 10), note("free_requested", 0, 10)], [(0, 1, 2)]),
    ],
)
def test_traces_with_gaps(trace, lives):
    assert list_lives(find_blocks(trace, [])) == lives


def test_reserved_bytes_follow_from_the_end():
    trace = [
        note("segment_alloc", 0, 100),
        note("alloc", 0, 10),
        note("segment_free", 500, 30),
        note("segment_map", 900, 7),
        note("segment_unmap", 907, 2),
    ]
    history = find_blocks(trace, [make_segment((200, "inactive"))])
    assert history.reserved == ((0, 125), (1, 225), (3, 195), (4, 202), (5, 200))


def test_one_pool_alone():
    trace = [note("alloc", 0, 10, pool_id=(1, 0)), note("alloc", 50, 20, pool_id=(2, 0))]
    segments = [
        make_segment(10, 5, segment_pool_id=(1, 0)),
        make_segment(20, address=50, segment_pool_id=(2, 0)),
    ]
    assert list_lives(find_blocks(trace, segments, (1, 0))) == [(10, 0, 2), (0, 1, 2)]
    assert list_lives(find_blocks(trace, segments, (2, 0))) == [(50, 1, 2)]


def read_level(level, step):
    return [nbytes for at, nbytes in level if at <= step][-1]


def check_stack(history, stack):
    """At every step the bands lie on each other without gap or overlap, from 0 upwards."""
    for step in range(history.step_count + 1):
        live = [band for band in stack.bands if band.block.first <= step < band.block.last]
        spans = sorted((read_level(b.offsets, step), b.block.nbytes) for b in live)
        top = 0
        for offset, nbytes in spans:
            assert offset == top
            top += nbytes
        assert top == read_level(stack.drawn, step)
        everything = [b for b in history.blocks if b.first <= step < b.last]
        assert read_level(stack.total, step) == sum(block.nbytes for block in everything)


@pytest.mark.parametrize("seed", range(3))
def test_bands_are_stacked_without_gaps(seed):
    snapshot = build_snapshot([make_recorded(seed)], AllocatorConfig())
    segments = snapshot["segments"]
    history = find_blocks(snapshot["device_traces"][0], segments)
    stack = stack_blocks(history, MOST_BLOCKS, 10**6)
    assert len(stack.bands) == len(history.blocks) > 50
    check_stack(history, stack)
    requested = sum(segment["requested_size"] for segment in segments)
    assert read_level(stack.total, history.step_count) == requested
    assert history.reserved[-1][1] == sum(segment["total_size"] for segment in segments)


def test_the_largest_blocks_are_drawn_the_others_summed():
    snapshot = build_snapshot([make_recorded(4)], AllocatorConfig())
    history = find_blocks(snapshot["device_traces"][0], snapshot["segments"])
    few = stack_blocks(history, 10, 10**6)
    check_stack(history, few)
    assert len(few.bands) == 10
    largest = sorted((block.nbytes for block in history.blocks), reverse=True)[:10]
    assert sorted((band.block.nbytes for band in few.bands), reverse=True) == largest
    bounded = stack_blocks(history, MOST_BLOCKS, 60)
    check_stack(history, bounded)
    assert 0 < len(bounded.bands) < len(history.blocks)
    assert sum(len(band.offsets) - 1 for band in bounded.bands) <= 60


def test_the_checker_of_these_tests_finds_a_gap():
    block = LiveBlock(note("alloc", 0, 10), 1, 3)
    other = LiveBlock(note("alloc", 10, 10), 2, 3)
    history = BlockHistory((note("alloc", 0, 10), note("alloc", 10, 10)), (block, other), ())
    stack = stack_blocks(history, 2, 100)
    check_stack(history, stack)
    stack.bands[1].offsets[0] = (2, 11)
    with pytest.raises(AssertionError):
        check_stack(history, stack)


def make_many(count):
    """A trace of pairs, one of four blocks alive at a time."""
    trace = []
    for i in range(count // 2):
        trace.append(note("alloc", i % 4, 1000 + i, i))
        if i >= 3:
            trace.append(note("free_completed", (i - 3) % 4, 1000 + i - 3, i))
    return {"segments": [], "device_traces": [trace[:count]]}


def test_many_events_make_a_page_of_bounded_size():
    many = make_many(40_000)
    page = draw_memory(many)
    assert len(page) < 6e6
    chart = draw_timeline("t", many["device_traces"][0], [])
    assert "the 15,000 largest blocks are drawn, the others summed" in chart.subtitle
    assert ("smaller blocks, summed", "#c9ccd1") in chart.legend


def test_time_axis():
    trace = [note("alloc", 0, 10, 1000), note("free_completed", 0, 10, 3000)]
    chart = draw_timeline("t", trace, [], has_time_axis=True)
    assert chart.x_axis.label == "time (ms)"
    assert chart.x_axis.high == pytest.approx(2.08)
    band = chart.shapes[0]
    assert [x for x, _ in band.points] == pytest.approx([0.04, 2.04, 2.04, 0.04])
    assert [y for _, y in band.points] == [0, 0, 10, 10]


def test_a_block_says_what_it_is():
    frames = [{"filename": "train.py", "line": 7, "name": "step"}]
    trace = [note("alloc", 4096, 2 * MIB, pool_id=(3, 0), frames=frames)]
    chart = draw_timeline("t", trace, [])
    expected = "2 MiB (2,097,152 bytes) at 0x1000, stream 0, pool (3, 0), from event 1"
    assert chart.shapes[0].note == expected
    assert chart.shapes[0].stack == ("train.py:7 in step",)


def test_segments_show_states_and_rounding():
    blocks = [
        {"size": 512, "requested_size": 100, "state": "active_allocated"},
        {"size": 256, "requested_size": 256, "state": "active_pending_free"},
        {"size": 256, "requested_size": 0, "state": "inactive"},
    ]
    segment = make_segment() | {"total_size": 1024, "blocks": blocks, "stream": 3}
    chart = draw_segments("s", [segment])
    notes = {shape.note: (shape.points[0][0], shape.points[1][0]) for shape in chart.shapes}
    assert notes == {
        "lost to rounding: 412 bytes; 512 B (512 bytes) at 0x0, active allocated, "
        "requested 100 bytes": (100 / 1024, 0.5),
        "512 B (512 bytes) at 0x0, active allocated, requested 100 bytes": (0, 100 / 1024),
        "256 B (256 bytes) at 0x200, active pending free, requested 256 bytes": (0.5, 0.75),
        "256 B (256 bytes) at 0x300, inactive": (0.75, 1.0),
    }
    assert chart.y_axis.ticks == ((0.5, "1 KiB, default pool, stream 3"),)
    assert chart.subtitle.startswith("1 segments, reserved 1 KiB, in use 768 B")


def test_the_largest_segments_are_drawn():
    segments = [make_segment(512 + i, address=i << 20) for i in range(100)]
    chart = draw_segments("s", segments)
    assert "the 48 largest segments are drawn" in chart.subtitle
    assert len(chart.shapes) == len(chart.y_axis.ticks) == 48


def test_a_plan_has_a_rectangle_for_each_buffer():
    chart = draw_plan(PLAN)
    assert [shape.points for shape in chart.shapes] == [
        ((0, 0), (4, 0), (4, 512), (0, 512)),
        ((2, 512), (4, 512), (4, 516), (2, 516)),
    ]
    assert [shape.label for shape in chart.shapes] == ["w", "loss"]
    expected = "2 buffers, 4 steps; arena 1 KiB, buffers side by side 516 B, at 0x1000"
    assert chart.subtitle == expected
    assert draw_plan(describe_plan("empty", 0, 0, [])).shapes == ()


class Page(html.parser.HTMLParser):
    """The tags of a page, and the texts of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.notes = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attributes = dict(attrs)
        for name in ("src", "href", "srcset", "data", "action"):
            assert name not in attributes, f"<{tag}> loads {attributes[name]}"
        if "data-n" in attributes:
            self.notes.append(int(attributes["data-n"] or -1))

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)


def test_the_page_needs_nothing_else(snapshot):
    page = draw_memory(snapshot, title="Everything")
    parsed = Page(page)
    assert not re.search(r"https?:|url\(|@import|fetch|XMLHttp|import\(", page)
    assert "default-src 'none'" in page
    data = json.loads(parsed.scripts[0])
    assert sorted(parsed.notes) == list(range(len(data["notes"])))
    assert all(0 <= stack < len(data["stacks"]) for _, stack in data["notes"])
    # All pools, the default pool, pool (7, 0); segments; one plan.
    assert parsed.tags.count("svg") == 5
    assert parsed.tags.count("option") == 3
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_names_cannot_leave_their_place():
    evil = "</script><script>alert(1)</script>\"'<b>&$x_1$"
    frames = [{"filename": evil, "line": 1, "name": evil}]
    snapshot = {
        "segments": [],
        "device_traces": [[note("alloc", 0, 10, frames=frames)]],
        "tracegraph_plans": [describe_plan(evil, 0, 600_000, [(evil, 0, 600_000, 0, 50)])],
    }
    page = draw_memory(snapshot, title=evil)
    parsed = Page(page)
    assert parsed.tags.count("script") == 2
    assert parsed.tags.count("b") == parsed.tags.count("figure") == 3
    assert json.loads(parsed.scripts[0])["stacks"][0] == [f"{evil}:1 in {evil}"]


def read_png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_the_image(tmp_path, snapshot):
    pytest.importorskip("matplotlib")
    evil = snapshot | {"tracegraph_plans": [PLAN | {"name": "a $broken formula"}]}
    write_png(tmp_path / "memory.png", evil)
    width, height = read_png_size(tmp_path / "memory.png")
    assert width == 1180
    assert height > 1000


def test_an_image_without_matplotlib_is_refused(tmp_path, snapshot, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError) as caught:
        write_png(tmp_path / "memory.png", snapshot)
    error_lines.match(
        caught.value,
        f"cannot draw {tmp_path}/memory.png: ",
        "memory timeline, PNG",
        "PNG images are drawn by matplotlib",
        'pip install "tracegraph-jax[plots]"',
    )
    assert not (tmp_path / "memory.png").exists()


@pytest.mark.parametrize("has_time_axis", [False, True])
@pytest.mark.parametrize(
    "empty",
    [
        {"segments": [], "device_traces": []},
        {"segments": [], "device_traces": [[], []], "tracegraph_plans": []},
        {"segments": [make_segment()], "device_traces": [[]]},
        {"segments": [], "device_traces": [[note("alloc", 0, 0)]]},
        {"segments": [make_segment(512)], "device_traces": [[]]},
    ],
)
def test_nearly_nothing_is_drawn_too(tmp_path, empty, has_time_axis):
    pytest.importorskip("matplotlib")
    write_page(tmp_path / "a.html", empty, has_time_axis=has_time_axis)
    write_png(tmp_path / "a.png", empty, has_time_axis=has_time_axis)
    assert "<h1>Memory: a</h1>" in (tmp_path / "a.html").read_text()


def test_old_traces_of_pytorch_are_drawn():
    """Without pools, times and frames."""
    entry = {"action": "alloc", "addr": 0, "size": 512, "stream": 0}
    old = {"segments": [make_segment(512)], "device_traces": [[entry]]}
    assert draw_memory(old).count("<svg") == 2
    assert draw_memory(old, has_time_axis=True).count("<svg") == 2
    assert describe_snapshot(old).startswith("1 device, 1 segments with 512 B, in use 512 B")


@pytest.mark.parametrize("high", [0.001, 0.6, 1, 2, 7, 10, 99, 1000, 12_345, 10**9])
def test_ticks_are_round_and_few(high):
    values = [value for value, _ in list_ticks(high)]
    assert values[0] == 0
    assert high * 0.7 <= values[-1] <= high * (1 + 1e-9)
    assert 3 <= len(values) <= 12
    steps = {round(b - a, 9) for a, b in itertools.pairwise(values)}
    assert len(steps) == 1
    assert f"{steps.pop():e}"[0] in "125"


def test_bytes_axis_has_one_unit():
    axis = make_bytes_axis("offset", 3 * 1024 * MIB)
    assert axis.label == "offset (GiB)"
    assert axis.ticks[-1] == (3 * 1024**3, "3.0")
    assert make_bytes_axis("offset", 0).ticks[0] == (0, "0.0")


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (84 * MIB, "84 MiB")]
)
def test_sizes_are_written_shortly(nbytes, text):
    assert format_bytes(nbytes) == text
