"""Build: stages, nodes and edges of a graph definition, and its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.lowering.build_graph import build_graph
from tracegraph.lowering.device_program import BufferUse, Copy, DeviceProgram, ExecutableCall
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import plan_memory
from tracegraph.lowering.request import BufferSpec, InputSpec, OutputSpec, Role
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.nodes import CallNode, CopyNode
from tracegraph.runtime.errors import InternalError

jax.config.update("jax_platforms", "cpu")
SHAPE, DTYPE = (16,), np.dtype(np.float32)


def use(name: str) -> BufferUse:
    return BufferUse(name, 0, 64)


def call(name: str, reads: str, writes: str, stream: int = 0, *, eager: bool = False) -> Any:
    return ExecutableCall(
        name,
        None,
        tuple(map(use, reads.split())),
        tuple(map(use, writes.split())),
        stream,
        not eager,
    )


def copy(source: str, target: str) -> Copy:
    return Copy(f"update_{target}", use(source), use(target))


def program(*steps: Any, edges: Any, outputs: Any = (("y", None),)) -> DeviceProgram:
    """Returns a program with the inputs ``x`` and ``s`` (donated)."""
    names = dict.fromkeys(["x", "s", *(u.buffer for step in steps for u in step.writes)])
    buffers = {name: BufferSpec(name, SHAPE, DTYPE) for name in names}
    return DeviceProgram(
        "f",
        tuple(buffers.values()),
        steps,
        edges,
        (InputSpec(buffers["x"], Role.COPIED), InputSpec(buffers["s"], Role.DONATED)),
        tuple(OutputSpec(buffers[name], alias) for name, alias in outputs),
    )


def build(wanted: DeviceProgram) -> GraphDefinition:
    return build_graph(wanted, plan_memory(wanted.name, find_lifetimes(wanted)))


FORK = (
    call("a", "x", "t"),
    call("b", "t", "u", 1),
    call("c", "t", "v", 2),
    call("d", "u v", "y"),
)
FORK_EDGES = ((0, 1), (0, 2), (0, 3), (1, 3), (2, 3))


def test_edges_are_reduced():
    definition = build(program(*FORK, edges=FORK_EDGES))
    (stage,) = definition.stages
    assert [node.name for node in stage.nodes] == ["a", "b", "c", "d"]
    assert stage.edges == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert (definition.node_count, definition.edge_count) == (4, 4)


@pytest.mark.parametrize("missing", [(0, 1), (0, 2), (1, 3), (2, 3)])
def test_an_edge_that_calls_lack_is_an_error_of_ours(missing: tuple[int, int]):
    edges = tuple(edge for edge in FORK_EDGES if edge not in (missing, (0, 3)))
    first, second = FORK[missing[0]].name, FORK[missing[1]].name
    with pytest.raises(InternalError, match=f"`{second}` shares bytes with `{first}`") as raised:
        build(program(*FORK, edges=edges))
    assert raised.value.fix.startswith("internal error")


def test_eager_steps_are_stages_of_their_own():
    steps = (
        call("a", "x", "t"),
        call("e", "t", "u", eager=True),
        call("g", "u", "v", eager=True),
        call("b", "v", "w"),
        call("c", "t", "y", 1),
        copy("w", "s"),
    )
    edges = ((0, 1), (1, 2), (2, 3), (2, 4), *((index, 5) for index in range(5)))
    definition = build(program(*steps, edges=edges, outputs=(("s", "s"), ("y", None))))
    assert [[node.name for node in stage.nodes] for stage in definition.stages] == [
        ["a"],
        ["e"],
        ["g"],
        ["b", "c", "update_s"],
    ]
    assert [stage.is_captured for stage in definition.stages] == [True, False, False, True]
    # Indices count within the stage; what crosses stages is ordered by the stages.
    assert definition.stages[3].edges == ((0, 2), (1, 2))
    assert definition.node_count == 4


def test_nodes_and_slots():
    steps = (call("a", "x s", "n y"), copy("n", "s"))
    definition = build(program(*steps, edges=((0, 1),), outputs=(("s", "s"), ("y", None))))
    first, second = definition.stages[0].nodes
    assert isinstance(first, CallNode)
    assert isinstance(second, CopyNode)
    assert (first.arguments, first.results) == (("x", "s"), ("n", "y"))
    assert (second.arguments, second.results) == (("n",), ("s",))
    assert {slot.name: slot.is_resident for slot in definition.slots} == {
        "x": False,
        "s": True,
        "n": False,
        "y": False,
    }
    assert all(slot.offset % 256 == 0 for slot in definition.slots)
    assert (definition.inputs, definition.outputs) == (("x", "s"), ("s", "y"))


def test_a_donated_input_that_no_result_updates_is_not_resident():
    definition = build(program(call("a", "x s", "y"), edges=()))
    assert not any(slot.is_resident for slot in definition.slots)


def test_a_program_without_steps_has_no_stages():
    definition = build(program(edges=(), outputs=(("x", None),)))
    assert definition.stages == ()
    assert definition.node_count == 0


def test_text_of_a_definition(golden: Callable[[str, str], None]):
    steps = (
        *FORK[:3],
        call("e", "v", "p", eager=True),
        call("d", "u p", "n y"),
        copy("n", "s"),
    )
    edges = ((0, 1), (0, 2), (0, 3), (1, 3), (2, 3), (3, 4), *((i, 5) for i in range(5)))
    definition = build(program(*steps, edges=edges, outputs=(("s", "s"), ("y", None))))
    golden("definition_with_an_eager_stage", f"{definition}\n")


def _step(state: Any, x: Any) -> Any:
    side = tg.Stream()
    side.wait_stream(tg.current_stream())
    with tg.stream(side):
        moved = state["position"] + state["speed"]
    slowed = state["speed"] * 0.5
    tg.current_stream().wait_stream(side)
    return {"position": moved, "speed": slowed - x}, jnp.max(moved)


ARGUMENTS = ({"position": jnp.arange(4.0), "speed": jnp.ones(4)}, jnp.ones(4))


def test_text_of_a_lowered_capture(golden: Callable[[str, str], None]):
    lowered = tg.capture(_step, donate_argnums=0, name="step").lower(*ARGUMENTS)
    golden("lowered_two_streams", f"{lowered}\n")


def test_text_of_a_report(golden: Callable[[str, str], None]):
    report = tg.capture(_step, donate_argnums=0, name="step").explain(*ARGUMENTS, show="all")
    # Streams and events are numbered through the process, and lines move with this file.
    report = re.sub(r" +(# )?(tests/lowering/)?test_build_graph.py:\d+ in \w+", "", report)
    report = re.sub(r"event=\d+", "event=E", report)
    report = re.sub(r"stream( |=)[1-9]\d*", r"stream\1S", report)
    golden("explain_two_streams", f"{report}\n")


def test_text_of_a_report_that_refuses():
    report = tg.capture(lambda x: jnp.sin(x) + float(x[0]), name="f").explain(jnp.ones(4))
    assert report.startswith("`f` cannot be captured (mode='whole', outputs='fresh')")
    assert "\nviolations\n" in report
    for line in ("where:", "why:", "fix:"):
        assert f"\n    {line}" in report
