"""Detached results: which results are computed in a temporary and copied at the end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.fakes.gpu_programs import copy, kernel, make_frame, run_steps, spec
from tracegraph.lowering.detach_results import DETACHED_BYTES, DETACHED_SHARE, detach_results
from tracegraph.lowering.device_program import (
    ConditionalStep,
    Copy,
    DeviceProgram,
    DeviceStep,
    ExecutableCall,
)
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.lowering.request import InputSpec, Role
from tracegraph.runtime.definition.graph import MAX_PATCHED_NODES
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.library_calls import Scale
from tracegraph.runtime.definition.library_nodes import LibraryCallNode
from tracegraph.runtime.definition.nodes import BufferUse, KernelNode

BRANCH = ConditionalStep(
    "branch", Construct.IF, ((kernel("then", "x", "y"),),), kernel("set", "x", "")
)


def program(*steps: Any, nbytes: int = 64, donated: str = "") -> DeviceProgram:
    """Steps one after another: ``x`` is an input, ``y`` a result."""
    inputs = [spec("x"), *([spec(donated, nbytes)] if donated else [])]
    frame = make_frame(inputs, [spec("y", nbytes)], [donated] if donated else [])
    edges = tuple((index, index + 1) for index in range(len(steps) - 1))
    return dataclasses.replace(frame, steps=steps, edges=edges)


def make_scale() -> DeviceStep:
    target = BufferUse("y", 0, 64)
    node = LibraryCallNode("scale", Scale("float32", 16, 2.0), (("target", target),))
    return DeviceStep(node, (target,), (target,))


@pytest.mark.parametrize("step", [BRANCH, make_scale()], ids=["branch", "library"])
def test_a_result_that_cannot_move_is_copied_by_the_last_step(step: Any) -> None:
    before = kernel("before", "x", "y")
    found = detach_results(program(before, step))
    *steps, last = found.steps
    source, target = BufferUse("y.detached", 0, 64), BufferUse("y", 0, 64)
    assert isinstance(last, DeviceStep)
    assert (last.name, last.kind, last.writes) == ("copy_y", "kernel", (target,))
    assert source in last.reads
    assert not any(use.buffer == "y" for step in steps for use in (*step.reads, *step.writes))
    assert {(0, 2), (1, 2)} <= set(found.edges)
    verify_order(found)
    assert [each.name for each in found.buffers] == ["x", "y", "y.detached"]
    assert found.outputs == program().outputs


@pytest.mark.parametrize("waits", [True, False])
def test_the_copy_waits_where_the_kernels_of_the_program_do(waits: bool) -> None:
    first = kernel("before", "x", "y")
    assert isinstance(first.node, KernelNode)
    node = dataclasses.replace(first.node, begins_with_wait=waits)
    steps = dataclasses.replace(first, node=node), make_scale()
    last = detach_results(program(*steps)).steps[-1]
    assert isinstance(last, DeviceStep)
    assert isinstance(last.node, KernelNode)
    assert last.node.begins_with_wait == waits == (b"griddepcontrol.wait" in last.node.code.cubin)


def test_the_value_is_that_of_the_program() -> None:
    given = program(kernel("before", "x", "y"), BRANCH)
    wanted: dict[Any, Any] = {}
    run_steps(given.steps, wanted, None)
    got: dict[Any, Any] = {}
    *steps, last = detach_results(given).steps
    run_steps([*steps, copy("last", "y.detached", "y")], got, None)
    assert last.name == "copy_y"
    assert {key: got[key] for key in wanted if key[0] == "y"} == {
        key: value for key, value in wanted.items() if key[0] == "y"
    }
    assert any(key[0] == "y" for key in wanted)


@pytest.mark.parametrize(
    "steps",
    [
        (kernel("k", "x", "y"),),
        (copy("c", "x", "y"),),
        tuple(kernel(f"k{index}", "x", "y") for index in range(MAX_PATCHED_NODES)),
    ],
)
def test_what_can_be_given_another_address_stays(steps: Any) -> None:
    given = program(*steps)
    assert detach_results(given) is given


def test_the_result_of_many_nodes_is_copied_once() -> None:
    steps = [kernel(f"k{index}", "x", "y") for index in range(MAX_PATCHED_NODES + 1)]
    assert len(detach_results(program(*steps)).steps) == MAX_PATCHED_NODES + 2


@pytest.mark.parametrize("nbytes", [0, DETACHED_BYTES + 1])
def test_a_large_or_empty_result_stays(nbytes: int) -> None:
    given = program(BRANCH, nbytes=nbytes)
    assert detach_results(given) is given


def test_a_result_that_is_small_beside_the_others_is_copied() -> None:
    nbytes = 2 * DETACHED_BYTES
    given = program(BRANCH, nbytes=nbytes)
    more = InputSpec(spec("weights", DETACHED_SHARE * nbytes), Role.DONATED)
    found = detach_results(dataclasses.replace(given, inputs=(*given.inputs, more)))
    assert len(found.steps) == 2


def test_less_than_a_counter_is_copied_by_a_memcpy() -> None:
    branch = ConditionalStep(
        "branch", Construct.IF, ((kernel("then", "x", "y[0:1]"),),), kernel("set", "x", "")
    )
    last = detach_results(program(branch, nbytes=1)).steps[-1]
    assert last == Copy("copy_y", BufferUse("y.detached", 0, 1), BufferUse("y", 0, 1))


def test_results_of_one_place_stay() -> None:
    donated = program(BRANCH, donated="y")
    static = program(BRANCH)
    outputs = tuple(dataclasses.replace(each, is_static=True) for each in static.outputs)
    twice = dataclasses.replace(static, outputs=static.outputs * 2)
    for given in (donated, dataclasses.replace(static, outputs=outputs), twice):
        assert detach_results(given) is given


def test_a_program_that_calls_regions_stays() -> None:
    call = ExecutableCall("eager", None, (), (BufferUse("y", 0, 64),), is_captured=False)
    given = program(call, BRANCH)
    assert detach_results(given) is given
