"""Guarded iterations: what is kept of a loop's state, and loops that leave the same bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.gpu_programs import copy, fill, kernel, shuffle_order, use
from tracegraph.lowering.device_program import (
    ConditionalStep,
    DeviceStep,
    GraphStep,
    list_uses,
)
from tracegraph.lowering.kernels import guards
from tracegraph.lowering.kernels.conditions import set_flag, start_turns
from tracegraph.lowering.planning.byte_edges import find_edges
from tracegraph.lowering.xla import guard_loops as module
from tracegraph.lowering.xla.guard_loops import MOST_PER_TURN, choose_guarded, guard_loops
from tracegraph.runtime.graph_nodes import Construct, Turn
from tracegraph.runtime.nodes import BufferUse, KernelNode

FLAG, COUNTER = use("flag[0:1]"), use("counter[0:4]")
COUNT = kernel("count", "counter[0:4]", "counter[0:4]")
COMPARE = kernel("compare", "counter[0:4]", "flag[0:1]")
DOUBLE = kernel("double", "x", "x")


def make_loop(*body: GraphStep, name: str = "loop") -> ConditionalStep:
    setter = set_flag(f"{name}@condition", FLAG)
    return ConditionalStep(
        name, Construct.WHILE, ((*body, COUNT, COMPARE, setter),), setter, turn=Turn(1)
    )


def make_instructions(*names: str, **opcodes: str) -> dict[int, dict[str, Any]]:
    found = dict.fromkeys((*names, "count", "compare", "double"), "fusion") | opcodes
    instructions = {
        name: SimpleNamespace(opcode=opcode.replace("_", "-"), called_computation_ids=())
        for name, opcode in found.items()
    }
    return {0: instructions}


def guard(
    steps: Sequence[GraphStep], results: str, computations: Any = None
) -> tuple[tuple[GraphStep, ...], list[int]]:
    """Returns the guarded steps, and the sizes of what was added."""
    added: list[int] = []

    def add(nbytes: int) -> BufferUse:
        added.append(nbytes)
        return BufferUse(f"added{len(added)}", 0, nbytes)

    found = computations or make_instructions()
    return guard_loops(steps, map(use, results.split()), found, add), added


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


def test_what_is_written_anew_costs_no_copy() -> None:
    computations = make_instructions("advance", "back")
    body = (kernel("advance", "x", "t"), copy("back", "t", "x"))
    step = guard_one(*body, computations=computations)
    assert not [name for name in list_names(step) if "keep" in name]
    first, second = find(step, "back@guarded.1"), find(step, "advance@guarded.2")
    # An iteration reads what the one before has written.
    assert first.writes[0].buffer == "added1"
    assert second.reads == first.writes
    assert find(step, f"back@guarded.{step.turn and step.turn.iterations}").writes == (use("x"),)


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
def test_what_keeps_one_iteration_per_turn(body: Any, opcodes: dict[str, str]) -> None:
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


# The oracle: every byte has a token, as in `gpu_programs`; loops end after so many iterations.


def lay_out(steps: Sequence[GraphStep]) -> dict[str, int]:
    names = sorted({each.buffer for step in steps for each in list_uses(step)})
    return {name: number << 20 for number, name in enumerate(names)}


def list_bytes(each: BufferUse) -> list[tuple[str, int]]:
    return [(each.buffer, each.offset + index) for index in range(each.nbytes)]


def run(steps: Sequence[GraphStep], memory: dict[Any, Any], count: int, seed: int) -> None:
    """Runs steps in some order that their edges allow; open loops have so many iterations."""
    for index in shuffle_order(len(steps), find_edges(steps, lay_out(steps)), seed):
        step = steps[index]
        if isinstance(step, DeviceStep):
            run_step(step, memory, count)
        elif step.setter.writes:
            for turn in range(2):
                run(step.bodies[0], memory, count + turn, seed)
        else:
            run_loop(step, memory, count, seed)


def run_loop(step: ConditionalStep, memory: dict[Any, Any], count: int, seed: int) -> None:
    run_step(step.setter, memory, count)
    while memory["handle"]:
        run(step.bodies[0], memory, count, seed)


def run_step(step: DeviceStep, memory: dict[Any, Any], count: int) -> None:
    node: Any = step.node
    name = step.name.partition("@")[0]
    symbol = node.code.symbol if isinstance(node, KernelNode) else ""
    if symbol.startswith("keep_state"):
        copy_bytes(memory, *node.parameters[0::3], *node.parameters[1::3])
    elif symbol.startswith("end_turn"):
        run_end(node, memory)
    elif symbol == "set_flag":
        memory["handle"] = memory[step.reads[0].buffer, step.reads[0].offset]
    elif name == "count":
        memory["counter", 0] += 1
    elif name == "compare":
        memory[step.writes[0].buffer, step.writes[0].offset] = int(memory["counter", 0] < count)
    elif name == "reset":
        memory["counter", 0] = 0
    elif step.kind == "memcpy":
        copy_bytes(memory, *step.reads, *step.writes)
    else:
        seen = tuple(memory.get(each) for part in step.reads for each in list_bytes(part))
        for number, part in enumerate(step.writes):
            for place, each in enumerate(list_bytes(part)):
                memory[each] = hash((name, number, place, seen))


def copy_bytes(memory: dict[Any, Any], *uses: Any) -> None:
    half = len(uses) // 2
    pairs = zip(uses[:half], uses[half:], strict=True)
    found = {
        target: memory.get(source)
        for one, other in pairs
        for source, target in zip(list_bytes(one), list_bytes(other), strict=True)
    }
    memory.update(found)


def run_end(node: Any, memory: dict[Any, Any]) -> None:
    """Does what the kernel of `end_turn` does."""
    count = int(node.code.symbol.split("_")[3])
    flags = [memory[each.buffer, each.offset] for each in node.parameters[1 : count + 1]]
    memory["handle"] = int(all(flags))
    ended = flags.index(0) if 0 in flags else count
    rest = node.parameters[count + 1 :]
    if ended == count - 1:
        return
    size = count + 1
    for first in range(0, len(rest) if ended < count else 0, size):
        copy_bytes(memory, rest[first + 2 + ended], rest[first])


def draw_program(generator: random.Random) -> tuple[list[GraphStep], str]:
    """Returns a loop, and what is around it, over a few small arrays."""

    def draw(names: str = "xtuv") -> str:
        start = generator.choice([0, 0, 4])
        end = generator.choice([start + 4, 8])
        return f"{generator.choice(names)}[{start}:{end}]"

    def draw_step(index: int) -> DeviceStep:
        target = draw()
        choice = generator.random()
        if choice < 0.2 and use(target).nbytes == 4:
            source = generator.choice([each for each in "xtuv" if each != target[0]])
            return copy(f"k{index}", f"{source}[0:4]", target)
        if choice < 0.25:
            return fill(f"k{index}", target)
        # XLA's scratch may be where the flag is, before it is written.
        reads = draw() if choice < 0.5 else f"{draw()} {target}"
        return kernel(f"k{index}", reads, f"{target} {draw('yz')}" if choice > 0.8 else target)

    body = [draw_step(index) for index in range(generator.randrange(1, 6))]
    if generator.random() < 0.3:
        body = [kernel("scratch", draw(), "flag[0:4]"), kernel("k9", "flag[0:4] x[0:4]", draw())]
    loop: GraphStep = make_loop(*body)
    steps: list[GraphStep] = [COMPARE, loop, kernel("after", f"{draw()} {draw()}", draw())]
    if generator.random() < 0.4:
        start = start_turns("outer@start", use("turns[0:4]"))
        inside = (kernel("reset", "q[0:4]", "counter[0:4]"), *steps)
        steps = [ConditionalStep("outer", Construct.WHILE, (inside,), start, turn=Turn(1))]
    results = " ".join({draw("xtuvyz") for _ in range(generator.randrange(1, 4))})
    return steps, results + " counter[0:4]" * (generator.random() < 0.3)


def count_wrong() -> tuple[int, int]:
    """Returns how many random programs were guarded, and how many of them leave other bytes."""
    names = [f"k{index}" for index in range(10)]
    guarded = wrong = 0
    computations = make_instructions(*names, "scratch", "after", "reset")
    for seed in range(100):
        steps, results = draw_program(random.Random(seed))
        found, added = guard(steps, results, computations)
        guarded += bool(added)
        differs = False
        for count in (0, 1, 2, 4, 5, 6, 11):
            wanted, got = (
                {(n, i): f"{n}{i}" for n in "xtuvyzq" for i in range(8)}
                | {("flag", i): f"flag{i}" for i in range(8)}
                | {("counter", i): 0 for i in range(4)}
                for _ in range(2)
            )
            run(steps, wanted, count, seed)
            run(found, got, count, seed + 1)
            kept = [each for part in map(use, results.split()) for each in list_bytes(part)]
            differs |= any(wanted.get(each) != got.get(each) for each in kept)
        wrong += differs
    return guarded, wrong


def test_random_loops_leave_the_same_bytes() -> None:
    guarded, wrong = count_wrong()
    assert guarded > 80
    assert wrong == 0


def test_a_piece_that_is_not_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_less(name: str, pieces: Any) -> DeviceStep:
        step = guards.keep_state(name, pieces[:1])
        return step if len(pieces) > 1 else fill(name, "unused")

    monkeypatch.setattr(module, "keep_state", keep_less)
    assert count_wrong()[1] > 6


def test_a_state_that_is_not_put_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(name: str, flags: Any, pieces: Any) -> DeviceStep:
        return guards.end_turn(name, flags, pieces[1:])

    monkeypatch.setattr(module, "end_turn", end)
    assert count_wrong()[1] > 6


def test_a_state_of_another_iteration_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(name: str, flags: Any, pieces: Any) -> DeviceStep:
        return guards.end_turn(name, flags, [(p, [*s[1:], s[0]]) for p, s in pieces])

    monkeypatch.setattr(module, "end_turn", end)
    assert count_wrong()[1] > 6
