"""CudaGraph: explicit nodes, edges, library calls and clean-up, on a fake driver."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pathlib

import pytest

from tests.fakes.cuda_stages import (
    ADDRESSES,
    FIVE,
    MATMUL,
    SHAPE,
    STREAM,
    FakeLibrary,
    build,
    kernel,
    locate,
    read_actions,
    use,
    word,
)
from tests.fakes.fake_driver import FakeDriver
from tests.fakes.fake_state import MisuseError
from tests.oracles import error_lines
from tracegraph.runtime.cuda.driver.calls import CopyRange, FillRange, Port
from tracegraph.runtime.cuda.driver.edge_calls import Edge
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.graph_nodes import Node
from tracegraph.runtime.definition.nodes import CallNode, CopyNode, FillNode, LaunchShape
from tracegraph.runtime.errors import CudaError, InternalError, OutOfMemoryError


def test_nodes_and_edges_are_those_of_the_stage() -> None:
    driver = FakeDriver()
    graph = build(driver, FIVE)
    nodes = list(driver.graphs[graph.handles[0]].values())
    assert [node.kind for node in nodes] == ["fill", "kernel", "kernel", "child", "copy"]
    full = Port.COMPLETE
    expected = {(0, 1, full), (1, 2, Port.LAUNCH_ORDER), (2, 3, full), (3, 4, full)}
    assert driver.read_edges(graph.handles[0]) == expected
    assert graph.node_count == driver.count_nodes(graph.handles[0]) == 5
    assert nodes[0].action == FillRange(ADDRESSES["y"], 0, 4, 32)
    assert nodes[4].action == CopyRange(ADDRESSES["w"], ADDRESSES["z"], 64)
    launch = nodes[1].action
    assert launch.parameters == (word(0x10000), word(0x20040), b"\x07\0\0\0")
    assert (launch.shape, driver.functions[launch.function]) == (SHAPE, "one")
    assert [captured.action for captured in nodes[3].action] == ["dot"]


def test_a_graph_gives_back_everything() -> None:
    driver = FakeDriver()
    graph = build(driver, FIVE)
    kinds = sorted(driver.live_handles().values())
    assert kinds == ["context", "executable", "graph", "library", "library"]
    del graph
    gc.collect()
    assert list(driver.live_handles().values()) == ["context"]
    order = [call.name for call in driver.calls[-4:]]
    assert order == ["destroy_executable", "destroy_graph", "unload_library", "unload_library"]


def count_build_calls() -> int:
    driver = FakeDriver()
    graph = build(driver, FIVE)
    count = len(driver.calls)
    del graph
    return count


@pytest.mark.parametrize("number", range(2, count_build_calls() + 1))
def test_a_failure_at_any_call_leaves_nothing(number: int) -> None:
    driver = FakeDriver(fail_at=number)
    with pytest.raises(CudaError) as caught:
        build(driver, FIVE)
    assert caught.value.what.startswith("CUDA_ERROR_UNKNOWN from ")
    del caught
    gc.collect()
    assert set(driver.live_handles().values()) == {"context"}
    driver.fail_at = None
    assert driver.get_current() in (0, *driver.live_handles())
    assert build(driver, FIVE).node_count == 5


def test_calls_of_a_build_are_counted_to_the_end() -> None:
    driver = FakeDriver(fail_at=count_build_calls() + 1)
    graph = build(driver, FIVE)
    with pytest.raises(CudaError):
        driver.get_current()
    assert graph.node_count == 5


def test_an_error_names_the_node() -> None:
    driver = FakeDriver(fail_on="add_copy_node", error="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(CudaError) as caught:
        build(driver, FIVE, name="step")
    error_lines.match(
        caught.value,
        "CUDA_ERROR_INVALID_VALUE from add_copy_node",
        "node 4 of graph `step`, memcpy out: add_copy_node(",
        "chosen by the test",
        "internal error in tracegraph",
    )


def test_out_of_memory_has_its_own_error() -> None:
    driver = FakeDriver(fail_on="instantiate", error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(OutOfMemoryError) as caught:
        build(driver, FIVE, name="step")
    error_lines.match(
        caught.value,
        "CUDA_ERROR_OUT_OF_MEMORY from instantiate",
        "graph `step` of 2 kernel, 1 memset, 1 matmul, 1 memcpy: instantiate(",
        "chosen by the test",
        "capture fewer or smaller graphs",
    )


def test_a_library_that_fails_ends_its_capture() -> None:
    driver = FakeDriver()
    library = FakeLibrary(driver, ValueError("no algorithm"))
    with pytest.raises(ValueError, match="no algorithm") as caught:
        build(driver, FIVE, library)
    del caught, library  # both hold frames of the build
    assert driver.count_calls("abort_capture") == 1
    assert driver.count_calls("end_capture") == 0
    gc.collect()
    assert set(driver.live_handles().values()) == {"context"}


def test_a_missing_library_is_named() -> None:
    driver = FakeDriver()
    loader = KernelLoader(driver, driver.retain_primary_context(0))
    with pytest.raises(InternalError, match="no library computes nodes of kind `matmul`"):
        CudaGraph(driver, FIVE, locate, loader, {}, "f")


@pytest.mark.parametrize(
    ("nodes", "edges", "programmatic", "rule"),
    [
        ((FIVE.nodes[1],) * 2, ((1, 0),), frozenset(), "from an earlier node"),
        ((FIVE.nodes[1],) * 2, ((0, 0),), frozenset(), "from an earlier node"),
        ((FIVE.nodes[1],) * 2, ((0, 2),), frozenset(), "from an earlier node"),
        ((FIVE.nodes[1],) * 2, ((-1, 1),), frozenset(), "from an earlier node"),
        ((FIVE.nodes[0], FIVE.nodes[1]), ((0, 1),), {(0, 1)}, "joins two kernels"),
        ((FIVE.nodes[1], FIVE.nodes[4]), ((0, 1),), {(0, 1)}, "joins two kernels"),
        ((FIVE.nodes[1], MATMUL), ((0, 1),), {(0, 1)}, "joins two kernels"),
        ((FIVE.nodes[1],) * 2, (), {(0, 1)}, "is one of the edges"),
    ],
)
def test_a_wrong_edge_is_refused(
    nodes: tuple[Node, ...],
    edges: tuple[tuple[int, int], ...],
    programmatic: set[tuple[int, int]],
    rule: str,
) -> None:
    driver = FakeDriver()
    stage = Stage(nodes, edges, programmatic=frozenset(programmatic))
    with pytest.raises(InternalError, match=rule) as caught:
        build(driver, stage)
    assert caught.value.what == "graph `f` has a wrong edge"
    assert set(driver.live_handles().values()) == {"context"}


@pytest.mark.parametrize("large", [None, 0, 1])
@pytest.mark.parametrize("neighbours", [1, 4])
def test_a_kernel_starts_with_the_one_before_it_where_both_have_room(
    large: int | None, neighbours: int
) -> None:
    """An H200 has 132 multiprocessors; half of the blocks that fit leave room for another half."""
    driver = FakeDriver()
    driver.most_blocks = neighbours
    nodes = [kernel("one", "x", "y"), kernel("two", "y", "z")]
    for index, node in enumerate(nodes):
        blocks = 132 * neighbours // 2 + (index == large)
        nodes[index] = dataclasses.replace(node, shape=LaunchShape((blocks, 1, 1), (512, 1, 1)))
    edge = (0, 1)
    graph = build(driver, Stage(tuple(nodes), (edge,), programmatic=frozenset({edge})))
    port = Port.LAUNCH_ORDER if large is None else Port.PROGRAMMATIC
    assert driver.read_edges(graph.handles[0]) == {(0, 1, port)}
    asked = driver.count_calls("count_resident_blocks")
    full = build(driver, Stage(tuple(nodes), (edge,)))
    assert driver.read_edges(full.handles[0]) == {(0, 1, Port.COMPLETE)}
    # What starts behind others is not asked for.
    assert driver.count_calls("count_resident_blocks") == asked == 2


def test_a_kernel_with_early_loads_says_itself_when_the_next_may_start() -> None:
    driver = FakeDriver()
    first, second = kernel("one", "x", "y"), kernel("two", "y", "z")
    early = dataclasses.replace(first, code=dataclasses.replace(first.code, early=(0,)))
    edge = (0, 1)
    for nodes in ((early, second), (second, early)):
        graph = build(driver, Stage(nodes, (edge,), programmatic=frozenset({edge})))
        assert driver.read_edges(graph.handles[0]) == {(0, 1, Port.PROGRAMMATIC)}


def make_fork(*threads: int) -> Stage:
    """A kernel that waits for others with so many threads, each of them a port of its own."""
    firsts = [
        kernel(f"k{index}", "x", "y", LaunchShape((each // 128, 1, 1), (128, 1, 1)))
        for index, each in enumerate(threads)
    ]
    edges = tuple((index, len(firsts)) for index in range(len(firsts)))
    nodes = (*firsts, kernel("last", "y", "z"))
    return Stage(nodes, edges, programmatic=frozenset(edges))


def test_a_driver_that_confuses_ports_is_refused() -> None:
    driver = FakeDriver(confuses_ports=True)
    # Where all edges of a node are alike the defect does nothing.
    build(driver, make_fork(128, 128))
    gc.collect()
    before = driver.live_handles()
    with pytest.raises(CudaError) as caught:
        build(driver, make_fork(128, 1 << 20), name="step")
    error_lines.match(
        caught.value,
        "the CUDA driver has other edges in a graph than were added to it",
        "graph `step`: added a programmatic edge of port 1 from node 1 of graph `step`, kernel k1",
        "a kernel could start before its inputs are written",
        "install another NVIDIA driver",
    )
    assert "found a programmatic edge of port 2 from node 1" in str(caught.value)
    del caught
    gc.collect()
    assert driver.live_handles() == before
    assert build(FakeDriver(), make_fork(128, 1 << 20)).node_count == 3


@pytest.mark.parametrize("fault", ["missing", "more", "full"])
def test_edges_that_differ_from_those_asked_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    read = FakeDriver.list_edges

    def list_edges(self: FakeDriver, graph: int, room: int) -> frozenset[Edge]:
        found = sorted(read(self, graph, room))
        if fault == "missing":
            return frozenset(found[1:])
        if fault == "more":
            return frozenset([*found, Edge(1, 2, 0, False)][:room])
        return frozenset(edge._replace(is_programmatic=False) for edge in found)

    monkeypatch.setattr(FakeDriver, "list_edges", list_edges)
    with pytest.raises(CudaError, match="other edges in a graph"):
        build(FakeDriver(), FIVE)


def test_no_node_changes_before_the_first_upload() -> None:
    driver = FakeDriver()
    graph = build(driver, FIVE)
    with pytest.raises(MisuseError, match="before the first upload"):
        graph.update(lambda each: locate(each) + 0x1000, ["w"])


def test_a_call_of_xla_cannot_stand_in_a_graph() -> None:
    driver = FakeDriver()
    stage = Stage((CallNode("r0", abs, ("x",), ("y",)),), ())
    with pytest.raises(InternalError, match="a node of kind `call` cannot stand in a CUDA graph"):
        build(driver, stage)


def test_ranges_of_no_bytes_become_empty_nodes_that_keep_order() -> None:
    driver = FakeDriver()
    stage = Stage(
        nodes=(
            kernel("one", "x", "y"),
            CopyNode("none", use("x", 0, 0), use("y", 0, 0)),
            FillNode("nothing", use("x", 0, 0)),
            CopyNode("itself", use("x"), use("x")),
            kernel("two", "y", "z"),
        ),
        edges=((0, 1), (1, 2), (2, 3), (3, 4)),
    )
    graph = build(driver, stage)
    kinds = [node.kind for node in driver.graphs[graph.handles[0]].values()]
    assert kinds == ["kernel", "empty", "empty", "empty", "kernel"]
    assert len(driver.read_edges(graph.handles[0])) == 4
    assert not graph.can_rebind("x")  # the copy onto itself would become a real one
    assert graph.can_rebind("y")


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (FillNode("f", use("x", 0, 8)), FillRange(0x10000, 0, 4, 2)),
        (FillNode("f", use("x", 0, 8), 0xAB), FillRange(0x10000, 0xABABABAB, 4, 2)),
        (FillNode("f", use("x", 0, 8), 0xABCD, 2), FillRange(0x10000, 0xABCDABCD, 4, 2)),
        (FillNode("f", use("x", 0, 8), 5, 4), FillRange(0x10000, 5, 4, 2)),
        (FillNode("f", use("x", 0, 7), 1), FillRange(0x10000, 1, 1, 7)),
        (FillNode("f", use("x", 2, 6), 1, 2), FillRange(0x10002, 1, 2, 3)),
        (FillNode("f", use("x", 1, 8), 1), FillRange(0x10001, 1, 1, 8)),
    ],
)
def test_fills_use_the_largest_elements(node: FillNode, expected: FillRange) -> None:
    driver = FakeDriver()
    graph = build(driver, Stage((node,), ()))
    assert read_actions(driver, graph) == [expected]


def test_an_empty_stage_is_a_graph() -> None:
    driver = FakeDriver()
    graph = build(driver, Stage((), ()))
    graph.launcher(STREAM)()
    assert graph.node_count == 0
    assert driver.executables[graph.handles[1]].launches == [STREAM]


def test_a_launcher_is_made_once_per_stream_and_keeps_the_graph() -> None:
    driver = FakeDriver()
    graph = build(driver, FIVE)
    graph.upload(STREAM)
    launch, executable = graph.launcher(STREAM), graph.handles[1]
    assert launch is graph.launcher(STREAM)
    assert launch is not graph.launcher(STREAM + 1)
    launch()
    graph.launcher(STREAM + 1)()
    assert driver.executables[executable].uploads == [STREAM]
    assert driver.executables[executable].launches == [STREAM, STREAM + 1]
    del graph
    gc.collect()
    launch()
    assert driver.executables[executable].launches[2:] == [STREAM]
    del launch
    gc.collect()
    assert executable not in driver.executables


def test_nothing_is_launched_on_a_default_stream() -> None:
    graph = build(FakeDriver(), FIVE)
    with pytest.raises(MisuseError, match="default stream"):
        graph.launcher(0)


def test_a_launch_moves_bytes_in_the_fake() -> None:
    driver = FakeDriver(moves_bytes=True)
    context = driver.retain_primary_context(0)
    driver.set_current(context)
    base = driver.allocate_memory(1024)
    offsets = {"x": 0, "y": 256, "z": 512, "w": 768}
    stage = Stage((FillNode("f", use("x", 0, 64), 3), CopyNode("c", use("x"), use("w"))), ((0, 1),))
    loader = KernelLoader(driver, context)
    graph = CudaGraph(
        driver, stage, lambda each: base + offsets[each.buffer] + each.offset, loader, {}, "f"
    )
    graph.launcher(STREAM)()
    host = driver.allocate_host(64)
    driver.copy_async(host, base + 768, 64, STREAM)
    assert driver.read_bytes(host, 64) == b"\x03" * 64
    driver.free_host(host)
    driver.free_memory(base)


def test_the_dot_file_shows_the_edges(tmp_path: pathlib.Path) -> None:
    graph = build(FakeDriver(), FIVE)
    graph.write_dot(tmp_path / "f.dot")
    assert "  1 -> 2;" in (tmp_path / "f.dot").read_text()


def test_the_context_of_the_thread_is_as_before() -> None:
    driver = FakeDriver()
    other = driver.retain_primary_context(1)
    driver.set_current(other)
    with contextlib.suppress(CudaError):
        build(driver, FIVE)
    assert driver.get_current() == other
