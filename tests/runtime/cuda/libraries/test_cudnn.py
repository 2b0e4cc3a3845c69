"""cuDNN: what is asked of the library, what becomes part of a graph, and what is left after.

Goes past 400 lines because all of it is asked of one stand-in of the library.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import re
from collections import Counter
from typing import Any

import pytest

from tests.fakes.cuda_on_host import (
    CudaOnHost,
    kernel,
    make_cuda_replay,
    make_device,
)
from tests.fakes.definitions import SIZE, make_definition, make_stage
from tests.fakes.fake_cudnn import Engine, Execution, FakeCudnn
from tracegraph.lowering.xla.convolution import ACTIVATIONS, DTYPES
from tracegraph.runtime.cuda.libraries import cudnn
from tracegraph.runtime.cuda.libraries.cudnn import Cudnn, load_cudnn
from tracegraph.runtime.cuda.libraries.cudnn_backend import Kind
from tracegraph.runtime.cuda.libraries.cudnn_convolutions import (
    DATA_TYPES,
    EPILOGUE_DTYPES,
    SUM_DTYPES,
)
from tracegraph.runtime.cudnn_calls import (
    ITEM_BYTES,
    Activation,
    Algorithm,
    B,
    CompiledGraph,
    Convolution,
    CudnnCall,
    Direction,
    Epilogue,
    Tensor,
    W,
    Window,
    X,
    Y,
    Z,
)
from tracegraph.runtime.errors import CudaError, UnsupportedError
from tracegraph.runtime.graph_nodes import Body, ConditionalNode, Construct, Node
from tracegraph.runtime.library_nodes import CudnnNode
from tracegraph.runtime.nodes import BufferUse
from tracegraph.runtime.replay import Replay

X_TENSOR = Tensor("float32", (2, 8, 16, 16), (2048, 1, 128, 8))
W_TENSOR = Tensor("float32", (16, 4, 3, 3), (36, 1, 12, 4))
Y_TENSOR = Tensor("float32", (2, 16, 7, 7), (784, 1, 112, 16))
BIAS = Tensor("float32", (1, 16, 1, 1), (16, 1, 16, 16))
CONVOLUTION = Convolution(
    Direction.FORWARD,
    X_TENSOR,
    W_TENSOR,
    Y_TENSOR,
    Window((1, 1), (2, 2), (2, 2)),
    Algorithm(5, ((3, 7), (9, 0))),
    workspace_bytes=64,
)
GRAPH = CompiledGraph(
    b"the plan", (1, 2, 3, 7, 10), ((10, b"\0\0\0\x3e"),), ((7, 32),), 64, 64 + 256
)
ENGINES = {5: Engine((3, 9), 48), 6: Engine((), 16)}


@pytest.fixture
def library() -> FakeCudnn:
    return FakeCudnn(dict(ENGINES))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, library: FakeCudnn) -> CudaOnHost:
    """A device whose cuDNN adds what it executes to the graph that is captured."""
    device = make_device(monkeypatch)
    device._cudnn._load = library.make_backend

    def act(execution: Execution) -> None:
        if execution.stream in device.driver._captures:
            device.driver.add_captured(execution.stream, "work of cuDNN")

    library.act = act
    return device


def use(buffer: str) -> BufferUse:
    return BufferUse(buffer, 0, 4 * SIZE)


def node(
    name: str, reads: str, target: str, call: CudnnCall = CONVOLUTION, workspace: str = "s"
) -> CudnnNode:
    """Returns a call on whole buffers."""
    uids = (X, W, Y) if isinstance(call, Convolution) else (1, 2, 3)
    operands = tuple(
        (uid, use(buffer)) for uid, buffer in zip(uids, (*reads.split(), target), strict=True)
    )
    return CudnnNode(name, call, operands, (uids[-1],), use(workspace))


def capture(device: CudaOnHost, *nodes: Node) -> Replay:
    edges = [(i, i + 1) for i in range(len(nodes) - 1)]
    definition = make_definition(make_stage(*nodes, edges=edges), inputs="x w")
    return make_cuda_replay(device, definition)


def make_cudnn(library: FakeCudnn) -> Cudnn:
    """Returns the library of a GPU that is not there."""
    order: Any = FakeOrder()
    return Cudnn(order, lambda: pytest.fail("asks for memory"), library.make_backend)


def list_operations(library: FakeCudnn, call: Convolution) -> list[dict[str, Any]]:
    """Returns the operations of the graph that a call is described as."""
    owner = make_cudnn(library)
    assert owner.find_problem(call) == ""
    (graph,) = library.list_alive(Kind.OPERATIONGRAPH)
    return graph["OPERATIONGRAPH_OPS"]


class FakeOrder:
    """A stream without a GPU."""

    stream = 0x77

    def use_context(self) -> Any:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_tables_know_the_dtypes_and_activations_that_are_decoded() -> None:
    assert set(DTYPES.values()) == set(ITEM_BYTES) <= set(DATA_TYPES)
    assert set(ACTIVATIONS.values()) == set(Activation)
    assert {*SUM_DTYPES.values(), *EPILOGUE_DTYPES.values()} <= set(DATA_TYPES)


@pytest.mark.parametrize(
    ("direction", "prefix", "names"),
    [
        (Direction.FORWARD, "FORWARD", ("X", "W", "Y")),
        (Direction.BACKWARD_DATA, "BWD_DATA", ("DX", "W", "DY")),
        (Direction.BACKWARD_FILTER, "BWD_FILTER", ("X", "DW", "DY")),
    ],
)
def test_convolution_is_described_as_xla_describes_it(
    library: FakeCudnn, direction: Direction, prefix: str, names: tuple[str, ...]
) -> None:
    call = dataclasses.replace(CONVOLUTION, direction=direction)
    (operation,) = list_operations(library, call)
    prefix = f"OPERATION_CONVOLUTION_{prefix}_"
    assert (operation[prefix + "ALPHA"], operation[prefix + "BETA"]) == ([1.0], [0.0])
    (convolution,) = operation[prefix + "CONV_DESC"]
    assert convolution == {
        "kind": Kind.CONVOLUTION,
        "CONVOLUTION_COMP_TYPE": [0],
        "CONVOLUTION_CONV_MODE": [1],
        "CONVOLUTION_SPATIAL_DIMS": [2],
        "CONVOLUTION_PRE_PADDINGS": [1, 1],
        "CONVOLUTION_POST_PADDINGS": [1, 1],
        "CONVOLUTION_DILATIONS": [2, 2],
        "CONVOLUTION_FILTER_STRIDES": [2, 2],
    }
    tensors = zip(names, (X, W, Y), (X_TENSOR, W_TENSOR, Y_TENSOR), strict=True)
    for name, uid, tensor in tensors:
        assert operation[prefix + name] == [
            {
                "kind": Kind.TENSOR,
                "TENSOR_DATA_TYPE": [0],
                "TENSOR_DIMENSIONS": list(tensor.dims),
                "TENSOR_STRIDES": list(tensor.strides),
                "TENSOR_UNIQUE_ID": [uid],
                "TENSOR_BYTE_ALIGNMENT": [32],
            }
        ]


@pytest.mark.parametrize(
    ("dtype", "sum_type", "factor"),
    [("bfloat16", 0, [1.0]), ("int8", 4, [1.0]), ("float64", 1, ("double", 1.0))],
)
def test_sums_are_made_in_the_type_that_xla_names(
    library: FakeCudnn, dtype: str, sum_type: int, factor: Any
) -> None:
    x, w, y = (dataclasses.replace(t, dtype=dtype) for t in (X_TENSOR, W_TENSOR, Y_TENSOR))
    window = dataclasses.replace(CONVOLUTION.window, is_flipped=True)
    call = dataclasses.replace(CONVOLUTION, x=x, w=w, y=y, window=window)
    (operation,) = list_operations(library, call)
    (convolution,) = operation["OPERATION_CONVOLUTION_FORWARD_CONV_DESC"]
    assert convolution["CONVOLUTION_COMP_TYPE"] == [sum_type]
    assert convolution["CONVOLUTION_CONV_MODE"] == [0]
    assert operation["OPERATION_CONVOLUTION_FORWARD_ALPHA"] == factor


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (Activation.NONE, None),
        (Activation.RELU, {"POINTWISE_MODE": [100]}),
        (Activation.RELU6, {"POINTWISE_MODE": [100], "POINTWISE_RELU_UPPER_CLIP": [6.0]}),
        (Activation.ELU, {"POINTWISE_MODE": [103]}),
        (
            Activation.LEAKY_RELU,
            {"POINTWISE_MODE": [100], "POINTWISE_RELU_LOWER_CLIP_SLOPE": [0.25]},
        ),
    ],
)
def test_what_follows_is_described_as_xla_describes_it(
    library: FakeCudnn, activation: Activation, expected: dict[str, Any] | None
) -> None:
    epilogue = Epilogue(BIAS, activation, slope=0.25)
    operations = list_operations(library, dataclasses.replace(CONVOLUTION, epilogue=epilogue))
    convolution, *sums = operations
    assert convolution["OPERATION_CONVOLUTION_FORWARD_Y"][0]["TENSOR_IS_VIRTUAL"] == [True]
    if expected is not None:
        *sums, last = sums
        (pointwise,) = last["OPERATION_POINTWISE_PW_DESCRIPTOR"]
        assert pointwise == {"kind": Kind.POINTWISE, "POINTWISE_MATH_PREC": [0], **expected}
        assert last["OPERATION_POINTWISE_YDESC"][0]["TENSOR_UNIQUE_ID"] == [Y]
    else:
        assert sums[-1]["OPERATION_POINTWISE_YDESC"][0]["TENSOR_UNIQUE_ID"] == [Y]
    added = [each["OPERATION_POINTWISE_BDESC"][0]["TENSOR_UNIQUE_ID"][0] for each in sums]
    is_plain = activation in (Activation.NONE, Activation.RELU)
    assert added == ([Z, B] if is_plain else [B])


def test_factors_belong_to_the_side_input(library: FakeCudnn) -> None:
    epilogue = Epilogue(BIAS, Activation.ELU, scale=2.0, side_scale=0.5)
    operations = list_operations(library, dataclasses.replace(CONVOLUTION, epilogue=epilogue))
    names = ("OPERATION_POINTWISE_ALPHA1", "OPERATION_POINTWISE_ALPHA2")
    assert [[each[name][0] for name in names] for each in operations[1:3]] == [[2, 0.5], [1, 1]]


def test_plan_has_the_engine_and_the_knobs_that_xla_chose(library: FakeCudnn) -> None:
    owner = make_cudnn(library)
    assert owner.find_problem(CONVOLUTION) == ""
    (plan,) = library.list_alive(Kind.EXECUTION_PLAN)
    (config,) = plan["EXECUTION_PLAN_ENGINE_CONFIG"]
    assert config["ENGINECFG_ENGINE"][0]["ENGINE_GLOBAL_INDEX"] == [5]
    knobs = [
        (each["KNOB_CHOICE_KNOB_TYPE"][0], each["KNOB_CHOICE_KNOB_VALUE"][0])
        for each in config["ENGINECFG_KNOB_CHOICES"]
    ]
    assert knobs == [(3, 7), (9, 0)]


@pytest.mark.parametrize(
    ("engines", "algorithm", "workspace_bytes", "chosen"),
    [
        (ENGINES, Algorithm(), 64, 5),
        (ENGINES, Algorithm(), 32, 6),
        # Rounds its input; needs tensor cores, where float32 must not.
        ({1: Engine(notes=(1,)), 2: Engine(notes=(0,))}, Algorithm(), 0, 2),
        ({2: Engine(notes=(0,)), 3: Engine()}, Algorithm(allows_tf32=False), 0, 3),
    ],
)
def test_where_xla_chose_none_the_first_recommended_that_fits_is_taken(
    engines: dict[int, Engine], algorithm: Algorithm, workspace_bytes: int, chosen: int
) -> None:
    library = FakeCudnn(engines)
    call = dataclasses.replace(CONVOLUTION, algorithm=algorithm, workspace_bytes=workspace_bytes)
    owner = make_cudnn(library)
    assert owner.find_problem(call) == ""
    (plan,) = owner._recent.values()
    (config,) = library.alive[plan.parts.plan].values["EXECUTION_PLAN_ENGINE_CONFIG"]
    assert config["ENGINECFG_ENGINE"][0]["ENGINE_GLOBAL_INDEX"] == [chosen]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": Algorithm(7)}, "by engine 7, which cuDNN 9.24.1 refuses: .*no such engine"),
        (
            {"algorithm": Algorithm(6, ((3, 1),))},
            "by engine 6 with knobs 3=1, which cuDNN 9.24.1 refuses: .*no such knob",
        ),
        ({"workspace_bytes": 8}, "the plan needs 48 bytes of workspace, not 8"),
        ({"algorithm": Algorithm(), "workspace_bytes": 8}, "no engine fits into 8 bytes"),
    ],
)
def test_what_the_library_does_not_know_is_known_before(
    device: CudaOnHost, library: FakeCudnn, changes: dict[str, Any], reason: str
) -> None:
    call = dataclasses.replace(CONVOLUTION, **changes)
    problem = device.find_call_problem(call)
    assert problem.startswith("is forward, of float32 [2, 8, 16, 16] with [16, 4, 3")
    assert re.search(reason, problem)
    assert not library.alive
    assert device.find_call_problem(CONVOLUTION) == ""


def test_a_graph_of_another_version_is_known_before(device: CudaOnHost, library: FakeCudnn) -> None:
    call = dataclasses.replace(GRAPH, plan=b"of another version")
    problem = device.find_call_problem(call)
    assert problem.startswith("is a compiled graph of 5 tensors, which cuDNN 9.24.1 refuses")
    assert not library.alive


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
    # Once to warm up, on the stream of all other work, and once captured.
    warm, captured = library.executions
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
    warm, captured = library.executions
    addresses = {name: buffer.address for name, buffer in replay.buffers.items()}
    assert scalars == [b"\0\0\0\x3e"] * 2
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
    assert len(library.executions) == 3
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
