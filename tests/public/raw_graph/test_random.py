"""Random numbers in blocks of `tg.graph`: keys are data, and a key that is state is an input.

The names of cases (G16...) are those of PyTorch's own tests of graphs. Its G18 and G21 are about
generators; here a key of another seed is another input, and two keys are two inputs.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.raw_graphs import N, assert_value, find_captured, record, use_device


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


def make_key_input(seed: int) -> tg.Array:
    return tg.static_input(jax.random.key_data(jax.random.key(seed)))


def seed_input(x: tg.Array, seed: int) -> None:
    x.copy_(jax.random.key_data(jax.random.key(seed)))


def take_key(x: tg.Array) -> Any:
    """Returns the next key of an input, as a generator does."""
    key, used = jax.random.split(jax.random.wrap_key_data(x))
    x.copy_(jax.random.key_data(key))
    return used


def drop_out(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def run_cells(key: Any, w: Any, x: Any) -> Any:
    def step(carry: Any, inputs: Any) -> Any:
        h, c = carry
        key, row = inputs
        i, f, o, g = jnp.split(drop_out(key, jnp.concatenate([h, row])) @ w, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros(N)
    return jax.lax.scan(step, (zero, zero), (jax.random.split(key, len(x)), x))[1]


def test_g16_recurrent_dropout_before_in_and_after_a_capture():
    w = jax.random.normal(jax.random.key(0), (2 * N, 4 * N)) * 0.3
    x, k = tg.static_input((3, N)), make_key_input(1)
    x.copy_(jax.random.normal(jax.random.key(2), (3, N)))
    eager = jax.jit(run_cells)
    before = eager(jax.random.key(5), w, x)
    g, y = record(lambda: run_cells(jax.random.wrap_key_data(k), w, x))
    for seed in (1, 5):
        seed_input(k, seed)
        g.replay()
        np.testing.assert_allclose(y, eager(jax.random.key(seed), w, x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(eager(jax.random.key(5), w, x), before)


def test_g17_a_checkpoint_draws_the_same_numbers_again():
    x, k = tg.static_input((N, N)), make_key_input(42)
    x.copy_(jax.random.normal(jax.random.key(2), (N, N)))

    def measure(x: Any, key: Any) -> Any:
        layer = jax.checkpoint(lambda x, key: drop_out(key, jnp.sin(x)))
        return layer(layer(x, key), jax.random.fold_in(key, 1)).sum()

    slope = jax.grad(measure)
    g, y = record(lambda: slope(x, jax.random.wrap_key_data(k)))
    g.replay()
    expected = np.asarray(jax.jit(slope)(x, jax.random.key(42)))
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert_value(np.asarray(y) == 0, expected == 0)


def test_g18_each_seed_is_an_input():
    k = make_key_input(0)
    g, y = record(lambda: jax.random.bits(jax.random.wrap_key_data(k), (N,)))
    for seed in (0, 1, 0):
        seed_input(k, seed)
        g.replay()
        assert_value(y, jax.random.bits(jax.random.key(seed), (N,)))


def test_g19_replays_and_eager_calls_draw_from_one_sequence():
    x, k = jnp.ones(100), make_key_input(5)
    g, y = record(lambda: drop_out(take_key(k), x))
    for seed in (5, 6, 128):
        seed_input(k, seed)
        other = make_key_input(seed)
        drawn = []
        for is_replay in (True, True, False, False, True):
            if is_replay:
                g.replay()
            drawn.append(np.asarray(y if is_replay else drop_out(take_key(k), x)))
        for each in drawn:
            assert_value(each, drop_out(take_key(other), x))
        assert not np.array_equal(drawn[0], drawn[1])


def test_g20_each_distribution_has_the_numbers_of_jit():
    def draw(key: Any) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 12))
        shape = (8,)
        return {
            "bernoulli": jax.random.bernoulli(next(keys), 0.5, shape),
            "categorical": jax.random.categorical(next(keys), jnp.zeros(5), shape=shape),
            "cauchy": jax.random.cauchy(next(keys), shape),
            "exponential": jax.random.exponential(next(keys), shape),
            "geometric": jax.random.geometric(next(keys), 0.3, shape),
            "lognormal": jax.random.lognormal(next(keys), shape=shape),
            "normal": jax.random.normal(next(keys), shape),
            "permutation": jax.random.permutation(next(keys), 8),
            "poisson": jax.random.poisson(next(keys), 3.0, shape),
            "randint": jax.random.randint(next(keys), shape, 0, 100),
            "uniform": jax.random.uniform(next(keys), shape),
        }

    k, eager = make_key_input(0), jax.jit(draw)
    g, made = record(lambda: draw(jax.random.wrap_key_data(k)))
    for array in made.values():
        with pytest.raises(tg.ReplayError, match="has not been replayed"):
            np.asarray(array)
    for seed in (6, 314, 271):
        seed_input(k, seed)
        g.replay()
        expected = eager(jax.random.key(seed))
        for name, array in made.items():
            assert array.dtype == expected[name].dtype
            np.testing.assert_allclose(array, expected[name], rtol=1e-6, err_msg=name)


def test_g21_two_keys_are_used_by_turns_in_one_capture():
    def draw(first: tg.Array, second: tg.Array) -> list[Any]:
        return [jax.random.normal(take_key(k), (N,)) for k in (first, second, first, second)]

    one, two, other_one, other_two = map(make_key_input, (1, 2, 1, 2))
    g, made = record(lambda: draw(one, two))
    for _ in range(3):
        g.replay()
        for array, expected in zip(made, draw(other_one, other_two), strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-6)
    assert_value(one, other_one)
    assert_value(two, other_two)


@pytest.mark.parametrize(("graphs", "keys"), [(1, 1), (3, 2)])
def test_g22_a_key_costs_its_own_bytes_whatever_the_number_of_graphs(graphs, keys):
    inputs = [make_key_input(seed) for seed in range(keys)]

    def draw() -> list[Any]:
        return [jax.random.bits(jax.random.wrap_key_data(k), (N,)) for k in inputs]

    made = [record(draw) for _ in range(graphs)]
    sizes = {find_captured(g).replay.definition.arena_bytes for g, _ in made}
    assert len(sizes) == 1
    assert sum(k.nbytes for k in inputs) == 8 * keys

    def check(g: tg.CUDAGraph, arrays: list[Any]) -> weakref.ref[Any]:
        g.replay()
        for seed, array in enumerate(arrays):
            assert_value(array, jax.random.bits(jax.random.key(seed), (N,)))
        return weakref.ref(find_captured(g).replay.arena)

    arenas = [check(*each) for each in made]
    made.clear()
    gc.collect()
    assert [arena() for arena in arenas] == [None] * graphs
    assert_value(inputs[0], jax.random.key_data(jax.random.key(0)))


def test_g25_graphs_of_one_pool_and_two_streams_draw_as_eager_calls_do():
    k, pool = make_key_input(1234), tg.graph_pool_handle()

    def draw() -> Any:
        return jax.random.normal(take_key(k), (N,))

    g1, first = record(draw, pool=pool, stream=tg.Stream())
    g2, second = record(draw, pool=pool, stream=tg.Stream())
    assert g1.pools() == g2.pools() == [pool]
    g1.replay()
    g2.replay()
    other = make_key_input(1234)
    for array in (first, second):
        np.testing.assert_allclose(array, jax.random.normal(take_key(other), (N,)), rtol=1e-6)
