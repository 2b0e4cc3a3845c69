"""Norms, activations and losses as users write them, each with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 1e-5


def norm_by_hand(x: Any, gain: Any, bias: Any) -> Any:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + EPSILON) * gain + bias


def norm_of_squares(x: Any, gain: Any, bias: Any) -> Any:
    """As in flax: the variance is the mean of squares less the square of the mean."""
    wide = x.astype(jnp.float32)
    mean, square = wide.mean(-1), (wide * wide).mean(-1)
    factor = lax.rsqrt(jnp.maximum(0, square - mean * mean) + EPSILON)
    scaled = (wide - jnp.expand_dims(mean, -1)) * (jnp.expand_dims(factor, -1) * gain)
    return (scaled + bias).astype(x.dtype)


def norm_of_roots(x: Any, gain: Any, bias: Any) -> Any:
    """Of a Llama: no mean is taken away."""
    wide = x.astype(jnp.float32)
    size = jnp.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON)
    return (wide / size).astype(x.dtype) * gain + 0 * bias


NORMS: dict[str, Callable[..., Any]] = {
    "by hand": norm_by_hand,
    "of squares": norm_of_squares,
    "of roots": norm_of_roots,
}


def pick_targets(logits: Any, targets: Any) -> Any:
    shares = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(shares, targets[..., None], axis=-1)[..., 0]


def add_one_hot(logits: Any, targets: Any) -> Any:
    """As in optax, with labels that are distributions."""
    one_hot = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return -(one_hot * jax.nn.log_softmax(logits)).sum(-1)


def subtract_sums(logits: Any, targets: Any) -> Any:
    """As in optax, with integer labels."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


LOSSES: dict[str, Callable[..., Any]] = {
    "pick": pick_targets,
    "one hot": add_one_hot,
    "sums": subtract_sums,
}


def run_norm(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a residual, a norm and a matmul, with all gradients."""

    def compute(x: Any, added: Any, gain: Any, bias: Any, matrix: Any, way: Any) -> Any:
        def run(x: Any, added: Any, gain: Any, bias: Any) -> Any:
            x = x + added @ matrix
            return x, norm(x, gain, bias) @ matrix

        results, pull = jax.vjp(run, x, added, gain, bias)
        return results, pull((way, jnp.sin(results[1])))

    return compute


def run_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the mean loss of a matmul's rows, and the gradient of both operands."""

    def compute(hidden: Any, table: Any, targets: Any) -> Any:
        def run(hidden: Any, table: Any) -> Any:
            return loss(hidden @ table, targets).astype(jnp.float32).mean()

        return jax.value_and_grad(run, (0, 1))(hidden, table)

    return compute


def run_activation(activation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an activation between two matmuls, with a bias and all gradients."""

    def compute(x: Any, up: Any, bias: Any, down: Any) -> Any:
        def run(x: Any, up: Any, bias: Any, down: Any) -> Any:
            return activation(x @ up + bias) @ down

        result, pull = jax.vjp(run, x, up, bias, down)
        return result, pull(jnp.cos(result))

    return compute
