"""Modules of equinox: partitioned by hand, and as arguments as `eqx.filter_jit` takes them."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.ecosystem.program import Setup, draw, program


def make_mlp():
    return eqx.nn.MLP(3, 2, 5, 1, activation=jnp.tanh, key=jax.random.key(0))


def measure(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def draw_pairs(rng):
    return draw(rng, 5, 3), draw(rng, 5, 2)


def wrap_filter_jit(function, donate_argnums=()):
    return eqx.filter_jit(function)


@program()
def equinox_partitioned_train_step() -> Setup:
    optimizer = optax.adam(0.01)
    params, static = eqx.partition(make_mlp(), eqx.is_inexact_array)

    def step(state, x, y):
        params, inner = state

        def loss(params):
            return measure(eqx.combine(params, static), x, y)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, inner = optimizer.update(gradients, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    return Setup(step, draw_pairs, (params, optimizer.init(params)))


@program()
def equinox_module_of_arrays() -> Setup:
    layer = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    return Setup(lambda layer, x: jax.vmap(layer)(x), lambda rng: (layer, draw(rng, 4, 3)))


@program()
def equinox_module_with_functions() -> Setup:
    model = make_mlp()
    return Setup(
        lambda model, x: jax.vmap(model)(x),
        lambda rng: (model, draw(rng, 4, 3)),
        reference=wrap_filter_jit,
    )


@program()
def equinox_train_step_of_a_module() -> Setup:
    def step(model, x, y):
        value, gradients = eqx.filter_value_and_grad(measure)(model, x, y)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), value

    return Setup(step, draw_pairs, make_mlp(), reference=wrap_filter_jit)


@program()
def equinox_convolution_and_norms() -> Setup:
    keys = jax.random.split(jax.random.key(0), 2)
    conv, norm = eqx.nn.Conv2d(2, 4, 3, key=keys[0]), eqx.nn.GroupNorm(2, 4)

    def run(conv, norm, image):
        return norm(conv(image)).mean((1, 2))

    return Setup(run, lambda rng: (conv, norm, draw(rng, 2, 5, 5)))
