"""Kernels of our own wait by themselves where those of XLA do."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess

import pytest

from tests.deviceless import topology
from tracegraph.lowering.build_graph import find_programmatic
from tracegraph.lowering.device_program import ConditionalStep, DeviceStep
from tracegraph.lowering.kernels.loops.conditions import (
    CONDITIONS,
    FIRST_LINES,
    count_turn,
    set_flag,
    start_turns,
)
from tracegraph.lowering.kernels.loops.counters import count_values
from tracegraph.lowering.kernels.loops.guards import end_turn, keep_state
from tracegraph.lowering.kernels.loops.slices import MovingUse, copy_slice
from tracegraph.lowering.kernels.loops.waits import add_waits
from tracegraph.lowering.xla.machine_code import waits_first
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, KernelNode, LaunchShape

FLAG, COUNTER, PIECE = BufferUse("a", 0, 1), BufferUse("b", 0, 4), BufferUse("c", 0, 64)
TARGET = BufferUse("d", 0, 64)
OWN = [
    keep_state("keep", [(PIECE, TARGET)]),
    copy_slice("slice", MovingUse(TARGET, 4, 0, 4), MovingUse(FLAG, 4, 0), COUNTER),
    end_turn("turn", [FLAG, FLAG], [(PIECE, [TARGET])]),
    set_flag("again", FLAG),
    count_values("count", COUNTER, PIECE, 1, 1),
]


def make_xla_kernel(begins_with_wait: bool) -> DeviceStep:
    shape = LaunchShape((1, 1, 1), (1, 1, 1))
    code = KernelCode("fusion", b"\x7fELF" + CONDITIONS)
    node = KernelNode("fusion", code, shape, (PIECE,), (True,), begins_with_wait)
    return DeviceStep(node, (), (PIECE,))


def read_kernel(step: object) -> KernelNode:
    assert isinstance(step, DeviceStep)
    assert isinstance(step.node, KernelNode)
    return step.node


def test_kernels_of_our_own_wait_where_those_of_xla_do():
    first = make_xla_kernel(begins_with_wait=True)
    body = (first, *OWN, count_turn("count", COUNTER, 3))
    loop = ConditionalStep("loop", Construct.WHILE, (body,), start_turns("start", COUNTER))
    (found,) = add_waits([loop])
    assert isinstance(found, ConditionalStep)
    # One text of each kernel, not two: that of the setter is that of the body.
    setter = read_kernel(found.setter)
    assert setter.begins_with_wait
    assert setter.code.cubin == read_kernel(found.bodies[0][-1]).code.cubin
    assert found.bodies[0][0] == first
    for before, after in zip(body[1:], found.bodies[0][1:], strict=True):
        old, new = read_kernel(before), read_kernel(after)
        assert new.begins_with_wait
        assert dataclasses.replace(new, code=old.code, begins_with_wait=False) == old
        entries = new.code.cubin.split(b".visible .entry")[1:]
        assert len(entries) == old.code.cubin.count(b".visible .entry") > 0
        # The wait comes before all else that a kernel does.
        assert all(each.split(b"{")[1].split()[0] == b"griddepcontrol.wait;" for each in entries)
    nodes = [read_kernel(each) for each in found.bodies[0]]
    edges = [(index, index + 1) for index in range(len(nodes) - 1)]
    assert find_programmatic(nodes, edges, frozenset(map(id, nodes))) == {*edges}


def test_where_no_kernel_of_xla_waits_ours_do_not():
    steps = (make_xla_kernel(begins_with_wait=False), *OWN)
    assert add_waits(steps) == steps
    assert all(b"griddepcontrol" not in read_kernel(each).code.cubin for each in OWN)
    assert all(read_kernel(each).code.cubin.startswith(FIRST_LINES) for each in OWN)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("index", range(len(OWN)))
def test_the_assembler_takes_a_text_that_waits(index: int, target: str, tmp_path: pathlib.Path):
    assembler = topology.find_assembler()
    if assembler is None:
        pytest.skip("needs the wheel of nvcc; run make deviceless")
    _, step = add_waits([make_xla_kernel(begins_with_wait=True), OWN[index]])
    code = read_kernel(step).code
    source, image = tmp_path / "kernels.ptx", tmp_path / "out"
    source.write_bytes(code.cubin.rstrip(b"\0"))
    command = [assembler, f"-arch={target}", "-c", str(source), "-o", str(image)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    # And moves no load ahead of the wait: our kernels read nothing as constant.
    assert waits_first(KernelCode(code.symbol, image.read_bytes()))
