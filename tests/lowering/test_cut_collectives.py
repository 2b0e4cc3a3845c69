"""Programs that are cut at the collectives over several processes."""

from __future__ import annotations

import pytest

from tracegraph.lowering.cut_collectives import cut_collectives
from tracegraph.lowering.device_program import ConditionalStep, DeviceStep, GraphStep
from tracegraph.lowering.xla.program import XlaProgram
from tracegraph.runtime.definition.collective_nodes import (
    CollectiveKind,
    CollectiveNode,
    Exchange,
    JointCollectiveNode,
)
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    ConditionHandle,
    FillNode,
    KernelCode,
    KernelNode,
    LaunchShape,
)
from tracegraph.runtime.errors import UnsupportedError

ORDER = BufferUse("order", 0, 1)
TWO_EACH = (0, 0, 1, 1)


def use(name: str, offset: int = 0) -> BufferUse:
    return BufferUse(name, offset, 64)


def add(name: str, source: BufferUse, target: BufferUse, *groups: tuple[int, ...]) -> DeviceStep:
    exchange = Exchange(CollectiveKind.ALL_REDUCE, "F32", 16, groups or ((0, 1, 2, 3),), "SUM")
    node = CollectiveNode(name, exchange, source, target)
    return DeviceStep(node, (source, ORDER), (target, ORDER))


def fill(name: str) -> DeviceStep:
    return DeviceStep(FillNode(name, use(name)), (), (use(name),))


def cut(*steps: GraphStep, owners: tuple[int, ...] = TWO_EACH) -> list[list[str]]:
    """Returns the names of the collectives of each joint step; of others their own."""
    program = XlaProgram("step", (), steps, ())
    found = []
    for step in cut_collectives(program, owners, "region0", "line of {}".format).steps:
        node = step.node if isinstance(step, DeviceStep) else None
        members = node.members if isinstance(node, JointCollectiveNode) else ()
        found.append([each.name for each in members] or [f"({step.name})"])
    return found


def test_only_what_crosses_processes_is_cut() -> None:
    inside = add("inside", use("a"), use("b"), (0, 1), (2, 3))
    across = add("across", use("b"), use("c"), (0, 2), (1, 3))
    assert cut(inside, across, fill("d")) == [["(inside)"], ["across"], ["(d)"]]
    assert cut(inside, across, owners=(3, 3, 3, 3)) == [["(inside)"], ["(across)"]]


def test_neighbours_are_one_call_unless_one_needs_another() -> None:
    first = add("first", use("a"), use("b"))
    second = add("second", use("c"), use("c", 64))
    # Reads what the first one has made; writes what it has made; writes what it reads.
    reader = add("reader", use("b"), use("d"))
    writer = add("writer", use("e"), use("b", 32))
    overwriter = add("overwriter", use("e"), use("a"))
    assert cut(first, second) == [["first", "second"]]
    assert cut(first, second, reader) == [["first", "second"], ["reader"]]
    assert cut(first, writer) == [["first"], ["writer"]]
    assert cut(first, overwriter) == [["first", "overwriter"]]
    assert cut(first, fill("x"), second) == [["first"], ["(x)"], ["second"]]


def test_a_joint_step_reads_and_writes_what_its_members_do() -> None:
    steps = (add("first", use("a"), use("b")), add("second", use("c"), use("d")))
    program = cut_collectives(XlaProgram("step", (), steps, ()), TWO_EACH, "region0", str)
    (joint,) = program.steps
    assert joint.reads == (use("a"), ORDER, use("c"))
    assert joint.writes == (use("b"), ORDER, use("d"))
    assert isinstance(joint, DeviceStep)
    assert (joint.node.arguments, joint.node.results) == (("a", "c"), ("b", "d"))
    moved = joint.move(lambda each: each._replace(buffer=each.buffer + "!"))
    assert (moved.node.arguments, moved.node.results) == (("a!", "c!"), ("b!", "d!"))
    assert moved.node.ranges == (use("a!"), use("b!"), use("c!"), use("d!"))


@pytest.mark.parametrize("construct", list(Construct))
def test_loops_and_branches_cannot_be_cut(construct: Construct) -> None:
    code, shape = KernelCode("set", b""), LaunchShape((1, 1, 1), (1, 1, 1))
    setter = KernelNode("set", code, shape, (ConditionHandle.OWN,), (False,))
    body = (fill("a"), add("psum.7@2", use("a"), use("a")))
    outer = ConditionalStep("loop", construct, (body,), DeviceStep(setter, (), ()))
    with pytest.raises(UnsupportedError, match="over several processes inside of") as caught:
        cut(fill("x"), outer)
    assert caught.value.where == "all-reduce at line of psum.7"
    assert "unroll" in caught.value.fix
    (refused,) = caught.value.refused
    assert (refused.region, refused.kind) == ("region0", "collective")
    assert cut(outer, owners=(0, 0, 0, 0)) == [["(loop)"]]


def test_kernels_of_many_gpus_are_refused_but_processes_may_be_many() -> None:
    everyone = tuple(range(17))
    step = add("psum", use("a"), use("b"), everyone)
    with pytest.raises(UnsupportedError, match="between 17 GPUs, more than 16") as caught:
        cut(step, owners=(0,) * 17)
    assert caught.value.where == "all-reduce at line of psum"
    assert cut(step, owners=everyone) == [["psum"]]
