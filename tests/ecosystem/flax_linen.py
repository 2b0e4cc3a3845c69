"""Modules of flax.linen: train states, running statistics, dropout, recurrence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

from tests.ecosystem.program import Setup, draw, draw_key, fill, program


def make_variables(module, *inputs, **options):
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs, **options))
    return fill(shapes)


class Mlp(nn.Module):
    wide: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.LayerNorm()(nn.gelu(nn.Dense(self.wide)(x))))


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        mask = nn.make_causal_mask(x[..., 0])
        x += nn.MultiHeadDotProductAttention(2)(nn.RMSNorm()(x), mask=mask)
        y = nn.Dense(8)(nn.silu(x))
        return x + nn.Dropout(0.2, deterministic=not train)(y)


@program()
def linen_train_state() -> Setup:
    model = Mlp(6)
    params = make_variables(model, jnp.zeros((1, 3)))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.01))

    def step(state, x, y):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return Setup(step, lambda rng: (draw(rng, 5, 3), draw(rng, 5, 2)), state)


@program()
def linen_batch_norm() -> Setup:
    model = Cnn()

    def step(variables, x, y):
        def loss(params):
            out, updates = model.apply(
                {**variables, "params": params}, x, train=True, mutable=["batch_stats"]
            )
            return jnp.mean((out - y) ** 2), updates

        (value, updates), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradients)
        return {"params": params, **updates}, value

    state = make_variables(model, jnp.zeros((1, 4, 4, 2)), train=True)
    return Setup(step, lambda rng: (draw(rng, 3, 4, 4, 2), draw(rng, 3, 3)), state)


@program()
def linen_transformer_with_dropout() -> Setup:
    model = Block()
    params = make_variables(model, jnp.zeros((1, 5, 8)), train=False)

    def step(params, x, key):
        def loss(params):
            out: Any = model.apply(params, x, train=True, rngs={"dropout": key})
            return jnp.mean(out**2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return Setup(step, lambda rng: (draw(rng, 2, 5, 8), draw_key(rng)), params)


@program()
def linen_recurrent_layers() -> Setup:
    model = nn.Sequential([nn.RNN(nn.GRUCell(4)), nn.RNN(nn.OptimizedLSTMCell(3))])
    variables = make_variables(model, jnp.zeros((1, 5, 2)))
    return Setup(model.apply, lambda rng: (variables, draw(rng, 2, 5, 2)))


@program()
def linen_embeddings_and_inference() -> Setup:
    model = nn.Sequential([nn.Embed(9, 4), nn.Dense(4), nn.GroupNorm(2), nn.Dense(3)])
    variables = make_variables(model, jnp.zeros((1, 4), jnp.int32))

    def run(variables, tokens):
        logits: Any = model.apply(variables, tokens)
        return nn.softmax(logits)

    return Setup(run, lambda rng: (variables, rng.integers(0, 9, (2, 4))))


@program()
def linen_scanned_layers() -> Setup:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(4)(x)), None

    stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    variables = make_variables(stack, jnp.zeros((2, 4)), None)
    return Setup(lambda v, x: stack.apply(v, x, None)[0], lambda rng: (variables, draw(rng, 2, 4)))
