"""Loops and branches on a GPU: part of one graph, with the results of `jax.jit` for any data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.fakes.gated_scans import differentiate_gates, make_gates
from tests.gpu.reference import find_captured
from tracegraph.lowering.kernels.loops.piece_loops import SYMBOL
from tracegraph.runtime.definition.code_target import CodeTarget
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, list_nested
from tracegraph.runtime.definition.nodes import KernelNode

pytestmark = pytest.mark.usefixtures("gpu")

SIZE = 256


def draw(seed: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=SIZE).astype(np.float32))


def short_scan(x: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.sin(c) * 1.1, c.sum()), x, None, 8)


def long_scan(x: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.sin(c) * 1.1, c[:8] * 2), x, None, 1001)


def scan_over_rows(x: Any) -> Any:
    rows = jnp.outer(jnp.arange(600, dtype=jnp.float32), x) / 600
    return lax.scan(lambda c, row: (jnp.tanh(c + row), c * row), x, rows)


def counted(x: Any) -> Any:
    def turn(i: Any, carry: Any) -> Any:
        c, kept = carry
        return jnp.sin(c) + i, kept.at[i - 3].set(c[:8] * i)

    return lax.fori_loop(3, 303, turn, (x, jnp.zeros((300, 8))))


def count_as_a_result(x: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < 40, lambda s: (s[0] + 1, s[1] * 0.9 + s[0]), (0, x))


def open_count_as_a_result(x: Any) -> Any:
    def goes_on(state: Any) -> Any:
        return (state[0] < 90) & (jnp.abs(state[1]).sum() < 5e3)

    return lax.while_loop(goes_on, lambda s: (s[0] + 1, s[1] * 1.01 + s[0]), (0, x))


def open_count(x: Any) -> Any:
    return open_count_as_a_result(x)[1]


def data_dependent_loop(x: Any) -> Any:
    return lax.while_loop(lambda c: jnp.abs(c).sum() < 1e4, lambda c: c * 1.5 + 1, x)


def loop_to_an_argument(x: Any) -> Any:
    return lax.fori_loop(0, jnp.abs(x[0] * 20).astype(int), lambda i, c: c * 0.9 + i, x)


def branch(x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda: jnp.sort(x), lambda: jnp.cumsum(x) * 2)


def branch_of_three(x: Any) -> Any:
    index = jnp.abs(x[0] * 3).astype(int)
    return lax.switch(index, [lambda: jnp.sort(x), lambda: jnp.cumsum(x), lambda: x[::-1] * 2])


def nested(x: Any) -> Any:
    def turn(c: Any, i: Any) -> Any:
        c = lax.while_loop(lambda d: jnp.abs(d).sum() < 300, lambda d: d * 1.3 + 0.1, c * 0.5)
        return lax.cond(c[0] > 0, lambda: jnp.sort(c), lambda: jnp.flip(c) + i), c[:4]

    return lax.scan(turn, x, jnp.arange(300))


def gradient(x: Any) -> Any:
    return jax.grad(lambda y: lax.scan(lambda c, _: (jnp.sin(c), c.sum()), y, None, 700)[1].sum())(
        x
    )


def gamma(x: Any) -> Any:
    return jax.random.gamma(jax.random.key(3), jnp.abs(x) + 0.1)


PROGRAMS = {
    each.__name__: each
    for each in (
        short_scan,
        long_scan,
        scan_over_rows,
        counted,
        count_as_a_result,
        open_count_as_a_result,
        open_count,
        data_dependent_loop,
        loop_to_an_argument,
        branch,
        branch_of_three,
        nested,
        gradient,
        gamma,
    )
}


def compare(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, wanted)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_equals_jit_on_every_path(name: str):
    captured: Any = tg.capture(PROGRAMS[name])
    reference = jax.jit(PROGRAMS[name])
    for seed in range(12):
        x = draw(seed)
        compare(captured(x), reference(x))
    assert captured.cache_info().misses == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_inside(name: str):
    captured: Any = tg.capture(PROGRAMS[name])
    definition = captured.lower(draw(0)).lowered.definition
    (stage,) = definition.stages
    kinds = {n.kind for n in list_nested(stage.nodes) if isinstance(n, ConditionalNode)}
    expected = {
        "short_scan": set(),
        "counted": set(),
        "count_as_a_result": set(),
        "branch": {"if"},
        "branch_of_three": {"switch"},
        "nested": {"while", "if"},
    }
    assert kinds == expected.get(name, {"while"})


@pytest.mark.parametrize("name", ["branch", "branch_of_three", "nested"])
def test_branches_that_an_older_driver_takes_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CodeTarget, "has_choices", False)
    captured: Any = tg.capture(PROGRAMS[name])
    (stage,) = captured.lower(draw(0)).lowered.definition.stages
    nodes = [node for node in list_nested(stage.nodes) if isinstance(node, ConditionalNode)]
    assert {len(node.bodies) for node in nodes} == {1}
    for seed in range(12):
        x = draw(seed)
        compare(captured(x), jax.jit(PROGRAMS[name])(x))


@pytest.mark.parametrize("name", ["branch", "data_dependent_loop", "nested"])
def test_every_result_is_written_to_memory_of_its_own(name: str):
    captured: Any = tg.capture(PROGRAMS[name])
    arguments = [draw(seed) for seed in range(5)]
    results = [captured(x) for x in arguments]
    for x, result in zip(arguments, results, strict=True):
        compare(result, jax.jit(PROGRAMS[name])(x))
    assert len({leaf.data_ptr() for leaf in jax.tree.leaves(results)}) >= len(arguments)
    replay = find_captured(captured).replay
    # What has no port would be copied on the host before the next replay.
    assert replay.takers.keys() == set(replay.definition.outputs)


def test_a_donated_state_is_carried_by_a_loop():
    def step(state: Any, x: Any) -> Any:
        return lax.fori_loop(0, x[0].astype(int), lambda i, c: c * 0.5 + i, state), x.sum()

    captured: Any = tg.capture(step, donate_argnums=0)
    state, wanted = draw(0), draw(0)
    for rounds in (3, 0, 7, 1, 900):
        x = jnp.full(SIZE, rounds, jnp.float32)
        state, _ = captured(state, x)
        wanted, _ = jax.jit(step)(wanted, x)
        compare(state, wanted)


def test_a_replay_twice_in_a_row_starts_its_counters_anew():
    captured: Any = tg.capture(long_scan)
    x = draw(0)
    first = jax.tree.map(np.asarray, captured(x))
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, first, jax.tree.map(np.asarray, captured(x)))


def apply_layers(weights: Any, x: Any) -> Any:
    return lax.scan(lambda c, w: (jnp.tanh(w * c[:, None]).sum(0), c[:4]), x, weights)


@pytest.mark.parametrize("count", [6, 12])
def test_slices_are_read_where_the_argument_is_at_this_call(count: int):
    """Weights at changing addresses: few small ones are pointed at, as are large ones."""
    captured: Any = tg.capture(apply_layers)
    definition = captured.lower(jnp.ones((count, SIZE, SIZE)), draw(0)).lowered.definition
    kinds = [node.kind for node in list_nested(definition.stages[0].nodes)]
    # The slices of four elements are too short to be written in place.
    assert kinds.count("memcpy") <= count + 4
    sets = [
        jnp.asarray(np.random.default_rng(seed).normal(size=(count, SIZE, SIZE)), jnp.float32) / 16
        for seed in range(3)
    ]
    for index in range(7):
        weights, x = sets[index % 3], draw(index)
        compare(captured(weights, x), jax.jit(apply_layers)(weights, x))
    assert captured.cache_info().misses == 1


@pytest.mark.parametrize("length", [6, 300])
def test_gradients_that_one_kernel_adds_to_have_the_bits_of_jit(length: int):
    captured: Any = tg.capture(differentiate_gates)
    weights, rows = make_gates(length)
    nodes = list_nested(captured.lower(weights, rows).lowered.definition.stages[0].nodes)
    merged = [node for node in nodes if isinstance(node, KernelNode) and node.code.symbol == SYMBOL]
    assert {node.shape.grid[1] for node in merged} == {8}
    compiled = jax.jit(differentiate_gates)
    for seed in range(4):
        weights, rows = make_gates(length, seed)
        # Numbers so small that they have no digit to lose, and what is not a number.
        rows[0, 0, 0] = (1.0, 1e-38, np.inf, np.nan)[seed]
        found, wanted = captured(weights, rows), compiled(weights, rows)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert captured.cache_info().misses == 1


def test_a_donated_stack_is_updated_slice_by_slice():
    def step(stack: Any, x: Any) -> Any:
        return lax.scan(lambda c, w: (c * 0.5 + w, w * 0.9 + c), x, stack)[::-1]

    captured: Any = tg.capture(step, donate_argnums=0)
    stack, wanted = jnp.ones((9, SIZE)), jnp.ones((9, SIZE))
    for seed in range(5):
        stack, last = captured(stack, draw(seed))
        wanted, wanted_last = jax.jit(step)(wanted, draw(seed))
        compare((stack, last), (wanted, wanted_last))


def several_arrays(n: Any, x: Any) -> Any:
    def advance(i: Any, carry: Any) -> Any:
        a, b, total = carry
        return jnp.sin(b) * 1.1, a + i, total + a[0]

    return lax.fori_loop(0, n, advance, (x, x * 2, jnp.float32(0)))


def slice_by_slice(n: Any, x: Any) -> Any:
    def advance(carry: Any) -> Any:
        i, rows, c = carry
        return i + 1, rows.at[i].set(c * 2), jnp.cos(c)

    # More iterations than rows: indices past the end are moved inside, or dropped.
    return lax.while_loop(lambda c: c[0] < n, advance, (0, jnp.zeros((4, SIZE)), x))


def matrix_by_matrix(n: Any, x: Any) -> Any:
    weights = jnp.outer(x, x)[:64, :64] / 64
    return lax.fori_loop(0, n, lambda _, c: jnp.tanh(c @ weights + 0.1), weights)


def integers_and_flags(n: Any, x: Any) -> Any:
    def advance(carry: Any) -> Any:
        i, bits, is_odd, c = carry
        # Past the end this divides by 0.
        return i + 1, bits * 3 + 7 // (n - i), ~is_odd, c + bits[0]

    bits = (x * 100).astype(jnp.int32)
    return lax.while_loop(lambda c: c[0] < n, advance, (0, bits, jnp.bool_(False), x))


def inside_of_scan(n: Any, x: Any) -> Any:
    def turn(c: Any, i: Any) -> Any:
        c = lax.fori_loop(0, n + i % 3, lambda _, d: jnp.sin(d) + 0.1, c)
        return c, c[:4]

    return lax.scan(turn, x, jnp.arange(400))


def under_vmap(n: Any, x: Any) -> Any:
    def search(start: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.1), (start, 1.0))

    return jax.vmap(search)(jnp.arange(SIZE) % 7)


@jax.custom_vjp
def solve(n: Any, a: Any) -> Any:
    return lax.fori_loop(0, n, lambda _, c: c - (c * c - a) / (2 * c + 1), a + 1)


def solve_forward(n: Any, a: Any) -> Any:
    root = solve(n, a)
    return root, (n, root)


def solve_backward(kept: Any, change: Any) -> Any:
    n, root = kept
    return None, lax.fori_loop(0, n, lambda _, c: 0.5 * (c + change / (2 * root + 1)), change)


solve.defvjp(solve_forward, solve_backward)


def its_gradient(n: Any, x: Any) -> Any:
    return jax.value_and_grad(lambda a: solve(n, a).sum())(jnp.abs(x) + 1)


TO_AN_ARGUMENT = {
    each.__name__: each
    for each in (
        several_arrays,
        slice_by_slice,
        matrix_by_matrix,
        integers_and_flags,
        inside_of_scan,
        under_vmap,
        its_gradient,
    )
}


def list_turns(captured: Any, *arguments: Any) -> list[Any]:
    definition = captured.lower(*arguments).lowered.definition
    nodes = [node for stage in definition.stages for node in list_nested(stage.nodes)]
    return [node.turn for node in nodes if isinstance(node, ConditionalNode)]


@pytest.mark.parametrize("name", TO_AN_ARGUMENT)
def test_iterations_after_the_end_of_a_loop_leave_nothing(name: str):
    """A turn has several iterations; the loop may end after any of them, or before the first."""
    captured: Any = tg.capture(TO_AN_ARGUMENT[name])
    reference = jax.jit(TO_AN_ARGUMENT[name])
    x = draw(3)
    guarded = [turn for turn in list_turns(captured, jnp.int32(1), x) if turn.is_guarded]
    assert guarded
    per_turn = max(turn.iterations for turn in guarded)
    for count in [0, 1, 2, *range(per_turn - 1, per_turn + 2), 2 * per_turn, 3 * per_turn + 1, 1]:
        for _ in range(2):
            compare(captured(jnp.int32(count), x), reference(jnp.int32(count), x))
    assert captured.cache_info().misses == 1


def several_steps_of_stages(n: Any, x: Any) -> Any:
    """Each step counts its stages from the first, or from the second where it goes on."""

    def step(i: Any, x: Any) -> Any:
        first = jnp.where(i == 0, 0, 1)
        return lax.while_loop(
            lambda c: (c[0] + first < 4) & (c[0] < 4),
            lambda c: (c[0] + 1, jnp.sin(c[1] * (c[0] + first + 2))),
            (0, x),
        )[1]

    return lax.fori_loop(0, n, step, x)


def test_stages_that_are_certain_and_one_that_may_come_equal_jit():
    captured: Any = tg.capture(several_steps_of_stages)
    reference, x = jax.jit(several_steps_of_stages), draw(4)
    assert None in list_turns(captured, jnp.int32(1), x)
    for count in (1, 0, 2, 5, 1):
        compare(captured(jnp.int32(count), x), reference(jnp.int32(count), x))
    assert captured.cache_info().misses == 1


def test_a_donated_carry_keeps_its_value_at_the_end_of_the_loop():
    def step(state: Any, n: Any) -> Any:
        def advance(carry: Any) -> Any:
            i, stack = carry
            return i + 1, stack.at[i % 8].add(stack[(i + 1) % 8] * 0.5)

        return lax.while_loop(lambda c: c[0] < n, advance, (0, state))[1]

    captured: Any = tg.capture(step, donate_argnums=0)
    state, wanted = jnp.ones((8, SIZE)), jnp.ones((8, SIZE))
    assert any(turn.is_guarded for turn in list_turns(captured, state, jnp.int32(0)))
    for count in (3, 0, 1, 2, 4, 5, 6, 8, 40):
        state = captured(state, jnp.int32(count))
        wanted = jax.jit(step)(wanted, jnp.int32(count))
        compare(state, wanted)


def test_explain_says_how_many_iterations_a_turn_has():
    report = str(tg.capture(loop_to_an_argument).explain(draw(0)))
    (line,) = [each for each in report.splitlines() if each.startswith("loops: ")]
    assert "guarded iterations per turn" in line
