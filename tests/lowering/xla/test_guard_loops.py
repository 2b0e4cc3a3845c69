"""Guarded iterations: what is kept of a loop's state, and loops that leave the same bytes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.gpu_programs import copy, fill, kernel, use
from tests.fakes.open_loops import (
    COMPARE,
    NAMES,
    count_wrong,
    draw_program,
    guard,
    lay_out,
    make_instructions,
    make_loop,
)
from tracegraph.lowering.device_program import (
    ConditionalStep,
    DeviceStep,
    GraphStep,
    list_device_steps,
)
from tracegraph.lowering.kernels.loops import counters, guards
from tracegraph.lowering.kernels.loops.conditions import start_turns
from tracegraph.lowering.kernels.loops.counters import count_values
from tracegraph.lowering.planning.byte_edges import find_edges
from tracegraph.lowering.xla import count_ahead, loop_state
from tracegraph.lowering.xla import guard_loops as module
from tracegraph.lowering.xla.guard_loops import MOST_PER_TURN, choose_guarded
from tracegraph.runtime.definition.graph_nodes import Construct, Turn

DOUBLE = kernel("double", "x", "x")


def guard_one(*body: GraphStep, results: str = "x", computations: Any = None) -> ConditionalStep:
    (step,), _ = guard([make_loop(*body)], results, computations)
    assert isinstance(step, ConditionalStep)
    return step


def list_names(step: ConditionalStep) -> list[str]:
    return [each.name for each in step.bodies[0]]


def find(step: ConditionalStep, name: str) -> DeviceStep:
    (found,) = [each for each in step.bodies[0] if each.name == name]
    assert isinstance(found, DeviceStep)
    return found


def test_what_is_updated_in_place_is_copied_beside_the_condition() -> None:
    step = guard_one(DOUBLE)
    assert step.turn == Turn(5, is_guarded=True)
    first = ["double@guarded.1", "count@guarded.1", "compare@guarded.1", "loop@keep.1"]
    assert list_names(step)[:4] == first
    assert list_names(step)[-2:] == ["compare@guarded.5", "loop@turn"]
    assert list_names(step).count("loop@keep.5") == 0
    # Nothing after the loop reads the counter: it is not kept.
    assert find(step, "loop@keep.1").reads == (use("x"),)
    assert find(step, "loop@turn").writes == (use("x"),)
    edges = find_edges(step.bodies[0], lay_out(step.bodies[0]))
    assert (2, 3) not in edges


def test_what_counts_a_loop_counts_ahead() -> None:
    step = guard_one(DOUBLE, computations=make_instructions(adds=True))
    assert step.turn == Turn(5, is_guarded=True)
    names = list_names(step)
    assert names[:4] == ["loop@count", "double@guarded.1", "compare@guarded.1", "loop@keep.1"]
    assert names[4] == "loop@counted"
    assert not [name for name in names if name.startswith("count@")]
    places = [find(step, f"compare@guarded.{number}").reads[0] for number in range(1, 6)]
    # The last one finds the counter where the next turn does.
    assert len({*places}) == 5
    assert places[-1] == use("counter[0:4]")


def test_two_counters_have_values_of_their_own() -> None:
    computations = make_instructions("k0", "more", adds=True)
    computations[0]["more"].called_computation_ids = (1,)
    body = (kernel("k0", "other[0:4]", "x"), kernel("more", "other[0:4]", "other[0:4]"))
    step = guard_one(*body, computations=computations)
    assert step.turn is not None
    last = step.turn.iterations
    assert list_names(step).count("loop@count") == list_names(step).count("loop@counted") == 2
    names = [f"k0@guarded.{i}" for i in range(2, last + 1)]
    names += [f"compare@guarded.{i}" for i in range(1, last)]
    assert len({find(step, name).reads for name in names}) == len(names)


def test_an_inner_loop_that_is_unrolled_is_guarded_too() -> None:
    inner = count_values("inner@count", use("n[0:4]"), use("m[0:260]"), 1, 1)
    step = guard_one(kernel("reset", "x", "n[0:4]"), inner, DOUBLE)
    assert step.turn == Turn(1)
    step = guard_one(
        kernel("reset", "x", "n[0:4]"), inner, DOUBLE, computations=make_instructions("reset")
    )
    assert step.turn is not None
    assert step.turn.is_guarded


def test_a_counter_that_is_read_after_the_loop_does_not_count_ahead() -> None:
    step = guard_one(DOUBLE, results="x counter[0:4]", computations=make_instructions(adds=True))
    assert "count@guarded.1" in list_names(step)
    assert not [name for name in list_names(step) if name.startswith("loop@count")]


def test_what_is_written_anew_costs_no_copy() -> None:
    computations = make_instructions("advance", "back")
    body = (kernel("advance", "x", "t"), kernel("back", "t", "x"))
    step = guard_one(*body, computations=computations)
    assert not [name for name in list_names(step) if "keep" in name]
    first, second = find(step, "back@guarded.1"), find(step, "advance@guarded.2")
    # An iteration reads what the one before has written.
    assert first.writes[0].buffer == "added1"
    assert second.reads == first.writes
    assert step.turn is not None
    assert find(step, f"back@guarded.{step.turn.iterations}").writes == (use("x"),)


def test_a_memcpy_at_the_end_of_a_body_is_left_out() -> None:
    computations = make_instructions("advance", "back", "more")
    body = (kernel("advance", "x", "t"), kernel("more", "t", "t"), copy("back", "t", "x"))
    step = guard_one(*body, computations=computations)
    assert step.turn is not None
    assert not [name for name in list_names(step) if "back" in name or "keep" in name]
    first, second = find(step, "advance@guarded.1"), find(step, "advance@guarded.2")
    assert first.writes[0].buffer == "added1"
    assert find(step, "more@guarded.1").writes == second.reads == first.writes
    assert find(step, f"more@guarded.{step.turn.iterations}").writes == (use("x"),)


def test_a_memcpy_from_where_the_flag_is_later_is_left_out() -> None:
    computations = make_instructions("advance", "back")
    body = (kernel("advance", "x", "flag[0:64]"), copy("back", "flag[0:64]", "x"))
    step = guard_one(*body, computations=computations)
    assert not [name for name in list_names(step) if "back" in name or "keep" in name]
    assert find(step, "advance@guarded.1").writes[0].buffer == "added1"
    assert find(step, "compare@guarded.1").writes != find(step, "compare@guarded.2").writes


@pytest.mark.parametrize(
    "body",
    [
        # The source is read afterwards, or by the next iteration, or after the loop.
        (kernel("k0", "x", "t"), copy("back", "t", "x"), kernel("k1", "t", "u")),
        (kernel("k0", "x t[0:4]", "u"), kernel("k1", "u", "t"), copy("back", "t", "x")),
        (kernel("k0", "x", "y"), copy("back", "y", "x")),
        # Something else is in the place of the piece meanwhile.
        (kernel("k0", "y", "t"), kernel("k1", "y", "x"), copy("back", "t", "x")),
        # A step names more than the source.
        (kernel("k0", "x", "t"), kernel("k1", "t[0:72]", "u"), copy("back", "t", "x")),
        # Its address has another remainder.
        (kernel("k0", "x", "t[4:68]"), copy("back", "t[4:68]", "x")),
    ],
)
def test_a_memcpy_stays_where_its_source_is_needed(body: Any) -> None:
    computations = make_instructions("k0", "k1", "back")
    step = guard_one(*body, results="x y", computations=computations)
    assert step.turn is not None
    assert sum("back" in name for name in list_names(step)) == step.turn.iterations


def test_a_place_that_holds_other_values_too() -> None:
    """The flag's byte is scratch first, as XLA packs it."""
    computations = make_instructions("sum", "put")
    body = (kernel("sum", "x", "flag[0:4]"), kernel("put", "x flag[0:4]", "x"))
    step = guard_one(*body, computations=computations)
    assert find(step, "sum@guarded.1").writes == (use("flag[0:4]"),)
    assert find(step, "compare@guarded.1").writes[0].buffer == "added1"
    assert find(step, "loop@keep.1").reads == (use("x"),)


def test_what_nothing_reads_is_not_kept() -> None:
    (step,), added = guard([make_loop(DOUBLE)], "y")
    assert isinstance(step, ConditionalStep)
    assert find(step, "loop@turn").writes == ()
    # Flags only.
    assert added == [256 * (len([n for n in list_names(step) if "count" in n]) - 1)]


def test_an_inner_loop_keeps_what_the_next_turn_of_the_outer_one_reads() -> None:
    start = start_turns("outer@start", use("turns[0:4]"))
    reset = kernel("reset", "y", "counter[0:4]")
    body = (reset, COMPARE, make_loop(DOUBLE))
    outer = ConditionalStep("outer", Construct.WHILE, (body,), start, turn=Turn(1))
    (step,), _ = guard([outer], "y", make_instructions("reset"))
    assert isinstance(step, ConditionalStep)
    assert step.turn == Turn(1)
    inner = step.bodies[0][-1]
    assert isinstance(inner, ConditionalStep)
    assert find(inner, "loop@turn").writes == (use("x"),)


def test_copies_of_a_loop_share_what_is_added() -> None:
    steps: list[GraphStep] = []
    for number in range(3):
        reset = kernel("reset", "y", "counter[0:4]")
        steps += [reset, COMPARE, make_loop(DOUBLE, name=f"loop@{number}")]
    found, added = guard(steps, "x")
    assert len(added) == 1
    assert [step.turn for step in found if isinstance(step, ConditionalStep)] == [Turn(5, True)] * 3


def test_many_copies_of_a_loop_do_not_make_the_graph_much_larger() -> None:
    loops = [make_loop(DOUBLE, name=f"loop@{number}") for number in range(200)]
    steps, _ = guard(loops, "x")
    added = sum(len(step.bodies[0]) - 4 for step in steps if isinstance(step, ConditionalStep))
    assert 0 < added <= module.ADDED_NODES


@pytest.mark.parametrize(
    ("body", "opcodes"),
    [
        # A user's kernel may never end on what it does not expect.
        ((DOUBLE,), {"double": "custom_call"}),
        ((DOUBLE,), {"double": "rng_get_and_update_state"}),
        ((kernel("unknown", "x", "x"),), {}),
        ((make_loop(DOUBLE, name="inner"), DOUBLE), {}),
        ((kernel("double", "x[0:65537]", "x[0:65537]"),), {}),
        (tuple(kernel("double", f"x{i}", f"x{i}") for i in range(17)), {}),
        # The flag is a part of the state.
        ((kernel("double", "flag[0:8]", "flag[0:8]"),), {}),
        # Too long for another one to pay.
        ((DOUBLE,) * 40, {}),
        ((kernel("double", "w[0:100000000] x", "x"),), {}),
    ],
    ids=str,
)
def test_what_keeps_one_iteration_per_turn(body: Any, opcodes: Any) -> None:
    results = "x[0:65537] flag[0:8] " + " ".join(f"x{i}" for i in range(17))
    (step,), _ = guard([make_loop(*body)], results, make_instructions(**opcodes))
    assert isinstance(step, ConditionalStep)
    assert step.turn == Turn(1)


def test_a_fusion_with_a_call_inside_keeps_one_iteration_per_turn() -> None:
    computations = make_instructions()
    computations[0]["double"].called_computation_ids = (1,)
    computations[1] = {"inside": SimpleNamespace(opcode="multiply", called_computation_ids=())}
    assert guard_one(DOUBLE, computations=computations).turn == Turn(5, is_guarded=True)
    computations[1]["inside"].opcode = "custom-call"
    assert guard_one(DOUBLE, computations=computations).turn == Turn(1)


def test_the_rule_of_cost() -> None:
    sizes = [choose_guarded(size, 1.0) for size in range(1, 60)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (6, 1)
    assert choose_guarded(0.5, 0.0) == MOST_PER_TURN
    assert choose_guarded(1, 1.0, 2) == 2
    assert choose_guarded(1, 1.0, 0) == 1
    # A loop that ends after its first iteration loses no more than an iteration of XLA takes.
    assert all((sizes[size - 1] - 1) * (size + 1) <= 20 for size in range(1, 60))


@pytest.mark.parametrize("adds", [True, False])
def test_random_loops_leave_the_same_bytes(adds: bool) -> None:
    guarded, wrong = count_wrong(adds=adds)
    assert guarded > 80
    assert wrong == 0


def test_random_loops_leave_memcpys_out() -> None:
    found = 0
    for seed in range(100):
        steps, results = draw_program(random.Random(seed))
        before, after = (
            sum(step.name.startswith("k8") for step in list_device_steps(each))
            for each in (steps, guard(steps, results, make_instructions(*NAMES))[0])
        )
        found += before > after
    assert found > 2


def test_a_memcpy_that_is_left_out_too_often_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of what comes later, a step reads what is not there."""
    monkeypatch.setattr(loop_state, "_is_read_first", lambda *_: False)
    assert count_wrong(enough=1)[1] > 0


def test_a_piece_that_is_not_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_less(name: str, pieces: Any) -> DeviceStep:
        step = guards.keep_state(name, pieces[:1])
        return step if len(pieces) > 1 else fill(name, "unused")

    monkeypatch.setattr(module, "keep_state", keep_less)
    assert count_wrong(enough=7)[1] > 6


def test_a_count_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(name: str, counter: Any, values: Any, first: int, step: int) -> DeviceStep:
        return counters.count_values(name, counter, values, first + (counter != values), step)

    monkeypatch.setattr(count_ahead, "count_values", count)
    assert count_wrong(enough=7)[1] > 6


def test_a_state_that_is_not_put_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(name: str, flags: Any, pieces: Any) -> DeviceStep:
        return guards.end_turn(name, flags, pieces[1:])

    monkeypatch.setattr(module, "end_turn", end)
    assert count_wrong(enough=7)[1] > 6


def test_a_state_of_another_iteration_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(name: str, flags: Any, pieces: Any) -> DeviceStep:
        return guards.end_turn(name, flags, [(p, [*s[1:], s[0]]) for p, s in pieces])

    monkeypatch.setattr(module, "end_turn", end)
    assert count_wrong(enough=7)[1] > 6
