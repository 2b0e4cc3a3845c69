"""Modules of flax.nnx: split and merged by hand, and as arguments as `nnx.jit` takes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.ecosystem.program import Setup, draw, program


class Net(nnx.Module):
    def __init__(self, rngs, *, rate=0.0):
        self.first = nnx.Linear(3, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def draw_pairs(rng):
    return draw(rng, 5, 3), draw(rng, 5, 2)


def measure(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def wrap_nnx_jit(function, donate_argnums=()):
    return nnx.jit(function)


def train_objects(step, objects):
    """Returns a program that updates its own copy of objects, and reads them after each call."""

    def adapt(function):
        def call(objects, *batch):
            result = function(*objects, *batch)
            return objects, (result, jax.tree.map(jnp.copy, nnx.state(objects[0], nnx.Param)))

        return call

    return Setup(step, draw_pairs, objects, reference=wrap_nnx_jit, adapt=adapt)


@program()
def nnx_split_and_merge() -> Setup:
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state, x, y):
        model = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(measure)(model, x, y)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients)
        nnx.update(model, params)
        return nnx.state(model), loss

    return Setup(step, draw_pairs, state)


@program()
def nnx_split_with_dropout() -> Setup:
    graph, state = nnx.split(Net(nnx.Rngs(params=0, dropout=1), rate=0.5))

    def run(state, x):
        model = nnx.merge(graph, state)
        y = model(x)
        return nnx.state(model), y

    return Setup(run, lambda rng: (draw(rng, 4, 3),), state)


@program()
def nnx_module_for_inference() -> Setup:
    model = Net(nnx.Rngs(0))
    model.eval()
    return Setup(
        lambda model, x: model(x), lambda rng: (model, draw(rng, 4, 3)), reference=wrap_nnx_jit
    )


@program()
def nnx_module_that_is_trained() -> Setup:
    def step(model, x, y):
        loss, gradients = nnx.value_and_grad(measure)(model, x, y)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients)
        nnx.update(model, params)
        return loss

    return train_objects(step, (Net(nnx.Rngs(0)),))


@program()
def nnx_optimizer_as_argument() -> Setup:
    def step(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(measure)(model, x, y)
        optimizer.update(model, gradients)
        return loss

    model = Net(nnx.Rngs(0))
    return train_objects(step, (model, nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)))


@program()
def nnx_jit_captured() -> Setup:
    def reference(function, **options):
        return function

    function = nnx.jit(lambda model, x: model(x))
    model = Net(nnx.Rngs(0))
    model.eval()
    return Setup(function, lambda rng: (model, draw(rng, 4, 3)), reference=reference)
