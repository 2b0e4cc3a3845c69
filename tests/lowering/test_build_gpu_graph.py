"""Build for a GPU: edges from the planned arena, programmatic edges, and the text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.gpu_programs import CODE, copy, fill, kernel, make_frame, spec, use
from tracegraph.lowering import build_graph as build_graph_module
from tracegraph.lowering.build_graph import build_graph, find_programmatic
from tracegraph.lowering.device_program import (
    ConditionalStep,
    Copy,
    DeviceProgram,
    DeviceStep,
    ExecutableCall,
)
from tracegraph.lowering.planning.lanes import MOST
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import plan_memory
from tracegraph.lowering.request import BufferSpec
from tracegraph.runtime.definition.event_nodes import EventNode
from tracegraph.runtime.definition.graph import GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, Construct, Node
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode, MatrixLayout
from tracegraph.runtime.definition.nodes import KernelNode, LaunchShape
from tracegraph.runtime.errors import InternalError
from tracegraph.runtime.streams.event import Event

LAYOUT = MatrixLayout("float32", 4, 4, 4)
MATMUL = Matmul(LAYOUT, LAYOUT, LAYOUT, LAYOUT, 1.0, 0.0, "32F", "float32")


def matmul(name: str, a: str, b: str, d: str) -> DeviceStep:
    roles = (("a", a), ("b", b), ("c", d), ("d", d))
    node = MatmulNode(name, MATMUL, tuple((role, use(each)) for role, each in roles))
    return DeviceStep(node, (use(a), use(b)), (use(d),))


def program(*steps: Any, outputs: str = "y", donated: str = "") -> DeviceProgram:
    """Returns steps in one chain over the inputs ``x`` and ``s``."""
    frame = make_frame([spec("x"), spec("s")], [spec(n) for n in outputs.split()], donated.split())
    listed = {buffer.name for buffer in frame.buffers}
    named = dict.fromkeys(each.buffer for step in steps for each in step.writes)
    more = [spec(name) for name in named if name not in listed]
    return dataclasses.replace(
        frame,
        buffers=(*frame.buffers, *more),
        steps=steps,
        edges=tuple((i, i + 1) for i in range(len(steps) - 1)),
    )


def build(*steps: Any, **options: Any) -> GraphDefinition:
    wanted = program(*steps, **options)
    return build_graph(wanted, plan_memory("f", find_lifetimes(wanted)))


def only_stage(definition: GraphDefinition) -> Stage:
    (stage,) = definition.stages
    return stage


def test_independent_steps_run_side_by_side():
    stage = only_stage(
        build(
            kernel("a", "x", "t"),
            kernel("b", "x", "u"),
            kernel("c", "t u", "y"),
            outputs="y",
        )
    )
    assert stage.edges == ((0, 2), (1, 2))


def test_a_buffer_that_reuses_bytes_waits_for_the_one_before():
    definition = build(
        kernel("a", "x", "t"),
        kernel("b", "t", "y"),
        kernel("c", "x", "u"),
        kernel("d", "u", "z"),
        outputs="y z",
    )
    offsets = {slot.name: slot.offset for slot in definition.slots}
    # `t` is dead when `u` is made: by their names the two chains are independent.
    assert offsets["t"] == offsets["u"]
    assert only_stage(definition).edges == ((0, 1), (1, 2), (2, 3))


def test_a_lost_edge_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build_graph_module, "find_edges", lambda steps, addresses: ((0, 2),))
    steps = [kernel("a", "x", "t"), kernel("b", "x", "u"), kernel("c", "t u", "y")]
    with pytest.raises(InternalError, match="`c` shares bytes with `b`") as raised:
        build(*steps)
    assert raised.value.fix.startswith("internal error")


OUTSIDE = {
    "kernel": (kernel("a", "x[0:65]", "y"), "bytes 0 to 65 of `x`, which has 64"),
    "memcpy": (copy("a", "x[32:96]", "y"), "bytes 32 to 96 of `x`, which has 64"),
    "memset": (fill("a", "y[0:4096]"), "bytes 0 to 4,096 of `y`, which has 64"),
    "matmul": (matmul("a", "x", "s[-4:60]", "y"), "bytes -4 to 60 of `s`, which has 64"),
    "sizes": (copy("a", "x[0:32]", "y"), "a memcpy from 32 to 64 bytes"),
    "declared": (Copy("a", use("x[0:65]"), use("y[0:65]")), "bytes 0 to 65 of `x`, which has 64"),
}


@pytest.mark.parametrize("fault", OUTSIDE)
def test_a_node_beyond_its_buffer_is_an_error_of_ours(fault: str):
    step, expected = OUTSIDE[fault]
    with pytest.raises(InternalError) as raised:
        build(step)
    assert expected in raised.value.what
    assert raised.value.where == f"node 0, {build_kind(step)} `a` of graph `f`"


def build_kind(step: Any) -> str:
    return "memcpy" if isinstance(step, Copy) else step.node.kind


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda plan: {"offsets": {**plan.offsets, "y": -256}}, "bytes -256 to -192 of `arena`"),
        (lambda plan: {"offsets": {**plan.offsets, "y": 1 << 63}}, "of `arena`, which has 768"),
        (lambda plan: {"arena_bytes": 300}, "of `arena`, which has 300"),
    ],
)
def test_a_slot_beyond_the_arena_is_an_error_of_ours(change: Any, expected: str):
    wanted = program(kernel("a", "x s", "y"))
    plan = plan_memory("f", find_lifetimes(wanted))
    with pytest.raises(InternalError) as raised:
        build_graph(wanted, dataclasses.replace(plan, **change(plan)))
    assert expected in raised.value.what


def test_content_of_another_size_is_an_error_of_ours():
    wanted = program(kernel("a", "x s c", "y"))
    wrong = BufferSpec("c", (64,), spec("c").dtype, content=bytes(65))
    wanted = dataclasses.replace(wanted, buffers=(*wanted.buffers, wrong))
    with pytest.raises(InternalError, match="its content has 65 bytes, not 64"):
        build_graph(wanted, plan_memory("f", find_lifetimes(wanted)))


MAKERS: dict[str, Callable[[str, str, str], DeviceStep]] = {
    "kernel": kernel,
    "waiting": lambda name, reads, writes: kernel(name, reads, writes, waits=True),
    "copy": copy,
    "fill": lambda name, reads, writes: fill(name, writes),
    "matmul": lambda name, reads, writes: matmul(name, reads, reads, writes),
}


@pytest.mark.parametrize(("first", "second"), [*itertools.product(MAKERS, repeat=2)])
def test_only_edges_from_kernels_to_kernels_that_wait_are_programmatic(first: str, second: str):
    stage = only_stage(
        build(MAKERS[first]("a", "x", "t"), MAKERS[second]("b", "t", "t"), outputs="t")
    )
    assert stage.edges == ((0, 1),)
    is_early = first in ("kernel", "waiting") and second == "waiting"
    assert stage.programmatic == ({(0, 1)} if is_early else set())


def test_a_kernel_may_wait_for_some_itself_and_for_others_fully():
    stage = only_stage(
        build(
            kernel("a", "x", "t", waits=True),
            fill("z", "u"),
            kernel("b", "t u", "y", waits=True),
        )
    )
    assert stage.edges == ((0, 2), (1, 2))
    assert stage.programmatic == {(0, 2)}


def test_a_graph_without_kernels_that_wait_has_full_edges_only():
    stage = only_stage(build(kernel("a", "x", "t"), kernel("b", "t", "u"), kernel("c", "u", "y")))
    assert stage.programmatic == frozenset()


def simulate_starts(stage: Stage) -> None:
    """Checks Note [Programmatic edges] by its own rules, on sets instead of a proof.

    ``surely_done[n]`` are the nodes that have completed when ``n`` first touches memory, whatever
    the timing: those before which it was not started, or which its own wait awaits.
    """
    count = len(stage.nodes)
    surely_done: list[set[int]] = [set() for _ in range(count)]
    before: list[set[int]] = [set() for _ in range(count)]
    for index, node in enumerate(stage.nodes):
        for first in [a for a, b in stage.edges if b == index]:
            before[index] |= before[first] | {first}
            is_awaited = getattr(node, "begins_with_wait", False)
            if (first, index) in stage.programmatic and not is_awaited:
                continue
            # A step that has completed has touched its memory, so all that was done then is done.
            surely_done[index] |= surely_done[first] | {first}
        assert surely_done[index] == before[index], (index, surely_done[index], before[index])


KINDS = st.sampled_from(sorted(MAKERS))
NAMES = st.sampled_from("tuvw")


@settings(max_examples=100)
@given(st.lists(st.tuples(KINDS, NAMES, NAMES), min_size=1, max_size=10))
def test_all_that_comes_before_a_node_is_done_when_it_touches_memory(drawn: Any):
    steps = [fill(f"fill_{name}", name) for name in "tuvw"]
    steps += [
        MAKERS[kind](f"n{index}", source, target)
        for index, (kind, source, target) in enumerate(drawn)
    ]
    simulate_starts(only_stage(build(*steps, outputs="t u v w")))


@pytest.mark.parametrize("bad", [(0, 1), (1, 2)])
def test_a_programmatic_edge_into_a_kernel_that_does_not_wait_is_a_fault(bad: tuple[int, int]):
    steps = [kernel("a", "x", "t"), kernel("b", "t", "u"), kernel("c", "u", "y")]
    stage = dataclasses.replace(only_stage(build(*steps)), programmatic=frozenset({bad}))
    with pytest.raises(AssertionError):
        simulate_starts(stage)


def test_two_steps_with_an_edge_that_the_reduction_left_out():
    steps = [
        kernel("a", "x", "t", waits=True),
        kernel("p", "t", "u", waits=True),
        kernel("c", "t u", "y", waits=True),
    ]
    stage = only_stage(build(*steps))
    # `c` reads what `a` wrote, and waits for `p` alone, which has waited for `a`.
    assert stage.edges == ((0, 1), (1, 2))
    assert stage.programmatic == {(0, 1), (1, 2)}
    simulate_starts(stage)


def test_programmatic_edges_need_both_nodes():
    nodes: list[Node] = [kernel("a", "x", "t", waits=True).node, copy("b", "t", "u").node]
    assert find_programmatic(nodes, ((0, 1),), frozenset(map(id, nodes))) == frozenset()


def load_early(step: DeviceStep) -> DeviceStep:
    """Returns a kernel that waits, and loads its first parameter before that."""
    assert isinstance(step.node, KernelNode)
    code = dataclasses.replace(step.node.code, early=(0,))
    return dataclasses.replace(step, node=dataclasses.replace(step.node, code=code))


@pytest.mark.parametrize("written", ["y", "x"])
def test_a_kernel_starts_early_if_nothing_ahead_of_it_writes_what_it_loads_then(written: str):
    weights = load_early(kernel("b", "x t", "u", waits=True))
    # An optimizer writes the weights behind all that loads them.
    steps = [kernel("a", "s", "t", waits=True), weights, kernel("c", "u", written, waits=True)]
    stage = only_stage(build(*steps, outputs=written))
    assert stage.edges == ((0, 1), (1, 2))
    assert stage.programmatic == {(0, 1), (1, 2)}
    again = [kernel("d", "s", written, waits=True), *steps]
    behind = only_stage(build(*again, outputs=written))
    names = [node.name for node in behind.nodes]
    edge = (names.index("a"), names.index("b"))
    assert (edge in behind.programmatic) == (written == "y")


def test_a_kernel_may_load_early_what_it_writes_itself_but_not_in_a_loop():
    own = load_early(kernel("b", "x t", "x", waits=True))
    steps = [kernel("a", "s", "t", waits=True), own, kernel("c", "x", "y", waits=True)]
    assert only_stage(build(*steps)).programmatic == {(0, 1), (1, 2)}
    again = [*steps, load_early(kernel("d", "x y", "x", waits=True))]
    assert only_stage(build(*again)).programmatic == {(0, 1), (1, 2)}
    # There the turn before has written it.
    loop = ConditionalStep("loop", Construct.WHILE, (tuple(steps),), kernel("set", "s", "u"))
    (node,) = only_stage(build(loop)).nodes
    assert isinstance(node, ConditionalNode)
    assert node.bodies[0].programmatic == {(1, 2)}


def test_a_kernel_does_not_load_early_what_has_a_place_that_others_use():
    steps = [
        kernel("zero", "s", "t", waits=True),
        kernel("a", "t", "u", waits=True),
        load_early(kernel("b", "t u", "y", waits=True)),
    ]
    assert only_stage(build(*steps)).programmatic == {(0, 1)}


@pytest.mark.parametrize("first_loads_early", [True, False])
def test_a_kernel_loads_early_what_is_there_behind_a_full_edge(first_loads_early: bool) -> None:
    change = load_early if first_loads_early else (lambda step: step)
    stage = only_stage(
        build(
            kernel("cut", "x", "w", waits=True),
            change(kernel("a", "w s", "t", waits=True)),
            load_early(kernel("b", "w t", "u", waits=True)),
            load_early(kernel("c", "w u", "v", waits=True)),
            outputs="v",
        )
    )
    assert stage.edges == ((0, 1), (1, 2), (2, 3))
    # The first one that loads early what is cut out waits for it, and no other needs to.
    full = (0, 1) if first_loads_early else (1, 2)
    assert stage.programmatic == {*stage.edges} - {full}


def test_a_kernel_behind_a_memset_may_load_early_what_that_has_filled() -> None:
    stage = only_stage(
        build(
            fill("zero", "t"),
            kernel("a", "t", "u", waits=True),
            load_early(kernel("b", "t u", "y", waits=True)),
        )
    )
    assert stage.programmatic == {(1, 2)}


def test_a_full_edge_on_another_way_is_none_on_this_one() -> None:
    stage = only_stage(
        build(
            kernel("cut", "x", "w", waits=True),
            kernel("a", "w", "t", waits=True),
            kernel("other", "x", "s", waits=True),
            load_early(kernel("b", "w s t", "u", waits=True)),
            outputs="u",
        )
    )
    names = [node.name for node in stage.nodes]
    into = {edge for edge in stage.edges if names[edge[1]] == "b"}
    assert into
    assert into.isdisjoint(stage.programmatic)


def test_eager_steps_part_the_stages():
    eager = ExecutableCall("e", None, (use("t"),), (use("u"),), is_captured=False)
    definition = build(kernel("a", "x", "t"), eager, kernel("b", "t u", "y"))
    assert [stage.edges for stage in definition.stages] == [(), (), ()]
    assert [stage.is_captured for stage in definition.stages] == [True, False, True]


def test_constants_are_resident_and_keep_their_bytes():
    wanted = program(kernel("a", "x c", "y"))
    constant = dataclasses.replace(spec("c"), content=bytes(range(64)))
    wanted = dataclasses.replace(wanted, buffers=(*wanted.buffers, constant))
    plan = plan_memory("f", find_lifetimes(wanted))
    slots = {slot.name: slot for slot in build_graph(wanted, plan).slots}
    assert slots["c"].content == bytes(range(64))
    assert [name for name, slot in slots.items() if slot.is_resident] == ["c"]
    assert (plan.lifetimes[-1].first, plan.lifetimes[-1].last) == (0, 0)


def test_text_of_a_gpu_graph(golden: Callable[[str, str], None]):
    large = kernel("fusion_2", "x s t", "u", waits=True)
    node = dataclasses.replace(large.node, code=CODE, shape=LaunchShape((16, 2, 1), (8, 4, 2)))
    definition = build(
        fill("sum.1", "t"),
        kernel("fusion_1", "x t", "t", waits=True),
        dataclasses.replace(large, node=node),
        matmul("dot.3", "t", "u", "v"),
        kernel("fusion_3", "u", "w", waits=True),
        kernel("fusion_4", "v w", "y", waits=True),
        copy("copy.2", "v", "z"),
        Copy("update_s", use("w"), use("s")),
        outputs="y z s",
        donated="s",
    )
    golden("definition_of_a_gpu_graph", f"{definition}\n")


def test_a_wide_graph_is_dealt_out_to_lanes():
    """Forty kernels that share nothing: chains by early starts, as many as lanes."""
    steps = [kernel(f"k{i}", "x", f"y{i}", waits=True) for i in range(40)]
    (stage,) = build(*steps, outputs=" ".join(f"y{i}" for i in range(40))).stages
    assert len(stage.edges) == 40 - MOST
    assert stage.programmatic == frozenset(stage.edges)
    assert {node.name for node in stage.nodes} == {step.name for step in steps}


def test_a_graph_that_waits_for_events_gets_no_lanes():
    """A lane could put a record behind the wait for what follows it outside."""
    event = DeviceStep(EventNode("e", Event(), True), (), ())
    steps = [kernel(f"k{i}", "x", f"y{i}") for i in range(40)]
    (stage,) = build(event, *steps, outputs=" ".join(f"y{i}" for i in range(40))).stages
    assert stage.edges == ()
