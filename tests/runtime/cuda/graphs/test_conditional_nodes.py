"""Branches and loops of a CUDA graph, run by a driver over host memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, kernel, make_cuda_replay, make_device, place
from tests.fakes.definitions import make_copy, make_definition, make_stage, replay_once
from tests.fakes.fake_driver import FakeDriver
from tests.fakes.ptx_runner import run_node
from tracegraph.lowering.device_program import ConditionalStep, DeviceStep
from tracegraph.lowering.kernels.loops import conditions
from tracegraph.lowering.kernels.loops.slices import MovingUse, copy_slice
from tracegraph.lowering.xla.guard_loops import guard_loops
from tracegraph.runtime.cuda.graphs.builder import check_constructs
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Construct, GraphNode
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, KernelNode
from tracegraph.runtime.errors import CudaError, InternalError, UnsupportedError

FLAG, COUNTER = BufferUse("flag", 0, 1), BufferUse("counter", 0, 4)
TYPES = {
    "flag": jax.ShapeDtypeStruct((), np.bool_),
    "index": jax.ShapeDtypeStruct((), np.int32),
    "counter": jax.ShapeDtypeStruct((), np.int32),
    "outer": jax.ShapeDtypeStruct((), np.int32),
    "rows": jax.ShapeDtypeStruct((3, 4), np.float32),
}


def make_body(*nodes: GraphNode) -> Body:
    return Body(nodes, tuple((index, index + 1) for index in range(len(nodes) - 1)))


def make_loop(*nodes: GraphNode, turns: int, counter: str = "counter") -> ConditionalNode:
    use = BufferUse(counter, 0, 4)
    body = make_body(*nodes, conditions.count_turn("turn", use, turns).node)
    return make_node(Construct.WHILE, [body], conditions.start_turns("start", use).node)


def make_node(construct: Construct, bodies: Sequence[Body], setter: Any) -> ConditionalNode:
    assert isinstance(setter, KernelNode)
    return ConditionalNode(construct.value, construct, tuple(bodies), setter)


def make_choice() -> ConditionalNode:
    bodies = [make_body(kernel("double", "x", "y")), make_body(kernel("increment", "x", "y"))]
    return make_node(Construct.IF, bodies, conditions.set_flag("choose", FLAG).node)


def define(*nodes: Any, inputs: str = "x", outputs: str = "y") -> GraphDefinition:
    edges = [(index, index + 1) for index in range(len(nodes) - 1)]
    stage = make_stage(*nodes, edges=edges)
    return make_definition(stage, inputs=inputs, outputs=outputs, types=TYPES)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    return make_device(monkeypatch)


X = np.arange(4, dtype=np.float32)


def run_once(replay: Any, *values: Any) -> list[np.ndarray]:
    found: list[Any] = replay_once(replay, *values)
    return [np.asarray(each.to_jax()) for each in found]


@pytest.mark.parametrize(("flag", "expected"), [(True, 2 * X), (False, X + 1)])
def test_a_choice_of_two(device: CudaOnHost, flag: bool, expected: Any):
    replay = make_cuda_replay(device, define(make_choice(), inputs="x flag"))
    for _ in range(2):
        (found,) = run_once(replay, place(X), place(flag, dtype=np.bool_))
        np.testing.assert_array_equal(found, expected)


def test_a_choice_of_one_or_nothing(device: CudaOnHost):
    body = make_body(kernel("double", "x", "y"))
    node = make_node(Construct.IF, [body], conditions.set_flag("choose", FLAG).node)
    replay = make_cuda_replay(device, define(make_copy("x", "y"), node, inputs="x flag"))
    for flag, expected in ((True, 2 * X), (False, X), (True, 2 * X)):
        (found,) = run_once(replay, place(X), place(flag, dtype=np.bool_))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("index", "rounds"), [(0, 1), (1, 2), (2, 3), (3, 3), (-1, 3), (1 << 30, 3)]
)
def test_a_choice_of_three_takes_the_last_for_any_other_index(
    device: CudaOnHost, index: int, rounds: int
):
    steps = [kernel("double", "x", "y"), kernel("double", "y", "y"), kernel("double", "y", "y")]
    bodies = [make_body(*steps[:count]) for count in (1, 2, 3)]
    setter = conditions.set_index("choose", BufferUse("index", 0, 4), 3).node
    node = make_node(Construct.SWITCH, bodies, setter)
    replay = make_cuda_replay(device, define(node, inputs="x index"))
    (found,) = run_once(replay, place(X), place(index, dtype=np.int32))
    np.testing.assert_array_equal(found, X * 2**rounds)


@pytest.mark.parametrize(
    ("kind", "index", "rounds"),
    [("flag", 1, 1), ("flag", 0, 2), ("index", 0, 1), ("index", 2, 3), ("index", -1, 3)],
)
def test_an_older_driver_takes_one_of_several_nodes(
    device: CudaOnHost, kind: str, index: int, rounds: int
) -> None:
    use, dtype = {"flag": (FLAG, np.bool_), "index": (BufferUse("index", 0, 4), np.int32)}[kind]
    count = 2 if kind == "flag" else 3
    steps = [kernel("double", "x", "y"), *[kernel("double", "y", "y")] * 2]
    nodes = [
        make_node(
            Construct.IF,
            [make_body(*steps[: place + 1])],
            conditions.set_branch("choose", use, place, count).node,
        )
        for place in range(count)
    ]
    for node in nodes:
        check_constructs(12_040, node)
    replay = make_cuda_replay(device, define(*nodes, inputs=f"x {kind}"))
    (found,) = run_once(replay, place(X), place(index, dtype=dtype))
    np.testing.assert_array_equal(found, X * 2**rounds)


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_a_loop_of_known_length(device: CudaOnHost, turns: int):
    loop = make_loop(kernel("increment", "y", "y"), turns=turns)
    replay = make_cuda_replay(device, define(make_copy("x", "y"), loop))
    for _ in range(2):
        np.testing.assert_array_equal(run_once(replay, place(X))[0], X + turns)


def test_a_loop_in_a_loop_starts_anew(device: CudaOnHost):
    inner = make_loop(kernel("increment", "y", "y"), turns=3)
    outer = make_loop(inner, kernel("double", "y", "y"), turns=2, counter="outer")
    replay = make_cuda_replay(device, define(make_copy("x", "y"), outer))
    np.testing.assert_array_equal(run_once(replay, place(X))[0], ((X + 3) * 2 + 3) * 2)


def test_a_loop_until_a_flag_is_0(device: CudaOnHost):
    def is_small(parameters: tuple[bytes, ...]) -> None:
        source, target = (int.from_bytes(each, "little") for each in parameters)
        content = np.frombuffer(device.driver.read_bytes(source, 16), np.float32)
        ctypes.c_uint8.from_address(target).value = int(content.max() < 10)

    device.driver.kernels["is_small"] = is_small
    base = kernel("is_small", "y", "flag")
    compare = KernelNode("compare", base.code, base.shape, (base.parameters[0], FLAG), base.written)
    setter = conditions.set_flag("again", FLAG).node
    body = make_body(kernel("double", "y", "y"), compare, setter)
    loop = make_node(Construct.WHILE, [body], setter)
    replay = make_cuda_replay(device, define(make_copy("x", "y"), compare, loop))
    for values, expected in ((X, X * 4), (X + 10, X + 10), (X / 8, X * 4)):
        np.testing.assert_array_equal(run_once(replay, place(values))[0], expected)


def add_comparison(device: CudaOnHost, source: str) -> DeviceStep:
    """Returns the step that sets the flag while all numbers of a buffer are less than 10."""

    def is_small(parameters: tuple[bytes, ...]) -> None:
        first, target = (int.from_bytes(each, "little") for each in parameters)
        content = np.frombuffer(device.driver.read_bytes(first, 16), np.float32)
        ctypes.c_uint8.from_address(target).value = int(content.max() < 10)

    device.driver.kernels["is_small"] = is_small
    base = kernel("is_small", source, "flag")
    read = BufferUse(source, 0, 16)
    node = KernelNode("compare", base.code, base.shape, (read, FLAG), base.written)
    return DeviceStep(node, (read,), (FLAG,))


def make_step(node: KernelNode, reads: str) -> DeviceStep:
    (written,) = [use for use, is_written in node.uses if is_written]
    return DeviceStep(node, tuple(BufferUse(name, 0, 16) for name in reads.split()), (written,))


@pytest.mark.parametrize("is_new", [False, True], ids=["in place", "anew"])
def test_iterations_after_the_end_of_a_loop_leave_nothing(device: CudaOnHost, is_new: bool):
    """`y` is a state of the loop, updated in place or written anew; `z` is the one before."""
    compare = add_comparison(device, "y")
    update = [make_step(kernel("increment", "y", "y"), "y")]
    if is_new:
        copied = DeviceStep(
            CopyNode("back", BufferUse("t", 0, 16), BufferUse("y", 0, 16)),
            (BufferUse("t", 0, 16),),
            (BufferUse("y", 0, 16),),
        )
        update = [make_step(kernel("increment", "y", "t"), "y"), copied]
    before = make_step(kernel("double", "y", "z"), "y")
    setter = conditions.set_flag("again", FLAG)
    loop = ConditionalStep("loop", Construct.WHILE, ((before, *update, compare, setter),), setter)
    names = ("double", "increment", "compare", "back")
    instruction = SimpleNamespace(opcode="fusion", called_computation_ids=())
    results = [BufferUse("y", 0, 16), BufferUse("z", 0, 16)]
    sizes: list[int] = []

    def add(nbytes: int) -> BufferUse:
        sizes.append(nbytes)
        return BufferUse("kept", 0, nbytes)

    (guarded,) = guard_loops([loop], results, {0: dict.fromkeys(names, instruction)}, add)
    assert isinstance(guarded, ConditionalStep)
    assert guarded.turn is not None
    per_turn = guarded.turn.iterations
    assert per_turn > 1
    nodes = [step.node for step in guarded.bodies[0] if isinstance(step, DeviceStep)]
    for node in nodes:
        if isinstance(node, KernelNode) and node.code.symbol.startswith(("keep_", "end_")):
            run = functools.partial(run_node, node, device.driver.values)
            device.driver.kernels[node.code.symbol] = run
    assert isinstance(compare.node, KernelNode)
    node = make_node(Construct.WHILE, [make_body(*nodes)], setter.node)
    types = {"kept": jax.ShapeDtypeStruct((sizes[0],), np.uint8)}
    edges = [(index, index + 1) for index in range(3)]
    stage = make_stage(make_copy("x", "y"), make_copy("x", "z"), compare.node, node, edges=edges)
    definition = make_definition(stage, inputs="x", outputs="y z", types=TYPES | types)
    replay = make_cuda_replay(device, definition)
    for count in range(2 * per_turn + 2):
        x = np.array([10 - count, -20, -31, -25], np.float32)
        found, last = run_once(replay, place(x))
        np.testing.assert_array_equal(found, x + count)
        np.testing.assert_array_equal(last, 2 * (x + count - 1) if count else x)


def test_a_piece_that_moves_with_the_turns(device: CudaOnHost):
    rows = MovingUse(BufferUse("rows", 0, 48), 16, 0, 16)
    step = copy_slice("put", MovingUse(BufferUse("y", 0, 16), 16, 0), rows, COUNTER)
    loop = make_loop(kernel("increment", "y", "y"), step.node, turns=3)
    replay = make_cuda_replay(device, define(make_copy("x", "y"), loop, outputs="y rows"))
    last, found = run_once(replay, place(X))
    np.testing.assert_array_equal(found, np.stack([X + 1, X + 2, X + 3]))
    np.testing.assert_array_equal(last, X + 3)


def build(driver: FakeDriver) -> None:
    context = driver.retain_primary_context(0)
    definition = define(make_copy("x", "y"), make_loop(make_choice(), turns=2), inputs="x flag")
    (stage,) = definition.stages
    loader = KernelLoader(driver, context)
    CudaGraph(driver, stage, lambda use: 0x1000 + use.offset, loader, {}, "f")


def test_whatever_call_fails_nothing_is_left():
    driver = FakeDriver()
    build(driver)
    assert driver.count_calls("add_conditional_node") == 2
    names = [call.name for call in driver.calls]
    for number in range(2, 2 + names.index("instantiate")):
        broken = FakeDriver(fail_at=number)
        with pytest.raises(CudaError):
            build(broken)
        assert set(broken.live_handles().values()) <= {"context"}, broken.calls[number - 1]
        assert not broken.graphs


def test_an_error_names_the_node_inside():
    driver = FakeDriver(fail_on="add_conditional_node")
    with pytest.raises(CudaError, match="node 1 of graph `f`, while while"):
        build(driver)


def test_the_bytes_that_a_branch_uses_cannot_be_elsewhere(device: CudaOnHost):
    driver = device.driver
    definition = define(make_choice(), inputs="x flag")
    loader = KernelLoader(driver, driver.retain_primary_context(0))
    (stage,) = definition.stages
    graph = CudaGraph(driver, stage, lambda use: 0x1000 + use.offset, loader, {}, "f")
    assert not any(graph.can_rebind(name) for name in ("x", "y", "flag"))
    with pytest.raises(InternalError, match="cannot be given another address"):
        graph.update(lambda use: 0x2000 + use.offset)


def test_an_old_driver_is_refused():
    choice = make_choice()
    check_constructs(12_080, choice)
    check_constructs(12_040, make_loop(turns=2))
    with pytest.raises(UnsupportedError, match="no conditional node of 2 branches") as raised:
        check_constructs(12_060, choice)
    assert "12.6" in raised.value.why
    assert raised.value.where == "if if"


def test_a_setter_outside_of_a_condition_is_an_error_of_ours(device: CudaOnHost):
    node = conditions.set_flag("lost", FLAG).node
    with pytest.raises(InternalError, match="sets a condition and belongs to no conditional node"):
        make_cuda_replay(device, define(node, inputs="flag", outputs="flag"))
