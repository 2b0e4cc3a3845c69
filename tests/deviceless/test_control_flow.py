"""Branches and loops of real programs: how they are built, in how many nodes, in which memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.deviceless.building import check_built, find_excess_bytes, find_faults
from tests.deviceless.test_partial import lower
from tests.fakes.compilers import Target
from tests.fakes.gated_scans import differentiate_gates, make_gates
from tracegraph.lowering import compile_gpu
from tracegraph.lowering.kernels.loops.loop_kernels import list_loop_kernels
from tracegraph.lowering.kernels.loops.piece_loops import SYMBOL
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.xla.control_flow import TURN_NODES, UNROLLED_NODES
from tracegraph.reports.explain_gpu import list_turns
from tracegraph.runtime.cuda.graphs.builder import check_constructs
from tracegraph.runtime.definition.code_target import CodeTarget
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, list_nested
from tracegraph.runtime.definition.nodes import KernelCode, KernelNode

VECTOR = np.linspace(0, 1, 4096, dtype=np.float32)
MATRIX = np.eye(64, dtype=np.float32)


def scan(length: int) -> Callable[..., Any]:
    return lambda x: lax.scan(lambda c, _: (jnp.sin(c) * 1.1, c.sum()), x, None, length)


def repeat(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 1e3, lambda c: c * 2 + c @ c, x)


def count_to(n: Any, x: Any) -> Any:
    return lax.fori_loop(0, n, lambda i, c: jnp.cos(c) * c.sum() + i, x)


def choose(p: Any, w: Any, x: Any) -> Any:
    return lax.cond(p, lambda: jnp.linalg.norm(w @ x[:64]) * x, lambda: jnp.sort(x))


def choose_of_three(i: Any, w: Any, x: Any) -> Any:
    branches = [lambda: jnp.tile(w @ w @ x[:64], 64), lambda: jnp.sort(x), lambda: jnp.cumsum(x)]
    return lax.switch(i, branches)


def differentiate(x: Any) -> Any:
    return jax.grad(lambda y: scan(2000)(y)[1].sum())(x)


def nest(x: Any) -> Any:
    def turn(c: Any, _: Any) -> Any:
        c = lax.while_loop(lambda d: d.sum() < 5, lambda d: d * 3 + d @ d, c * 0.1)
        return c, lax.cond(c[0] > 0.5, lambda: jnp.sort(c), lambda: jnp.cumsum(c) @ c + c)

    return lax.scan(turn, x, None, 500)


ELF = b"\x7fELF"

# Below this, rounding and copies of small results are most of the arena.
LARGE_BYTES = 1 << 18

# How many nodes of each kind, those inside of others included.
CASES = {
    "an unrolled scan": (scan(5), (VECTOR,), {}),
    "a long scan": (scan(2000), (VECTOR,), {"while": 1}),
    "a loop of unknown length": (repeat, (VECTOR,), {"while": 1}),
    "a loop to an argument": (count_to, (np.int32(3), VECTOR), {"while": 1}),
    "a choice of two": (choose, (np.bool_(True), MATRIX, VECTOR), {"if": 1}),
    "a choice of three": (choose_of_three, (np.int32(1), MATRIX, VECTOR), {"switch": 1}),
    "the gradient of a long scan": (differentiate, (VECTOR,), {"while": 2}),
    "a loop and a choice in a loop": (nest, (VECTOR,), None),
}


def lower_case(case: str, h200: Any) -> Lowered:
    function, arguments, _ = CASES[case]
    return lower(function, arguments, h200, mode="whole")[1]


@pytest.mark.parametrize("case", CASES)
def test_control_flow_becomes_conditional_nodes(case: str, h200: Any) -> None:
    lowered = lower_case(case, h200)
    definition = lowered.definition
    (stage,) = definition.stages
    kinds = Counter(
        node.kind for node in list_nested(stage.nodes) if isinstance(node, ConditionalNode)
    )
    expected = CASES[case][2]
    if expected is None:
        assert kinds.keys() == {"while", "if"}
    else:
        assert kinds == expected
    assert find_faults(definition) == []
    check_built(definition)
    assert find_excess_bytes(lowered) <= 1.05 or definition.arena_bytes < LARGE_BYTES
    assert sum(1 for _ in list_nested(stage.nodes)) <= UNROLLED_NODES + 2 * TURN_NODES


# A graph of an unrolled loop has no kernel of ours, but for counters.
ON_DEVICE = [case for case in CASES if case != "an unrolled scan"]


@pytest.mark.parametrize("case", ON_DEVICE)
def test_the_kernels_of_loops_and_branches_are_loaded_ahead(case: str, h200: Any) -> None:
    (stage,) = lower_case(case, h200).definition.stages
    codes = [node.code for node in list_nested(stage.nodes) if isinstance(node, KernelNode)]
    # The text of a guard depends on its loop.
    texts = {c.cubin for c in codes if not c.cubin.startswith(ELF) and not is_guard(c)}
    assert texts
    assert texts <= {code.cubin for code in list_loop_kernels(h200.compute_capability)}


def is_guard(code: KernelCode) -> bool:
    return code.symbol.startswith(("keep_state", "end_turn_of"))


def test_a_loop_needs_no_memset_of_what_it_writes_first(h200: Any) -> None:
    (stage,) = lower_case("a long scan", h200).definition.stages
    assert not [node for node in list_nested(stage.nodes) if node.kind == "memset"]


@pytest.mark.parametrize(
    ("case", "count"), [("a choice of two", 2), ("a choice of three", 3), ("a long scan", 0)]
)
def test_an_older_driver_has_a_node_for_each_branch(
    case: str, count: int, h200: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = CodeTarget("cuda", "9.0", "described", driver=12_040)
    monkeypatch.setattr(Target, "target", target)
    definition = lower_case(case, h200).definition
    nodes = list_nested(definition.stages[0].nodes)
    choices = [node for node in nodes if isinstance(node, ConditionalNode)]
    assert [node.kind for node in choices if node.kind != "while"] == ["if"] * count
    for node in choices:
        check_constructs(target.driver, node)
    assert find_faults(definition) == []
    check_built(definition)


def test_two_kernels_count_the_iterations_of_a_turn(h200: Any) -> None:
    (stage,) = lower_case("a long scan", h200).definition.stages
    (loop,) = [node for node in stage.nodes if isinstance(node, ConditionalNode)]
    assert loop.turn is not None
    names = Counter(node.name.partition("@")[0] for node in loop.bodies[0].nodes)
    # They and the one that ends the turn; the other kernels do the work of an iteration each.
    assert names.pop(loop.name) == 3
    assert {*names.values()} == {loop.turn.iterations}
    assert len(names) == 2


@pytest.mark.parametrize("case", ["a loop of unknown length", "a loop to an argument"])
def test_a_short_loop_of_unknown_length_has_several_iterations_per_turn(
    case: str, h200: Any
) -> None:
    lowered = lower_case(case, h200)
    nodes = list(list_nested(lowered.definition.stages[0].nodes))
    (loop,) = [node for node in nodes if isinstance(node, ConditionalNode)]
    assert loop.turn is not None
    assert loop.turn.is_guarded
    assert loop.turn.iterations > 2
    # What is kept of the state is written before it is read: no memory has to be cleared for it.
    assert not [node for node in nodes if node.kind == "memset"]
    (line,) = list_turns(lowered)
    assert line == f"loops: 1 with {loop.turn}"


def run_stages(is_first: Any, x: Any) -> Any:
    """Counts to the last stage from the first or the second, as solvers do."""
    first = jnp.where(is_first, 0, 1)

    def goes_on(carry: Any) -> Any:
        return (carry[0] + first < 4) & (carry[0] < 4)

    return lax.while_loop(goes_on, lambda c: (c[0] + 1, jnp.sin(c[1]) @ jnp.eye(64)), (0, x))[1]


def test_the_certain_iterations_of_a_loop_come_ahead_of_a_branch(h200: Any) -> None:
    _, lowered = lower(run_stages, (np.bool_(True), MATRIX), h200, mode="whole")
    nodes = list(list_nested(lowered.definition.stages[0].nodes))
    (rest,) = [node for node in nodes if isinstance(node, ConditionalNode)]
    assert rest.kind == "if"
    numbers = {node.name.partition("@")[2] for node in nodes}
    assert {"0", "1", "2"} <= numbers
    assert "3" not in numbers
    assert find_faults(lowered.definition) == []
    check_built(lowered.definition)


def test_the_end_of_a_loop_may_be_far_from_the_arguments(h200: Any) -> None:
    def count(x: Any, n: Any) -> Any:
        for i in range(100):
            n = jnp.where((n * 3 + i) & 1, n + 5, (n ^ i) * 7)
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ c[1]), (n - 4, x))

    _, lowered = lower(count, (MATRIX, np.int32(3)), h200, mode="whole")
    (node,) = [n for n in lowered.definition.stages[0].nodes if isinstance(n, ConditionalNode)]
    assert node.kind == "while"
    assert find_faults(lowered.definition) == []


def test_the_text_of_a_graph_shows_what_is_inside(h200: Any) -> None:
    text = str(lower_case("a loop of unknown length", h200).definition)
    (head,) = [line for line in text.splitlines() if ": while " in line]
    body = text[text.index(head) + len(head) :]
    assert "      body 0:" in body
    assert "        node 0: " in body


@pytest.mark.parametrize("length", [6, 300])
def test_what_an_iteration_adds_to_gradients_is_one_kernel(length: int, h200: Any) -> None:
    _, lowered = lower(differentiate_gates, make_gates(length), h200, mode="whole")
    check_built(lowered.definition)
    (stage,) = lowered.definition.stages
    loops = [node for node in stage.nodes if isinstance(node, ConditionalNode)]
    assert len(loops) == (2 if length > 100 else 0)
    nodes = list(loops[-1].bodies[0].nodes) if loops else list(stage.nodes)
    turn = loops[-1].turn if loops else None
    merged = [n for n in nodes if isinstance(n, KernelNode) and n.code.symbol == SYMBOL]
    assert len(merged) >= (turn.iterations if turn else length - 1)
    # Four parts of two weights each.
    assert {node.shape.grid[1] for node in merged} == {8}
    assert len({id(node.code) for node in merged}) < len(merged)
    assert all(node.begins_with_wait for node in merged)


def test_sums_that_xla_was_told_to_round_otherwise_stay_its_own(
    h200: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_kernels() -> set[str]:
        _, lowered = lower(differentiate_gates, make_gates(6), h200, mode="whole")
        nodes = lowered.definition.stages[0].nodes
        return {node.code.symbol for node in nodes if isinstance(node, KernelNode)}

    assert SYMBOL in list_kernels()
    options = (*compile_gpu.FIRST_OPTIONS, ("xla_gpu_ftz", True))
    monkeypatch.setattr(compile_gpu, "FIRST_OPTIONS", options)
    assert SYMBOL not in list_kernels()
