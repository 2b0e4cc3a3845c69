"""Optimisers and losses of optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.ecosystem.program import BOTH, Setup, draw, normal, program


def apply(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def measure(params, x, y):
    return jnp.mean((apply(params, x) - y) ** 2)


def make_step(optimizer, **extra):
    """Returns a train step of an optimiser, with its state."""
    params = {"w": jnp.asarray(normal(3, 5)), "v": jnp.asarray(normal(5, 2))}

    def step(state, x, y):
        params, inner = state
        value, gradients = jax.value_and_grad(measure)(params, x, y)
        updates, inner = optimizer.update(gradients, inner, params, **extra)
        return (optax.apply_updates(params, updates), inner), value

    state = (params, optimizer.init(params))
    return Setup(step, lambda rng: (draw(rng, 6, 3), draw(rng, 6, 2)), state)


@program()
def optax_adamw_with_schedule() -> Setup:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8)
    return make_step(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule)))


@program()
def optax_momentum_and_decay() -> Setup:
    chain = (optax.add_decayed_weights(0.01), optax.sgd(0.1, momentum=0.9, nesterov=True))
    return make_step(optax.chain(*chain))


@program()
def optax_labelled_parameters() -> Setup:
    rules: dict[Any, Any] = {"slow": optax.adafactor(0.01), "fast": optax.rmsprop(0.1)}
    return make_step(optax.multi_transform(rules, {"w": "slow", "v": "fast"}))


@program()
def optax_lion_and_moving_average() -> Setup:
    return make_step(optax.chain(optax.lion(0.01), optax.ema(0.9)))


@program()
def optax_multi_steps() -> Setup:
    return make_step(optax.MultiSteps(optax.adam(0.1), 2))


@program(*BOTH)
def optax_apply_if_finite() -> Setup:
    return make_step(optax.apply_if_finite(optax.sgd(0.1), 3))


@program()
def optax_injected_hyperparameters() -> Setup:
    return make_step(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))


@program("whole")
def optax_lbfgs() -> Setup:
    optimizer = optax.lbfgs(memory_size=2)
    params = jnp.asarray(normal(4))

    def energy(p):
        return jnp.sum((p - 1) ** 4)

    def step(state, shift):
        params, inner = state
        value, gradient = optax.value_and_grad_from_state(energy)(params, state=inner)
        updates, inner = optimizer.update(
            gradient, inner, params, value=value, grad=gradient, value_fn=energy
        )
        return (optax.apply_updates(params, updates) + 0 * shift, inner), value

    return Setup(step, lambda rng: (draw(rng, 4),), (params, optimizer.init(params)))


@program()
def optax_losses() -> Setup:
    def run(logits, labels, targets):
        return (
            optax.softmax_cross_entropy_with_integer_labels(logits, labels),
            optax.huber_loss(logits, targets),
            optax.cosine_similarity(logits, targets),
            optax.sigmoid_focal_loss(logits, jax.nn.one_hot(labels, 4)),
        )

    return Setup(run, lambda rng: (draw(rng, 3, 4), rng.integers(0, 4, 3), draw(rng, 3, 4)))


@program()
def optax_ctc_loss() -> Setup:
    def run(logits, labels):
        zeros = jnp.zeros(logits.shape[:2])

        def loss(logits):
            return optax.ctc_loss(logits, zeros, labels, jnp.zeros(labels.shape)).sum()

        return jax.value_and_grad(loss)(logits)

    return Setup(run, lambda rng: (draw(rng, 1, 5, 4), rng.integers(1, 4, (1, 2))))
