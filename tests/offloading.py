"""Functions that keep values in host memory, for tests on each device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)


def _apply(h: Any, w: Any) -> Any:
    return jnp.tanh(checkpoint_name(jnp.sin(h @ w), "hidden"))


def train_layers(weights: Any, x: Any) -> Any:
    """A step whose activations are offloaded, layer by layer."""
    apply = jax.checkpoint(_apply, policy=_POLICY)

    def loss(weights: Any) -> Any:
        return (functools.reduce(apply, weights, x) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def train_scan(weights: Any, x: Any) -> Any:
    """The same with a `scan` over the layers, which offloads a stack of activations."""
    apply = jax.checkpoint(_apply, policy=_POLICY)

    def loss(weights: Any) -> Any:
        return (jax.lax.scan(lambda h, w: (apply(h, w), None), x, weights)[0] ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def add_there(x: Any, y: Any) -> Any:
    """Adds in host memory."""
    there = jax.device_put(x, HOST) + jax.device_put(y, HOST)
    return jax.device_put(there, DEVICE) * 2


def make_arguments(layers: int, width: int, seed: int = 0) -> tuple[Any, Any]:
    """Returns weights and a batch, for `train_layers` and `train_scan`."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(layers, width, width)) / width**0.5
    return weights.astype(np.float32), rng.normal(size=(width, width)).astype(np.float32)


TRAINS: tuple[Callable[..., Any], ...] = (train_layers, train_scan)
