"""Two models with their train steps, written without a library: an MLP and a GPT, both with state.

A state is a tree of arrays that a step takes and returns, as a train loop passes it on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256
CONTEXT = 64
MLP_SIZES = (64, 128, 128, 10)


def make_mlp_state(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Returns float32 weights, biases and momenta of an MLP, one dict per layer."""
    state = []
    for fan_in, fan_out in itertools.pairwise(MLP_SIZES):
        weight = rng.normal(0, 1 / math.sqrt(fan_in), (fan_in, fan_out)).astype(np.float32)
        bias = np.zeros(fan_out, np.float32)
        momenta = {"weight_momentum": np.zeros_like(weight), "bias_momentum": np.zeros_like(bias)}
        state.append({"weight": weight, "bias": bias, **momenta})
    return state


def step_mlp(state: list[dict[str, Any]], inputs: Any, labels: Any) -> tuple[Any, Any]:
    """Trains an MLP on one batch by momentum, and returns the new state and the loss.

    Args:
        state: see `make_mlp_state`.
        inputs: float32[batch, 64].
        labels: int32[batch], each below 10.
    """
    parameters = [(layer["weight"], layer["bias"]) for layer in state]
    loss, gradients = jax.value_and_grad(_measure_mlp)(parameters, inputs, labels)
    new_state = []
    for layer, (weight_gradient, bias_gradient) in zip(state, gradients, strict=True):
        weight_momentum = 0.9 * layer["weight_momentum"] + weight_gradient
        bias_momentum = 0.9 * layer["bias_momentum"] + bias_gradient
        new_state.append(
            {
                "weight": layer["weight"] - 0.01 * weight_momentum,
                "bias": layer["bias"] - 0.01 * bias_momentum,
                "weight_momentum": weight_momentum,
                "bias_momentum": bias_momentum,
            }
        )
    return new_state, loss


def _measure_mlp(parameters: list[tuple[Any, Any]], inputs: Any, labels: Any) -> Any:
    hidden = inputs
    for weight, bias in parameters[:-1]:
        hidden = jax.nn.relu(hidden @ weight + bias)
    weight, bias = parameters[-1]
    return _cross_entropy(hidden @ weight + bias, labels)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -jnp.mean(picked)


def make_gpt_state(rng: np.random.Generator, layers: int, width: int) -> tuple[Any, Any, Any, Any]:
    """Returns float32 parameters, both Adam moments and the step count of a GPT.

    With 2 layers these are 79 arrays, with 12 layers 439.
    """

    def draw(*shape: int) -> Any:
        return rng.normal(0, 0.02, shape).astype(np.float32)

    def make_block() -> dict[str, Any]:
        return {
            "norm1_scale": np.ones(width, np.float32),
            "norm1_bias": np.zeros(width, np.float32),
            "qkv_weight": draw(width, 3 * width),
            "qkv_bias": np.zeros(3 * width, np.float32),
            "project_weight": draw(width, width),
            "project_bias": np.zeros(width, np.float32),
            "norm2_scale": np.ones(width, np.float32),
            "norm2_bias": np.zeros(width, np.float32),
            "widen_weight": draw(width, 4 * width),
            "widen_bias": np.zeros(4 * width, np.float32),
            "narrow_weight": draw(4 * width, width),
            "narrow_bias": np.zeros(width, np.float32),
        }

    parameters = {
        "tokens": draw(VOCABULARY, width),
        "positions": draw(CONTEXT, width),
        "blocks": [make_block() for _ in range(layers)],
    }
    first_moment = jax.tree.map(np.zeros_like, parameters)
    second_moment = jax.tree.map(np.zeros_like, parameters)
    return parameters, first_moment, second_moment, np.zeros((), np.float32)


def make_gpt_step(heads: int, rate: float = 1e-3) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that trains a GPT on one batch by Adam.

    It takes a state, tokens int32[batch, time] and targets int32[batch, time], with time at most
    `CONTEXT`, and returns the new state and the loss.
    """

    def measure(parameters: Any, tokens: Any, targets: Any) -> Any:
        return _cross_entropy(_apply_gpt(parameters, tokens, heads), targets)

    def step_gpt(state: Any, tokens: Any, targets: Any) -> tuple[Any, Any]:
        parameters, first, second, count = state
        loss, gradients = jax.value_and_grad(measure)(parameters, tokens, targets)
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
        first_scale, second_scale = 1 - 0.9**count, 1 - 0.999**count

        def move(parameter: Any, m: Any, v: Any) -> Any:
            return parameter - rate * (m / first_scale) / (jnp.sqrt(v / second_scale) + 1e-8)

        return (jax.tree.map(move, parameters, first, second), first, second, count), loss

    return step_gpt


def _apply_gpt(parameters: Any, tokens: Any, heads: int) -> Any:
    hidden = parameters["tokens"][tokens] + parameters["positions"][: tokens.shape[1]]
    for block in parameters["blocks"]:
        normal = _normalize(hidden, block["norm1_scale"], block["norm1_bias"])
        mixed = _attend(normal @ block["qkv_weight"] + block["qkv_bias"], heads)
        hidden = hidden + mixed @ block["project_weight"] + block["project_bias"]
        normal = _normalize(hidden, block["norm2_scale"], block["norm2_bias"])
        wide = jax.nn.gelu(normal @ block["widen_weight"] + block["widen_bias"])
        hidden = hidden + wide @ block["narrow_weight"] + block["narrow_bias"]
    return hidden @ parameters["tokens"].T


def _normalize(hidden: Any, scale: Any, bias: Any) -> Any:
    centred = hidden - hidden.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def _attend(qkv: Any, heads: int) -> Any:
    batch, time, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    split = [
        part.reshape(batch, time, heads, width // heads).transpose(0, 2, 1, 3)
        for part in jnp.split(qkv, 3, -1)
    ]
    query, key, value = split
    scores = query @ key.transpose(0, 1, 3, 2) / math.sqrt(width // heads)
    mask = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
    return (weights @ value).transpose(0, 2, 1, 3).reshape(batch, time, width)
