"""Loops and branches as XLA writes them: what is unrolled, what turns, and which pieces move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.xla_programs import make_copy, make_program, name_thunk
from tracegraph.lowering.device_program import (
    ConditionalStep,
    DeviceStep,
    GraphStep,
    list_device_steps,
)
from tracegraph.lowering.kernels.loops.slices import MovingUse
from tracegraph.lowering.xla import control_flow
from tracegraph.lowering.xla.control_flow import TURN_NODES, UNROLLED_NODES, choose_per_turn
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.scope import Iteration
from tracegraph.lowering.xla.slice_fusion import find_view
from tracegraph.lowering.xla.trip_counts import TripCounts
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import UnsupportedError

COPY = make_copy((1, 0, 32), (3, 0, 32), 32, name="put")
BACK = make_copy((3, 0, 32), (0, 0, 32), 32, name="back")
FLAG = "buffer_allocation_index: 3 offset: 64 size: 1"
COUNTER = BufferUse("counter", 0, 4)


def decode(*thunks: str, has_choices: bool = True) -> tuple[GraphStep, ...]:
    program = make_program(*thunks)
    return decode_executable(program, name="step", has_choices=has_choices).steps


def refuse(*thunks: str) -> str:
    with pytest.raises(UnsupportedError) as raised:
        decode(*thunks)
    return str(raised.value)


def sequence(name: str, thunks: tuple[str, ...]) -> str:
    return f"{name} {{ {' '.join(f'thunks {{ {each} }}' for each in thunks)} }}"


def loop(*body: str, condition: tuple[str, ...] = (), trip_count: int | None = None) -> str:
    known = "" if trip_count is None else f"trip_count: {trip_count}"
    return (
        f"{name_thunk('while')} while_thunk {{ condition_result_buffer_index {{ {FLAG} }} {known} "
        f"{sequence('condition_thunk_sequence', condition)} "
        f"{sequence('body_thunk_sequence', body)} }}"
    )


def branch(*branches: tuple[str, ...], nbytes: int = 1) -> str:
    index = f"buffer_allocation_index: 3 offset: 64 size: {nbytes}"
    inside = " ".join(sequence("branch_thunks", each) for each in branches)
    return (
        f"{name_thunk('cond')} conditional_thunk {{ "
        f"branch_index_buffer {{ slice {{ {index} }} }} {inside} }}"
    )


def list_names(steps: tuple[GraphStep, ...]) -> list[str]:
    return [step.name for step in steps]


def read_conditional(step: GraphStep) -> ConditionalStep:
    assert isinstance(step, ConditionalStep)
    return step


def test_a_short_loop_is_unrolled():
    steps = decode(loop(COPY, BACK, trip_count=3))
    assert list_names(steps) == ["put@0", "back@0", "put@1", "back@1", "put@2", "back@2"]
    assert all(isinstance(step, DeviceStep) for step in steps)


def test_a_loop_that_never_runs_is_nothing():
    assert decode(loop(COPY, BACK, trip_count=0)) == ()


def test_a_long_loop_turns_and_leaves_a_rest():
    trip_count = UNROLLED_NODES + 1
    found, *rest = decode(loop(COPY, trip_count=trip_count))
    step = read_conditional(found)
    assert step.construct is Construct.WHILE
    (body,) = step.bodies
    per_turn = len(body) - 1
    assert TURN_NODES // 2 < per_turn <= TURN_NODES
    turns = trip_count // per_turn
    assert len(rest) == trip_count % per_turn
    assert [each.name for each in rest] == [f"put@{i}" for i in range(turns * per_turn, trip_count)]
    # The counter is one more buffer.
    (counter,) = step.setter.writes
    assert body[-1].reads == body[-1].writes == (counter,)
    program = decode_executable(make_program(loop(COPY, trip_count=trip_count)), name="step")
    assert [each.nbytes for each in program.allocations if each.name == counter.buffer] == [4]


@pytest.mark.parametrize(
    ("size", "copies", "per_turn"),
    # Up to one half of the nodes are copies that count for nothing.
    [(10, 0, 100), (11, 0, 20), (20, 10, 100), (20, 15, 100), (21, 15, 10), (20, 5, 10)],
)
def test_copies_of_pieces_do_not_keep_a_loop_from_being_unrolled(
    size: int, copies: int, per_turn: int
) -> None:
    assert choose_per_turn(100, size, copies) == per_turn


def test_a_loop_of_unknown_length_asks_before_and_after_each_turn():
    *before, found = decode(loop(BACK, condition=(COPY,)))
    assert list_names(tuple(before)) == ["put"]
    step = read_conditional(found)
    (body,) = step.bodies
    assert list_names(body) == ["back", "put@again", "while@condition"]
    assert step.setter.reads == body[-1].reads == (BufferUse("#3", 64, 1),)


@pytest.mark.parametrize(
    ("least", "most", "construct"),
    [(2, None, Construct.WHILE), (2, 4, Construct.WHILE), (2, 3, Construct.IF), (2, 2, None)],
)
def test_certain_iterations_come_ahead_of_a_loop(
    least: int, most: int | None, construct: Construct | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(control_flow, "find_trip_counts", lambda *_: TripCounts(least, most))
    ahead, rest = ["back@0", "back@1"], ["put", "while"]
    steps = decode(loop(BACK, condition=(COPY,)))
    assert list_names(steps) == (ahead if construct is None else [*ahead, *rest])
    if construct is None:
        return
    step = read_conditional(steps[-1])
    assert step.construct is construct
    assert step.setter.reads == (BufferUse("#3", 64, 1),)
    after = ["put@again", "while@condition"] if construct is Construct.WHILE else []
    assert list_names(step.bodies[0]) == ["back", *after]


def test_too_many_certain_iterations_stay_in_the_loop(monkeypatch: pytest.MonkeyPatch):
    trips = TripCounts(TURN_NODES + 1, TURN_NODES + 1)
    monkeypatch.setattr(control_flow, "find_trip_counts", lambda *_: trips)
    assert list_names(decode(loop(BACK, condition=(COPY,)))) == ["put", "while"]


def test_a_choice_of_two():
    (found,) = decode(branch((COPY, BACK), (BACK,)))
    step = read_conditional(found)
    assert (step.construct, len(step.bodies)) == (Construct.IF, 2)
    assert list_names(step.bodies[0]) == ["put", "back"]
    # Bodies at the end that do nothing are left out.
    (found,) = decode(branch((COPY,), ()))
    assert len(read_conditional(found).bodies) == 1
    assert decode(branch((), ())) == ()


def test_a_choice_by_index():
    (found,) = decode(branch((COPY,), (), (BACK,), nbytes=4))
    step = read_conditional(found)
    assert (step.construct, len(step.bodies)) == (Construct.SWITCH, 3)
    assert step.setter.reads == (BufferUse("#3", 64, 4),)


@pytest.mark.parametrize(("nbytes", "branches"), [(1, 2), (4, 3)])
def test_an_older_driver_takes_branches_one_by_one(nbytes: int, branches: int) -> None:
    thunk = branch((COPY,), *[(BACK, COPY)] * (branches - 1), nbytes=nbytes)
    keep, *found = decode(thunk, has_choices=False)
    steps = [read_conditional(each) for each in found]
    assert [each.construct for each in steps] == [Construct.IF] * branches
    assert [len(each.bodies) for each in steps] == [1] * branches
    assert list_names(steps[1].bodies[0]) == ["back", "put"]
    # What is inside may write where the index is: all nodes read a copy of it.
    assert keep.reads == (BufferUse("#3", 64, nbytes),)
    assert {each.setter.reads for each in steps} == {keep.writes}
    assert len({each.name for each in steps}) == branches


def test_an_older_driver_takes_one_branch_as_it_is() -> None:
    (found,) = decode(branch((COPY,), ()), has_choices=False)
    assert found == decode(branch((COPY,), ()))[0]
    # An index that is not a flag names its branches; those that do nothing are left out.
    _, found = decode(branch((), (COPY,), (), nbytes=4), has_choices=False)
    assert found.name == "cond@1"


@pytest.mark.parametrize(
    ("thunk", "reason"),
    [
        (loop(COPY, trip_count=-1), "loops -1 times"),
        (branch((COPY,), (BACK,), (COPY,)), "chooses among 3 branches by 1 bytes"),
        (branch((COPY,), (BACK,), nbytes=8), "chooses among 2 branches by 8 bytes"),
        (branch(nbytes=4), "chooses among 0 branches by 4 bytes"),
        (loop(COPY).replace("size: 1", "size: 2"), "loops on a condition of 2 bytes"),
        (loop(COPY).replace("offset: 64", "offset: 640"), "names bytes 640 to 641"),
    ],
)
def test_what_contradicts_itself_is_refused(thunk: str, reason: str):
    assert reason in refuse(thunk)


def test_what_is_refused_inside_is_named_once():
    text = refuse(loop(COPY, f"{name_thunk('inner')} infeed_thunk {{ }}", trip_count=5))
    assert "`step` has work that cannot be lowered: infeed (1)" in text


def test_a_loop_in_a_branch_in_a_loop():
    inner = branch((loop(COPY, trip_count=2),), (BACK,))
    *_, found = decode(loop(inner, condition=(COPY,)))
    steps = list(list_device_steps([found]))
    names = ["while@condition", "cond@condition", "put@0", "put@1", "back"]
    assert list_names(tuple(steps))[:5] == names


def make_part(offset: int, stride: int, loop_index: int = 0, **linear: int) -> Any:
    config = SimpleNamespace(
        DESCRIPTOR=SimpleNamespace(fields_by_name={"linear": None} if linear else {}),
        HasField=lambda name: name == "linear",
        byte_offset=offset,
        byte_stride=stride,
        loop_index=loop_index,
        linear=SimpleNamespace(**{"byte_offset": 0, "byte_stride": 0, **linear}),
    )
    return SimpleNamespace(HasField=lambda name: name == "slice_config", slice_config=config)


WHOLE = BufferUse("#3", 128, 256)


@pytest.mark.parametrize(
    ("part", "iterations", "offset"),
    [
        (make_part(64, 0), (), 192),
        (make_part(64, 0, byte_offset=64), (), 192),
        (make_part(64, 16), (Iteration(2),), 224),
        (make_part(64, 16, 1), (None, Iteration(1)), 208),
        # Moved inside its bounds, at either end.
        (make_part(64, 16), (Iteration(99),), 128 + 256 - 16),
        (make_part(-64, 16), (Iteration(1),), 128),
    ],
)
def test_a_piece_at_an_offset_that_is_known(part: Any, iterations: Any, offset: int):
    assert find_view(WHOLE, part, "slice", 16, iterations) == BufferUse("#3", offset, 16)


def test_a_piece_that_moves_with_the_turns():
    turning = Iteration(3, 8, COUNTER)
    found = find_view(WHOLE, make_part(0, 16), "slice", 16, (turning,))
    assert found == (MovingUse(WHOLE, 16, 48, 128), COUNTER)


@pytest.mark.parametrize(
    ("part", "iterations", "reason"),
    [
        (make_part(64, 0, byte_offset=32), (), "slices at two different offsets"),
        (make_part(64, 0, byte_offset=64, byte_stride=8), (), "slices at two different offsets"),
        (make_part(64, 16), (), "a loop moves which does not count"),
        (make_part(64, 16), (None,), "a loop moves which does not count"),
        (make_part(64, 16, 1), (Iteration(0),), "a loop moves which does not count"),
    ],
)
def test_a_piece_whose_place_is_not_known_is_refused(part: Any, iterations: Any, reason: str):
    with pytest.raises(Refusal, match=reason):
        find_view(WHOLE, part, "slice", 16, iterations)
