"""A profile with times that are given: its text, its picture, its dict, its lines."""

from __future__ import annotations

import itertools
import json
import pathlib
import xml.etree.ElementTree as ElementTree

import pytest

from tests.fakes.cuda_on_host import kernel
from tests.fakes.definitions import make_definition, make_stage
from tests.oracles.error_lines import match
from tests.paths import ROOT
from tracegraph.graph_pictures.read_graph import list_sources, read_graph
from tracegraph.profiling.critical_path import assign_lanes, schedule
from tracegraph.profiling.launch_keys import make_launch_key
from tracegraph.profiling.measure import Measured
from tracegraph.profiling.peaks import Peaks, count_operations, find_peaks
from tracegraph.profiling.profile import Profile
from tracegraph.profiling.summary import summarise_profile
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Construct, Node
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode, MatrixLayout
from tracegraph.runtime.definition.nodes import BufferUse, ConditionHandle, FillNode, KernelNode
from tracegraph.runtime.device_properties import DeviceProperties
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.node_timer import NodeTime

GOLDEN = ROOT / "tests" / "golden" / "profile_of_a_gpu_graph.txt"
PEAKS = Peaks(1e12, {"bf16": 1e15})


def make_matmul(dtype: str = "bfloat16", compute_type: str = "32F") -> MatmulNode:
    a, b = MatrixLayout(dtype, 64, 32, 64), MatrixLayout(dtype, 32, 16, 32)
    d = MatrixLayout(dtype, 64, 16, 64, batch_count=2)
    operands = tuple((role, BufferUse(role, 0, 16)) for role in "abd")
    matmul = Matmul(a, b, d, d, 1, 0, compute_type, "float32")
    return MatmulNode("dot", matmul, operands)


def make_profile() -> Profile:
    """x → left, right → join → a loop of one kernel; a kernel beside it all that was not timed."""
    setter = kernel("set", "join", "flag")
    own = KernelNode(
        "again", setter.code, setter.shape, (*setter.parameters, ConditionHandle.OWN), (False,) * 3
    )
    loop = ConditionalNode(
        "loop", Construct.WHILE, (Body((kernel("turn", "join", "y"), own), ((0, 1),)),), setter
    )
    nodes: tuple[Node, ...] = (
        kernel("left", "x", "l"),
        make_matmul(),
        kernel("join", "l d", "join"),
        loop,
        FillNode("zero", BufferUse("other", 0, 16)),
    )
    definition = make_definition(make_stage(*nodes, edges=((0, 2), (1, 2), (2, 3))))
    lines = {"left": "model.py:3 in f", "dot": "model.py:4 in f", "loop": "model.py:9 in f"}
    data = read_graph(definition, lambda node: lines.get(node.name, ""), {})
    times = {
        0: NodeTime(2.0, 4.0),
        1: NodeTime(5.0, 6.0),
        2: NodeTime(1.5, 1.5),
        3: NodeTime(0.0, None, "timed with the branch or loop behind it"),
        4: NodeTime(20.0, 24.0, "launched alone"),
        5: NodeTime(None, None, "the 60 seconds were over"),
        6: NodeTime(1.5, 1.5),
        7: NodeTime(None, None, "it sets the condition of the loop that it is in"),
    }
    sources = {index: index for index in times} | {6: 2}
    measured = Measured(times, sources, [31.0], 0.5, 0.25)
    places = [("jit(f)/layer", 0)] * len(times)
    sources_of_nodes = list_sources(definition)
    return summarise_profile(data, sources_of_nodes, places, measured, PEAKS, "cuda:0, A GPU")


PROFILE = make_profile()


def test_the_critical_path_is_the_longest_chain() -> None:
    assert PROFILE.critical_path() == (1, 2, 3, 4)
    assert (PROFILE.path_us, PROFILE.whole_us) == (26.5, 31.0)
    (graph, body) = PROFILE.parts
    assert (graph.node_us, graph.beside_us, graph.node_count) == (28.5, 2.0, 6)
    assert (body.kind, body.path, body.path_us, body.whole_us) == ("body", (6,), 1.5, None)
    assert [node.start_us for node in PROFILE.nodes] == [0, 0, 5, 6.5, 6.5, 0, 0, 1.5]


def test_no_two_nodes_of_a_lane_overlap() -> None:
    waits = {i: [i - 3] for i in range(3, 30)} | {12: [0, 11], 20: [9, 19]}
    times = {i: 1.0 + i % 4 for i in range(30)}
    found = schedule(range(30), waits, times)
    ends = {i: found.starts[i] + times[i] for i in range(30)}
    assert all(found.starts[b] >= ends[a] for b, befores in waits.items() for a in befores)
    assert found.length_us == max(ends.values()) == sum(times[i] for i in found.path)
    lanes = assign_lanes(found, times)
    assert {i for i, lane in lanes.items() if lane == 0} == set(found.path)
    for lane in set(lanes.values()):
        inside = sorted((found.starts[i], ends[i]) for i in range(30) if lanes[i] == lane)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(inside))


def test_an_empty_part_has_no_path() -> None:
    assert schedule([], {}, {}).path == ()
    assert assign_lanes(schedule([], {}, {}), {}) == {}


def test_shares_are_those_of_what_is_known() -> None:
    left, dot = PROFILE.nodes[:2]
    # 32 bytes in 4 us; 2 * 64 * 16 * 32 * 2 operations in 5 us.
    assert left.memory_share == pytest.approx(32 / 4e-6 / 1e12)
    assert (dot.operations, dot.tensor_share) == (131072, pytest.approx(131072 / 5e-6 / 1e15))
    assert left.tensor_share is None
    assert PROFILE.nodes[5].memory_share is None


@pytest.mark.parametrize(
    ("dtype", "compute_type", "expected"),
    [
        ("float32", "32F_FAST_TF32", "tf32"),
        ("float32", "32F", ""),
        ("float16", "32F", "f16"),
        ("float8_e4m3fn", "32F", "f8"),
    ],
)
def test_the_format_of_a_matmul(dtype: str, compute_type: str, expected: str) -> None:
    assert count_operations(make_matmul(dtype, compute_type)) == (131072, expected)


def test_what_a_device_does_not_say_is_not_stated() -> None:
    assert find_peaks(DeviceProperties("cpu")) == Peaks()
    assert find_peaks(DeviceProperties("NVIDIA H200")).tensor_rates["bf16"] == 989.4e12
    assert find_peaks(DeviceProperties("Some GPU")).tensor_rates == {}


def test_equal_launches_have_one_key() -> None:
    a, b = kernel("double", "x", "y"), kernel("double", "p", "q")
    assert make_launch_key(a) == make_launch_key(b)
    others = [kernel("halve", "x", "y"), make_matmul(), FillNode("z", BufferUse("y", 0, 16))]
    assert len({make_launch_key(node) for node in (a, b, *others)}) == 4


def test_the_report() -> None:
    assert str(PROFILE) + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_lines_add_up() -> None:
    lines = PROFILE.by_line()
    assert [line.where.partition(" ")[0] for line in lines] == [
        "model.py:9",
        "model.py:4",
        "",
        "model.py:3",
    ]
    assert sum(line.warm_us for line in lines) == PROFILE.parts[0].node_us
    assert sum(line.path_us for line in lines) == PROFILE.path_us
    assert sum(line.node_count for line in lines) == 6
    assert [node.index for node in PROFILE.by_node()[:3]] == [4, 1, 0]


def test_files(tmp_path: pathlib.Path) -> None:
    for name in ("a.svg", "a.html", "a.JSON"):
        PROFILE.save(tmp_path / name)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    boxes = [each for each in root.iter() if (each.get("id") or "").startswith("n")]
    assert [each.get("id") for each in boxes] == [f"n{i}" for i in range(8)]
    critical = {each.get("id") for each in boxes if any(e.get("class") == "critical" for e in each)}
    assert critical == {"n1", "n2", "n3", "n4", "n6"}
    page = (tmp_path / "a.html").read_text()
    assert "<svg" in page
    assert "critical path  4 nodes" in page
    found = json.loads((tmp_path / "a.JSON").read_text())
    assert found == PROFILE.to_dict()
    assert (found["whole_us"], found["nodes"][1]["warm_us"]) == (31.0, 5.0)
    assert {"first": 0, "second": 2, "port": "complete"} in found["edges"]


def test_a_file_of_another_kind_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError) as caught:
        PROFILE.save(tmp_path / "a.png")
    match(caught.value, "`path` is ", "argument `path` of Pr", "the end of", "pass a name")
    assert list(tmp_path.iterdir()) == []
