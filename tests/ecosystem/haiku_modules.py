"""Modules of dm-haiku: transformed functions, with and without state."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.ecosystem.program import Setup, draw, draw_key, fill, program


@program()
def haiku_train_step() -> Setup:
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([6, 2])(x)))
    params = fill(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 3))))
    optimizer = optax.adam(0.01)

    def step(state, x, y):
        params, inner = state
        value, gradients = jax.value_and_grad(
            lambda params: jnp.mean((model.apply(params, x) - y) ** 2)
        )(params)
        updates, inner = optimizer.update(gradients, inner)
        return (optax.apply_updates(params, updates), inner), value

    state = (params, optimizer.init(params))
    return Setup(step, lambda rng: (draw(rng, 5, 3), draw(rng, 5, 2)), state)


@program()
def haiku_batch_norm_and_dropout() -> Setup:
    def forward(x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(4)(x), is_training=True)
        return hk.Linear(2)(hk.dropout(hk.next_rng_key(), 0.3, jax.nn.relu(x)))

    model = hk.transform_with_state(forward)
    params, state = fill(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((4, 3))))

    def run(state, params, key, x):
        results, state = model.apply(params, state, key, x)
        return state, results

    return Setup(run, lambda rng: (params, draw_key(rng), draw(rng, 4, 3)), state)
