"""Calls of handlers in graphs: tried out, warmed, captured one after another, and cleaned up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.cuda_on_host import CudaOnHost, floats, kernel, make_cuda_replay, make_device
from tests.fakes.definitions import SIZE, make_definition, make_stage
from tests.fakes.ffi_handlers import (
    aligning,
    enqueuing,
    make_capsule,
    read_number,
    take_report,
)
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Construct, Node
from tracegraph.runtime.definition.library_nodes import FfiCallNode
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import CudaError, OutOfMemoryError
from tracegraph.runtime.ffi import recorder
from tracegraph.runtime.ffi.c_api import DataType, ErrorCode, ExecutionStage
from tracegraph.runtime.ffi.call import ArrayType, FfiCall
from tracegraph.runtime.ffi.context import CallContext, InterfaceError, count_living
from tracegraph.runtime.ffi.frames import Frame
from tracegraph.runtime.ffi.handler import Handler
from tracegraph.runtime.node_timer import TimedGraph

FLOATS = ArrayType(DataType.F32, (SIZE,))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaOnHost]:
    """A device, with the handlers of the library registered for it under their own names."""
    names = ("enqueue", "fail_execute", "newer_execute", "record_execute")
    for name in names:
        monkeypatch.setitem(recorder.recorded_targets, ("CUDA", name), (make_capsule(name), 1))
    stateful = {
        "instantiate": make_capsule("record_instantiate"),
        "execute": make_capsule("record_with_state"),
    }
    monkeypatch.setitem(recorder.recorded_targets, ("CUDA", "stateful"), (stateful, 1))
    monkeypatch.setitem(
        recorder.recorded_types,
        ("CUDA", "state"),
        {"type_id": make_capsule("state_type"), "type_info": make_capsule("state_info")},
    )
    before = count_living()
    yield make_device(monkeypatch)
    assert count_living() == before


@pytest.fixture
def enqueued(device: CudaOnHost) -> Iterator[list[tuple[int, int]]]:
    """Stream and operand of each call; while a stream is captured the work is captured."""
    seen: list[tuple[int, int]] = []

    def act(stream: int, address: int) -> None:
        seen.append((stream, address))
        if stream in device.driver._captures:
            device.driver.add_captured(stream, "work of the handler")

    with enqueuing(act):
        yield seen


def node(name: str, reads: str, writes: str, target: str = "enqueue") -> FfiCallNode:
    operands, results = (
        tuple(BufferUse(each, 0, 4 * SIZE) for each in names.split()) for names in (reads, writes)
    )
    call = FfiCall(target, (FLOATS,) * len(operands), (FLOATS,) * len(results))
    return FfiCallNode(name, call, operands, results)


def capture(device: CudaOnHost, *nodes: Node, edges: Any = ()) -> Any:
    stage = make_stage(*nodes, edges=edges)
    replay = make_cuda_replay(device, make_definition(stage, outputs="y"))
    replay.load([(0, floats([1, 2, 3, 4]))])
    return replay


def read_graph(device: CudaOnHost) -> int:
    (graph,) = (each for each, kind in device.driver.live_handles().items() if kind == "graph")
    return graph


def count_handles(device: CudaOnHost) -> dict[str, int]:
    gc.collect()
    device.allocator.empty_cache()
    kinds = list(device.driver.live_handles().values())
    return {kind: kinds.count(kind) for kind in set(kinds)}


def test_call_is_a_child_graph_on_the_nodes_own_addresses(
    device: CudaOnHost, enqueued: list[tuple[int, int]]
) -> None:
    replay = capture(
        device,
        kernel("double", "x", "a"),
        node("solve", "a", "b"),
        kernel("increment", "b", "y"),
        edges=[(0, 1), (1, 2)],
    )
    graph = read_graph(device)
    nodes = list(device.driver.graphs[graph].values())
    assert [each.kind for each in nodes] == ["kernel", "child", "kernel"]
    assert [each.action for each in nodes[1].action] == ["work of the handler"]
    # Once on zeros, to warm up, and once captured, on one stream.
    (warm_stream, _), (stream, address) = enqueued
    assert warm_stream == stream
    assert address == replay.buffers["a"].address
    replay.launch()


def test_a_profile_enqueues_a_call_only_where_it_is_launched_alone(
    device: CudaOnHost, enqueued: list[tuple[int, int]]
) -> None:
    call = node("solve", "x", "y")
    replay = capture(device, call)
    graph = TimedGraph(
        replay.definition, replay.arena, replay.buffers, replay.stages, replay.clock, 64
    )
    with device.open_timer(graph) as timer:
        # It was called on zeros, as for any graph.
        before = len(enqueued)
        timer.start()
        time = timer.time(call, call.ranges[1:], is_captured=True)
        # In a graph of its own, however often that is launched.
        assert len(enqueued) - before == 1
        assert time.note.startswith("launched alone")
        timer.run(call)
        timer.time(kernel("double", "x", "y"), (), is_captured=True)
        # The call that was timed and the one after it, one after the other.
        assert len(enqueued) - before == 3
    assert all(address == replay.buffers["x"].address for _, address in enqueued[before:])


def test_calls_of_one_graph_follow_one_another_and_share_scratch(
    device: CudaOnHost, enqueued: list[tuple[int, int]]
) -> None:
    nodes = (node("one", "x", "a"), node("two", "x", "b"), kernel("double", "x", "y"))
    replay = capture(device, *nodes)
    edges = device.driver.read_edges(read_graph(device))
    assert {(first, second) for first, second, _ in edges} == {(0, 1)}
    # The second call has run before: it is the same one.
    assert len(enqueued) == 3
    assert device.allocator.pool_bytes(replay.arena._pool_id)[1] == 4 * 4096 + 512


def test_calls_in_branches_follow_those_outside(
    device: CudaOnHost, enqueued: list[tuple[int, int]]
) -> None:
    setter = kernel("double", "x", "c")
    branch = ConditionalNode("if", Construct.IF, (Body((node("in", "x", "b"),), ()),), setter)
    replay = capture(device, node("one", "x", "a"), branch, kernel("double", "x", "y"))
    graph = read_graph(device)
    # The kernel that sets the condition, right before the conditional node, waits for the call.
    assert (0, 1) in {(first, second) for first, second, _ in device.driver.read_edges(graph)}
    assert len(enqueued) == 3
    del replay


def test_two_graphs_have_two_streams_and_a_later_one_uses_them_again(
    device: CudaOnHost, enqueued: list[tuple[int, int]]
) -> None:
    first = capture(device, node("one", "x", "y"))
    second = capture(device, node("one", "x", "y"))
    streams = [stream for stream, _ in enqueued]
    assert len(set(streams)) == 2
    assert device.find_call_problem(node("one", "x", "y").call) == ""
    before = count_handles(device)
    del first
    gc.collect()
    third = capture(device, node("one", "x", "y"))
    assert enqueued[-1][0] == streams[0]
    assert count_handles(device) == before
    del second, third


def test_a_call_is_tried_out_before_there_is_a_graph(
    device: CudaOnHost, enqueued: list[tuple[int, int]]
) -> None:
    call = node("one", "x", "y").call
    assert device.find_call_problem(call) == ""
    # Warm and captured, on memory that is gone again.
    assert len(enqueued) == 2
    assert count_handles(device)["stream"] == 1
    assert device.allocator.statistics.all.allocated_bytes.current == 0
    assert device.find_call_problem(call) == ""
    capture(device, node("one", "x", "y"))
    assert len(enqueued) == 3
    assert count_handles(device)["stream"] == 1


def test_scratch_that_xla_refuses_is_refused_before_there_is_a_graph(device: CudaOnHost) -> None:
    with aligning(256):
        problem = device.find_call_problem(node("one", "x", "y").call)
    assert problem.endswith("tried out on zeros: Unsupported alignment: 256")
    assert device.allocator.statistics.all.allocated_bytes.current == 0


def test_states_live_as_long_as_the_graph(device: CudaOnHost) -> None:
    before = read_number("deleted_states")
    replay = capture(device, node("solve", "x", "y", "stateful"))
    assert take_report().count(" state 41") == 2
    # That of the call on zeros is gone.
    assert read_number("deleted_states") == before + 1
    del replay
    gc.collect()
    assert read_number("deleted_states") == before + 2


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("missing", "for which no handler of CUDA is known"),
        ("newer_execute", "whose handler is of version 0.99"),
        ("fail_execute", "failed when it was tried out on zeros: planted: the matrix is odd"),
        ("xla_ffi_python_gpu_callback", "which calls Python on the host"),
    ],
)
def test_what_cannot_be_captured_is_known_before(
    device: CudaOnHost, target: str, reason: str
) -> None:
    call = node("one", "x", "y", target).call
    assert reason in device.find_call_problem(call)
    assert reason in device.find_call_problem(call)
    assert device.allocator.statistics.all.allocated_bytes.current == 0
    with pytest.raises(CudaError, match=f"`one` calls {target}, ") as caught:
        capture(device, kernel("double", "x", "a"), node("one", "x", "y", target))
    assert caught.value.where.startswith(f"node 1 of graph `f`, ffi_call one: {target}(F32[4])")
    assert str(caught.value).endswith("python -m tracegraph error ffi-call")


@pytest.mark.parametrize("kind", ["HOST", "MEMCPY_OF_HOST_MEMORY", "MEM_ALLOC"])
def test_work_that_no_graph_can_repeat_is_refused(device: CudaOnHost, kind: str) -> None:
    def act(stream: int, _: int) -> None:
        if stream in device.driver._captures:
            device.driver.add_captured(stream, kind)

    with enqueuing(act):
        problem = device.find_call_problem(node("one", "x", "y").call)
    assert problem == f"which enqueues what no graph can repeat: {kind.lower()}"


def test_a_handler_that_fails_only_while_it_is_captured_says_so(
    device: CudaOnHost, enqueued: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, broken = Handler.run, list[int]()

    def run_and_wait(
        self: Handler, stage: ExecutionStage, frame: Frame, context: CallContext
    ) -> None:
        run(self, stage, frame, context)
        if context.stream in device.driver._captures:
            broken.append(context.stream)
            raise InterfaceError(ErrorCode.INTERNAL, "gesvdj failed: execution failed")

    monkeypatch.setattr(Handler, "run", run_and_wait)
    problem = device.find_call_problem(node("one", "x", "y").call)
    assert len(enqueued) == 2
    assert problem == (
        "whose handler failed while its stream was captured, as one does that waits for the GPU: "
        "gesvdj failed: execution failed"
    )
    # What the library keeps for that stream may be unusable.
    assert device._handlers.take_stream().handle not in broken
    assert not device.driver._captures
    assert device.allocator.statistics.all.allocated_bytes.current == 0


def test_a_broken_capture_is_refused_and_leaves_nothing(
    device: CudaOnHost, enqueued: list[tuple[int, int]]
) -> None:
    device.driver.error = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    device.driver.fail_on = "end_capture"
    problem = device.find_call_problem(node("one", "x", "y").call)
    assert problem.startswith(
        "which breaks the capture of its stream: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    )
    assert set(count_handles(device)) == {"context", "stream"}
    assert not device.driver._captures
    assert enqueued


@pytest.mark.parametrize("call", ["begin_capture", "end_capture", "instantiate", "create_graph"])
def test_a_failed_build_leaves_only_its_warm_stream(
    device: CudaOnHost, enqueued: list[tuple[int, int]], call: str
) -> None:
    del capture(device, kernel("double", "x", "a"), node("one", "x", "y")).clock
    before = count_handles(device)
    device.driver.fail_on = call
    with pytest.raises(CudaError, match=f"from {call}"):
        capture(device, kernel("double", "x", "a"), node("one", "x", "y"))
    assert count_handles(device) == before
    assert not device.driver._captures
    assert enqueued


def test_no_memory_for_scratch_is_raised_as_such(
    device: CudaOnHost, enqueued: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OutOfMemoryError("none", where="here", why="planted", fix="none", anchor="memory")

    replay = capture(device, node("one", "x", "y"))
    monkeypatch.setattr(type(replay.arena), "allocate_beside", refuse)
    for _ in range(3):
        with pytest.raises(OutOfMemoryError, match="none"):
            capture(device, node("one", "x", "y"))
    # The second stays for the next graph.
    assert count_handles(device)["stream"] == 2
    assert count_handles(device)["graph"] == 1
    assert enqueued
