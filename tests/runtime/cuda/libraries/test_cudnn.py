"""cuDNN: what becomes part of a graph, what is shared, and what is left after."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
from collections import Counter

import pytest

from tests.fakes.cuda_on_host import CudaOnHost, kernel, make_cuda_replay
from tests.fakes.cudnn_calls import CONVOLUTION, ENGINES, GRAPH, make_cudnn_device, node
from tests.fakes.definitions import SIZE, make_definition, make_stage
from tests.fakes.fake_cudnn import Execution, FakeCudnn
from tracegraph.runtime.cuda.graphs.library_moves import DISTANCE_BYTES
from tracegraph.runtime.cuda.libraries import cudnn
from tracegraph.runtime.cuda.libraries.cudnn import load_cudnn
from tracegraph.runtime.cuda.libraries.cudnn_backend import Kind
from tracegraph.runtime.definition.cudnn_calls import Algorithm, W, X, Y
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Construct, Node
from tracegraph.runtime.errors import CudaError, UnsupportedError
from tracegraph.runtime.replay import Replay


@pytest.fixture
def library() -> FakeCudnn:
    return FakeCudnn(dict(ENGINES))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, library: FakeCudnn) -> CudaOnHost:
    return make_cudnn_device(monkeypatch, library)


def capture(device: CudaOnHost, *nodes: Node) -> Replay:
    edges = [(i, i + 1) for i in range(len(nodes) - 1)]
    definition = make_definition(make_stage(*nodes, edges=edges), inputs="x w")
    return make_cuda_replay(device, definition)


def test_call_becomes_a_child_graph_with_its_addresses(
    device: CudaOnHost, library: FakeCudnn
) -> None:
    replay = capture(
        device,
        kernel("double", "x", "a"),
        node("conv", "a w", "b"),
        kernel("increment", "b", "y"),
    )
    (graph,) = (each for each, kind in device.driver.live_handles().items() if kind == "graph")
    nodes = list(device.driver.graphs[graph].values())
    assert [each.kind for each in nodes] == ["kernel", "child", "kernel"]
    assert [each.action for each in nodes[1].action] == ["work of cuDNN"]
    # Once to warm up, on the stream of all other work, and twice captured: see Note [Moved
    # libraries].
    warm, captured, moved = library.executions
    assert moved.addresses == {**captured.addresses, W: captured.addresses[W] + DISTANCE_BYTES}
    assert warm.stream == device.context.order.stream != captured.stream
    addresses = {name: buffer.address for name, buffer in replay.buffers.items()}
    assert captured.addresses == {X: addresses["a"], W: addresses["w"], Y: addresses["b"]}
    assert captured.workspace == addresses["s"]
    assert dataclasses.replace(warm, stream=0) == dataclasses.replace(captured, stream=0)


def test_compiled_graph_gets_scalars_and_its_part_of_the_workspace(
    device: CudaOnHost, library: FakeCudnn
) -> None:
    scalars = []

    def act(execution: Execution) -> None:
        scalars.append(ctypes.string_at(execution.addresses[10], 4))

    library.act = act
    replay = capture(device, node("attention", "x w", "y", GRAPH))
    warm, captured, _ = library.executions
    addresses = {name: buffer.address for name, buffer in replay.buffers.items()}
    assert scalars == [b"\0\0\0\x3e"] * 3
    assert {uid: captured.addresses[uid] for uid in (1, 2, 3, 7)} == {
        1: addresses["x"],
        2: addresses["w"],
        3: addresses["y"],
        7: addresses["s"] + 32,
    }
    assert captured.workspace == addresses["s"] + 64
    assert captured.plan["EXECUTION_PLAN_JSON_REPRESENTATION"] == b"the plan"
    # What may be the length of a sequence was zero, and its memory is free again.
    assert warm.addresses[1] == warm.addresses[2] not in addresses.values()
    assert warm.addresses[3] == addresses["y"]
    assert device.allocator.statistics.all.allocated_bytes.current == 4 * 4096


def test_lengths_are_zero_while_a_graph_is_warmed(device: CudaOnHost, library: FakeCudnn) -> None:
    seen = []

    def act(execution: Execution) -> None:
        if execution.stream == device.context.order.stream:
            device.driver.finish(execution.stream)
            seen.append(ctypes.string_at(execution.addresses[1], 4 * SIZE))

    library.act = act
    capture(device, node("attention", "x w", "y", GRAPH))
    assert seen == [bytes(4 * SIZE)]


def test_calls_in_branches_are_warmed_too(device: CudaOnHost, library: FakeCudnn) -> None:
    setter = kernel("double", "x", "c")
    inner = Body((node("conv", "x w", "y"),), ())
    capture(device, ConditionalNode("if", Construct.IF, (inner,), setter))
    assert len(library.executions) == 2


def test_equal_calls_share_a_plan_and_are_warmed_once(
    device: CudaOnHost, library: FakeCudnn
) -> None:
    assert device.find_call_problem(CONVOLUTION) == ""
    replay = capture(device, node("one", "x w", "a"), node("two", "a w", "y"))
    assert len(library.list_alive(Kind.EXECUTION_PLAN)) == 1
    # Warm once; both are captured twice.
    assert len(library.executions) == 5
    del replay


def test_plans_live_as_long_as_the_graph(device: CudaOnHost, library: FakeCudnn) -> None:
    first = capture(device, node("one", "x w", "y"))
    second = capture(device, node("one", "x w", "y"))
    assert len(library.list_alive(Kind.EXECUTION_PLAN)) == 1
    del first
    gc.collect()
    assert len(library.list_alive(Kind.EXECUTION_PLAN)) == 1
    del second
    gc.collect()
    assert not library.alive


def test_plans_that_no_graph_took_do_not_pile_up(
    device: CudaOnHost, library: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "KEPT_PLANS", 2)
    for workspace_bytes in range(64, 70):
        call = dataclasses.replace(CONVOLUTION, workspace_bytes=workspace_bytes)
        assert device.find_call_problem(call) == ""
    assert len(library.list_alive(Kind.EXECUTION_PLAN)) == 2


def count_handles(device: CudaOnHost) -> Counter[str]:
    gc.collect()
    device.allocator.empty_cache()
    return Counter(device.driver.live_handles().values())


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_failure_inside_the_library_leaves_nothing_and_the_next_capture_works(
    device: CudaOnHost, library: FakeCudnn, attempt: int
) -> None:
    nodes = (kernel("double", "x", "a"), node("conv", "a w", "y"))
    capture(device, *nodes)
    before = count_handles(device)
    # Before the capture, while it warms up, and during it.
    library.fail_at = ("cudnnBackendExecute", library.calls["cudnnBackendExecute"] + attempt)
    with pytest.raises(CudaError, match="cuDNN failed at `conv`, which is forward, of") as caught:
        capture(device, *nodes)
    assert caught.value.where.startswith("node 1 of graph `f`, cudnn conv: conv: cudnnBackendExec")
    assert "CUDNN_STATUS_NOT_SUPPORTED: planted" in caught.value.where
    assert str(caught.value).endswith("python -m tracegraph error cuda")
    del caught
    assert count_handles(device) == before
    assert not device.driver._captures
    assert not library.alive
    assert device.allocator.statistics.all.allocated_bytes.current == 0
    capture(device, *nodes)


def test_a_plan_that_was_refused_cannot_be_captured(device: CudaOnHost, library: FakeCudnn) -> None:
    call = dataclasses.replace(CONVOLUTION, algorithm=Algorithm(7))
    with pytest.raises(
        CudaError, match="cuDNN has no plan for `conv`, which is forward, of"
    ) as caught:
        capture(device, node("conv", "x w", "y", call))
    assert "no such engine" in caught.value.where
    assert not library.alive


def test_a_library_that_cannot_be_initialized_is_an_error(
    device: CudaOnHost, library: FakeCudnn
) -> None:
    library.fail_at = ("cudnnCreate", 1)
    with pytest.raises(CudaError, match="cuDNN could not be initialized"):
        device.find_call_problem(CONVOLUTION)
    assert device.find_call_problem(CONVOLUTION) == ""
    assert len(library.handles) == 1


@pytest.mark.parametrize("is_loaded", [False, True])
def test_only_a_library_that_is_loaded_is_opened_ahead(
    device: CudaOnHost, library: FakeCudnn, is_loaded: bool
) -> None:
    device._cudnn._is_loaded = lambda: is_loaded
    device.preload_convolutions()
    assert len(library.handles) == is_loaded
    device.find_call_problem(CONVOLUTION)
    device.preload_convolutions()
    assert len(library.handles) == 1


def test_what_fails_ahead_fails_where_it_is_needed(device: CudaOnHost, library: FakeCudnn) -> None:
    device._cudnn._is_loaded = lambda: True
    library.fail_at = ("cudnnCreate", 1)
    device.preload_convolutions()
    assert library.calls["cudnnCreate"] == 1
    assert not library.handles
    library.fail_at = ("cudnnCreate", 2)
    with pytest.raises(CudaError, match="cuDNN could not be initialized"):
        device.find_call_problem(CONVOLUTION)


def test_a_library_is_loaded_where_its_file_is_mapped() -> None:
    assert cudnn.is_cudnn_loaded(lambda: "7f00-7f10 r-xp 0 08:01 42   /opt/libcudnn.so.9")
    assert not cudnn.is_cudnn_loaded(lambda: "7f00-7f10 r-xp 0 08:01 42   /opt/libcublas.so.13")


def test_a_missing_library_is_named_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cudnn, "FILE", "libcudnn-that-is-not-there.so.9")
    with pytest.raises(UnsupportedError, match="the library cuDNN is missing") as raised:
        load_cudnn(lambda: "")
    assert (
        raised.value.fix == "pip install nvidia-cudnn-cu13, or nvidia-cudnn-cu12 beside jax[cuda12]"
    )
    assert len(str(raised.value).splitlines()) == 4


def test_several_libraries_are_refused() -> None:
    maps = (
        "7f00-7f10 r-xp 0 08:01 42   /opt/libcudnn.so.9\n"
        "7e00-7e10 r-xp 0 08:01 43   /usr/lib/libcudnn.so.9\n"
        "7d00-7d10 r-xp 0 08:01 44   /opt/libcudnn_ops.so.9\n"
    )
    with pytest.raises(CudaError, match="2 copies of libcudnn are loaded, not one"):
        load_cudnn(lambda: maps)


def test_the_library_that_is_loaded_is_taken_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    library, paths = FakeCudnn(), []
    monkeypatch.setattr(cudnn.ctypes, "CDLL", lambda path: paths.append(path) or library)
    backend = load_cudnn(lambda: "7f00-7f10 r-xp 0 08:01 42   /opt/libcudnn.so.9")
    assert (paths, backend.read_version()) == (["/opt/libcudnn.so.9"], "9.24.1")
