"""`tg.random` on a GPU: replays draw the keys that eager calls would draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.draws import assert_same, draw, list_eager
from tests.raw_graphs import record

pytestmark = pytest.mark.usefixtures("gpu")


def test_functions_blocks_and_eager_calls_draw_in_turn():
    gen = tg.random.Generator(5)
    step = tg.capture(lambda: draw(gen))
    g, y = record(lambda: draw(gen))
    found = []
    for _ in range(3):
        g.replay()
        found += [np.array(y), step(), draw(gen), step()]
    assert_same(found, list_eager(5, 12))
    assert step.cache_info().captures == 1


def test_many_replays_without_a_wait_draw_each_key_once():
    gen = tg.random.Generator(2)
    step = tg.capture(lambda total: total + draw(gen), donate_argnums=0)
    total, twin = jnp.zeros(8), np.zeros(8, np.float32)
    for _ in range(200):
        total = step(total)
    gen.manual_seed(2)
    for _ in range(200):
        twin += np.asarray(draw(gen))
    assert_same([total], [twin])


def test_a_block_replayed_many_times_without_a_wait_reads_each_state():
    gen, total = tg.random.Generator(2), tg.static_input((8,))
    g, _ = record(lambda: total.copy_(total + draw(gen)))
    for _ in range(200):
        g.replay()
    assert_same([total], [sum(list_eager(2, 200))])


def test_dropout_and_gradients_equal_jit_with_the_same_keys():
    gen = tg.random.Generator(9)
    w, x = jnp.ones((64, 64)) / 64, jnp.ones((32, 64))

    def loss(w, x, key):
        return (jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0.0) @ w).sum()

    step = tg.capture(lambda w, x: jax.grad(loss)(w, x, gen.next_key()))
    found = [step(w, x) for _ in range(3)]
    gen.manual_seed(9)
    twin = jax.jit(jax.grad(loss))
    assert_same(found, [np.asarray(twin(w, x, gen.next_key())) for _ in range(3)])


def test_each_replay_reads_the_keys_that_it_has_computed():
    """See Note [Loads ahead of the wait] in `lowering/xla/machine_code.py`."""

    def drop(x, words):
        key, other = (jax.random.fold_in(words, number) for number in range(2))
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(kept, x * jax.random.uniform(other, x.shape), 0.0)

    x, step = jnp.arange(8.0), tg.capture(drop)
    words = [jnp.array([0, number], jnp.uint32) for number in range(500)]
    found = [step(x, each) for each in words]
    key, other = (
        jax.vmap(lambda w, n=n: jax.random.fold_in(w, n))(jnp.stack(words)) for n in (0, 1)
    )
    kept = jax.vmap(lambda k: jax.random.bernoulli(k, 0.9, (8,)))(key)
    slope = jax.vmap(lambda k: jax.random.uniform(k, (8,)))(other)
    np.testing.assert_array_equal(jnp.stack(found), jnp.where(kept, x * slope, 0.0))
