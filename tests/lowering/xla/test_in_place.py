"""Kernels that work in place on what an earlier step of their instruction has put there.

XLA says of an argument that a kernel writes it, not that the kernel reads it too. The oracle knows
what each kernel reads from the way the programs are made; what the decoded steps say of that only
decides which steps are kept, and when memory is used again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.gpu_programs import make_frame, make_region, run_steps, shuffle_order, spec
from tests.fakes.xla_programs import (
    edit_computation,
    make_copy,
    make_kernel,
    make_program,
    name_thunk,
    shaped,
)
from tracegraph.lowering.assemble import XlaRegion, assemble
from tracegraph.lowering.build_graph import build_graph
from tracegraph.lowering.device_program import DeviceStep, Step
from tracegraph.lowering.planning.drop_steps import drop_unread
from tracegraph.lowering.planning.forward_copies import forward_copies
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import plan_memory
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.program import XlaProgram
from tracegraph.runtime.definition.nodes import KernelNode

RESULT, X = (0, 0, 32), (1, 0, 32)
# Few places, so that each is used again.
PLACES = [(3, offset, 32) for offset in (0, 128, 256)]
IN, OUT = spec("x", 32), spec("n", 32)


@dataclasses.dataclass
class Instructions:
    """A program in the making, and for each of its kernels the parameters that it really reads."""

    thunks: list[str] = dataclasses.field(default_factory=list)
    read: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    names: list[str] = dataclasses.field(default_factory=list)

    def launch(self, name: str, places: Any, text: str, *, reads: tuple[int, ...]) -> None:
        symbol = f"kernel_{len(self.thunks)}"
        thunk = make_kernel(places, (False, True, True)[: len(places)], name=name, text=text)
        self.thunks.append(thunk.replace(f"{name}_kernel", symbol))
        self.read[symbol] = reads

    def add(self, kind: str, source: Any, target: Any, keys: Any = PLACES[0]) -> None:
        """Adds an instruction with one operand and one result; a sort has its keys besides."""
        name = f"{kind}.{len(self.names)}"
        self.names.append(name)
        if kind == "map":
            self.launch(name, (source, target), "", reads=(0,))
        elif kind == "sum":
            self.launch(name, (source, target), "zeroed_output_buffer_indices: 1", reads=(0, 1))
        elif kind == "old_sum":
            zeros = f"memzero_thunk {{ {shaped('dest_buffer', target)} }}"
            self.thunks.append(f"{name_thunk(name)} {zeros}")
            self.launch(name, (source, target), "", reads=(0, 1))
        else:
            if source != keys:
                self.thunks.append(make_copy(source, keys, 32, name=name))
            # The first kernel writes the numbers of the keys, those after it sort them too.
            for reads in ((1,), (1, 2)):
                self.launch(name, (source, keys, target), "", reads=reads)

    def decode(self) -> XlaProgram:
        program = make_program(*self.thunks)
        with edit_computation(program) as computation:
            for name in self.names:
                added = computation.instructions.add()
                added.CopyFrom(computation.instructions[2])
                added.name = name
                del added.operand_ids[1:]
                if name.startswith("sort"):
                    added.shape.Clear()
                    added.shape.tuple_shapes.extend([computation.instructions[2].shape] * 2)
        return decode_executable(program, name="step")

    def correct(self, step: Step) -> Step:
        """Returns a step that reads what the node reads, whatever was decoded."""
        if not isinstance(step, DeviceStep) or not isinstance(step.node, KernelNode):
            return step
        uses: Any = step.node.parameters
        reads = tuple(uses[index] for index in self.read[step.node.code.symbol])
        return dataclasses.replace(step, reads=reads)


def run_both(made: Instructions, seed: int) -> tuple[list[Any], list[Any]]:
    """Returns the tokens of the result in XLA's program, and in the graph made of it."""
    program = made.decode()
    expected = {("#1", i): f"x{i}" for i in range(32)}
    run_steps([made.correct(step) for step in program.steps], expected, None)  # type: ignore[arg-type]

    region = XlaRegion(make_region("r", [IN, spec("y", 32)], [OUT]), program)
    frame = make_frame(region.region.inputs, [OUT])
    planned = forward_copies(drop_unread(assemble([region], (), into=frame))).program
    plan = plan_memory("f", find_lifetimes(planned))
    stage = build_graph(planned, plan).stages[0]
    memory: Any = {("arena", i): "poison" for i in range(plan.arena_bytes)}
    memory |= {("arena", plan.offsets["x"] + i): f"x{i}" for i in range(32)}
    nodes = [stage.nodes[index] for index in shuffle_order(len(stage.nodes), stage.edges, seed)]
    # Nodes have an order of their own.
    steps = {id(step.node): step for step in planned.steps if isinstance(step, DeviceStep)}
    run_steps([made.correct(steps[id(node)]) for node in nodes], memory, plan.offsets, nodes)
    found = [memory["arena", plan.offsets["n"] + i] for i in range(32)]
    return [expected["#0", i] for i in range(32)], found


def test_a_sort_reads_the_copy_that_it_is_done_in():
    made = Instructions()
    made.add("sort", X, PLACES[1], keys=PLACES[0])
    # The sorted keys are not used, and their place is.
    made.add("map", PLACES[1], PLACES[0])
    made.add("map", PLACES[0], RESULT)
    copy, first, second, *maps = made.decode().steps
    (keys,) = copy.writes
    numbers = first.writes[1]
    assert first.reads == (copy.reads[0], keys)
    assert second.reads == (copy.reads[0], keys, numbers)
    # What another instruction has written is only overwritten.
    assert [len(step.reads) for step in maps] == [1, 1]
    expected, found = run_both(made, 0)
    assert found == expected


@settings(max_examples=60)
@given(st.data(), st.integers(0, 99))
def test_instructions_of_several_steps_give_the_same_in_every_order(data: Any, seed: int):
    made, defined = Instructions(), [X]
    kinds = st.sampled_from(["sort", "map", "sum", "old_sum"])
    for left in reversed(range(data.draw(st.integers(1, 5)))):
        kind, source = data.draw(kinds), data.draw(st.sampled_from(defined))
        free = [place for place in PLACES if place != source]
        target = data.draw(st.sampled_from(free)) if left else RESULT
        keys = data.draw(st.sampled_from([place for place in PLACES if place != target]))
        made.add(kind, source, target, keys)
        written = [target, keys] if kind == "sort" else [target]
        defined = list(dict.fromkeys([*defined, *written]))
    expected, found = run_both(made, seed)
    assert None not in expected
    assert found == expected
