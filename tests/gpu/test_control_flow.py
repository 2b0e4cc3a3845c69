"""Loops and branches on a GPU: part of one graph, with the results of `jax.jit` for any data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.gpu.reference import find_captured
from tracegraph.runtime.graph_nodes import ConditionalNode, list_nested

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
        "branch": {"if"},
        "branch_of_three": {"switch"},
        "nested": {"while", "if"},
    }
    assert kinds == expected.get(name, {"while"})


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


def test_a_donated_stack_is_updated_slice_by_slice():
    def step(stack: Any, x: Any) -> Any:
        return lax.scan(lambda c, w: (c * 0.5 + w, w * 0.9 + c), x, stack)[::-1]

    captured: Any = tg.capture(step, donate_argnums=0)
    stack, wanted = jnp.ones((9, SIZE)), jnp.ones((9, SIZE))
    for seed in range(5):
        stack, last = captured(stack, draw(seed))
        wanted, wanted_last = jax.jit(step)(wanted, draw(seed))
        compare((stack, last), (wanted, wanted_last))
