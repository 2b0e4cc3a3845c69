"""The cases of `gpu_replay.py`: JAX functions, their state and their batches.

State and batches are NumPy values from fixed seeds, so that every peer starts from the same
numbers, in whichever process it runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

LEARNING_RATE, BETAS, EPSILON = 1e-3, (0.9, 0.999), 1e-8
MLP_LEARNING_RATE, MLP_DROPOUT = 0.1, (0.2, 0.1)
NORM_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class PointwiseShape:
    """A function of one vector; ``kind`` is ``double`` or ``wave``."""

    kind: str
    elements: int


@dataclasses.dataclass(frozen=True)
class MlpShape:
    """The whole-network example of the CUDA semantics."""

    rows: int
    inputs: int
    hidden: int
    outputs: int


@dataclasses.dataclass(frozen=True)
class GptShape:
    """A decoder with learned positions and tied embeddings; ``tokens`` is (sequences, length)."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    tokens: tuple[int, int]


Shape: TypeAlias = PointwiseShape | MlpShape | GptShape


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    Attributes:
        name: in the tables.
        shape: what the peers build it from.
        function: ``(state, *batch) -> (state, loss)``, or ``batch -> result`` without state.
        has_state: True when the function takes and returns a state, which is donated.
        calls: calls of one timed block.
        tolerance: greatest relative difference of a result from `jax.jit`'s, as a norm.
    """

    name: str
    shape: Shape
    function: Callable[..., Any]
    has_state: bool
    calls: int
    tolerance: float


def double(x: jax.Array) -> jax.Array:
    """The tiny function."""
    return x * 2


def wave(x: jax.Array) -> jax.Array:
    """One input, one output, one kernel."""
    return jnp.sin(x) * 2 + 1


def step_mlp(state: Any, inputs: jax.Array, target: jax.Array) -> tuple[Any, jax.Array]:
    """One step of gradient descent on Linear, Dropout, Linear, Dropout and the mean square error.

    Args:
        state: the parameters, and a JAX key that is split at each step.
        inputs: float32[rows, inputs].
        target: float32[rows, outputs].

    Returns:
        The new state and the loss.
    """
    parameters, key = state
    key, first, second = jax.random.split(key, 3)

    def compute_loss(parameters: Any) -> jax.Array:
        hidden = inputs @ parameters["in_weight"] + parameters["in_bias"]
        hidden = _drop(hidden, first, MLP_DROPOUT[0])
        output = hidden @ parameters["out_weight"] + parameters["out_bias"]
        return jnp.mean((_drop(output, second, MLP_DROPOUT[1]) - target) ** 2)

    loss, gradient = jax.value_and_grad(compute_loss)(parameters)
    moved = jax.tree.map(lambda p, g: p - MLP_LEARNING_RATE * g, parameters, gradient)
    return (moved, key), loss


def _drop(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def make_gpt_step(heads: int) -> Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]:
    """Returns a train step with Adam; its state is (parameters, first, second moments, count)."""

    def step(state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        parameters, first, second, count = state
        compute = jax.value_and_grad(compute_gpt_loss)
        loss, gradient = compute(parameters, tokens, targets, heads)
        count = count + 1
        first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, gradient)
        second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, gradient)
        first_scale, second_scale = 1 - BETAS[0] ** count, 1 - BETAS[1] ** count

        def move(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p - LEARNING_RATE * (m / first_scale) / (jnp.sqrt(v / second_scale) + EPSILON)

        return (jax.tree.map(move, parameters, first, second), first, second, count), loss

    return step


def compute_gpt_loss(
    parameters: Any, tokens: jax.Array, targets: jax.Array, heads: int
) -> jax.Array:
    """Returns the mean cross entropy of the next token.

    Args:
        parameters: as `make_parameters` gives them.
        tokens: int32[sequences, length].
        targets: int32[sequences, length].
        heads: of attention.
    """
    x = parameters["token_embedding"][tokens]
    x = x + parameters["position_embedding"][: tokens.shape[1]]
    for block in parameters["blocks"]:
        x = x + _attend(_normalise(x, block, "norm_1"), block, heads)
        hidden = _normalise(x, block, "norm_2") @ block["up_weight"] + block["up_bias"]
        x = x + jax.nn.gelu(hidden) @ block["down_weight"] + block["down_bias"]
    logits = jax.nn.log_softmax(x @ parameters["token_embedding"].T)
    return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], axis=-1))


def _normalise(x: jax.Array, block: Any, name: str) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(variance + NORM_EPSILON)
    return scaled * block[f"{name}_gain"] + block[f"{name}_bias"]


def _attend(x: jax.Array, block: Any, heads: int) -> jax.Array:
    sequences, length, width = x.shape
    joined = x @ block["qkv_weight"] + block["qkv_bias"]
    query, key, value = (
        part.reshape(sequences, length, heads, width // heads).transpose(0, 2, 1, 3)
        for part in jnp.split(joined, 3, axis=-1)
    )
    scores = query @ key.transpose(0, 1, 3, 2) / math.sqrt(width // heads)
    is_past = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(is_past, scores, -1e9), axis=-1)
    mixed = (weights @ value).transpose(0, 2, 1, 3).reshape(sequences, length, width)
    return mixed @ block["out_weight"] + block["out_bias"]


def make_parameters(shape: MlpShape | GptShape, seed: int = 0) -> Any:
    """Returns the initial parameters, a tree of float32 NumPy arrays."""
    generator = np.random.default_rng(seed)
    if isinstance(shape, MlpShape):
        return _make_mlp_parameters(shape, generator)

    def draw(*dims: int) -> np.ndarray[Any, Any]:
        return generator.standard_normal(dims, dtype=np.float32) * np.float32(0.02)

    width = shape.width
    blocks = [
        {
            "norm_1_gain": np.ones(width, np.float32),
            "norm_1_bias": np.zeros(width, np.float32),
            "qkv_weight": draw(width, 3 * width),
            "qkv_bias": np.zeros(3 * width, np.float32),
            "out_weight": draw(width, width),
            "out_bias": np.zeros(width, np.float32),
            "norm_2_gain": np.ones(width, np.float32),
            "norm_2_bias": np.zeros(width, np.float32),
            "up_weight": draw(width, 4 * width),
            "up_bias": np.zeros(4 * width, np.float32),
            "down_weight": draw(4 * width, width),
            "down_bias": np.zeros(width, np.float32),
        }
        for _ in range(shape.layers)
    ]
    return {
        "token_embedding": draw(shape.vocabulary, width),
        "position_embedding": draw(shape.context, width),
        "blocks": blocks,
    }


def _make_mlp_parameters(shape: MlpShape, generator: np.random.Generator) -> Any:
    def draw(fan_in: int, *dims: int) -> np.ndarray[Any, Any]:
        bound = 1 / np.sqrt(fan_in)
        return generator.uniform(-bound, bound, dims).astype(np.float32)

    return {
        "in_weight": draw(shape.inputs, shape.inputs, shape.hidden),
        "in_bias": draw(shape.inputs, shape.hidden),
        "out_weight": draw(shape.hidden, shape.hidden, shape.outputs),
        "out_bias": draw(shape.hidden, shape.outputs),
    }


def make_batches(shape: Shape, count: int, seed: int = 1) -> list[tuple[Any, ...]]:
    """Returns batches as NumPy arrays: what a call takes besides its state."""
    generator = np.random.default_rng(seed)

    def make_batch() -> tuple[Any, ...]:
        if isinstance(shape, PointwiseShape):
            return (generator.standard_normal(shape.elements, dtype=np.float32),)
        if isinstance(shape, MlpShape):
            sizes = ((shape.rows, shape.inputs), (shape.rows, shape.outputs))
            return tuple(generator.standard_normal(size, dtype=np.float32) for size in sizes)
        text = generator.integers(0, shape.vocabulary, shape.tokens, dtype=np.int32)
        return text, np.roll(text, -1, axis=1)

    return [make_batch() for _ in range(count)]


def make_state(shape: Shape, *, is_smooth: bool = False) -> Any:
    """Returns a new state of a case on JAX's default device.

    Args:
        shape: of the case; it must have state.
        is_smooth: start Adam's second moments at 1. From zero its first step is the sign of the
            gradient, in which rounding alone turns -lr into +lr, so that no two programs agree.
    """
    if isinstance(shape, PointwiseShape):
        raise TypeError(f"{shape} has no state")
    parameters = jax.device_put(make_parameters(shape))
    if isinstance(shape, MlpShape):
        return parameters, jax.random.key(0)
    first, second = (jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
    if is_smooth:
        second = jax.tree.map(jnp.ones_like, second)
    return parameters, first, second, jnp.float32(10.0 if is_smooth else 0.0)


def make_gpt2_shape(*, is_dry: bool) -> GptShape:
    """Returns the sizes of GPT-2 small, trained on 8 sequences of 256 tokens."""
    if is_dry:
        return GptShape(1, 8, 2, 256, 8, (2, 4))
    return GptShape(12, 768, 12, 50304, 1024, (8, 256))


def make_cases(*, is_dry: bool = False) -> list[Case]:
    """Returns the cases in the order of the tables.

    Args:
        is_dry: sizes that a CPU runs in a moment.
    """
    small, deep = GptShape(2, 128, 4, 256, 64, (4, 64)), GptShape(12, 128, 4, 256, 64, (4, 64))
    gpt2, mlp = GptShape(12, 768, 12, 50304, 1024, (8, 256)), MlpShape(640, 4096, 2048, 1024)
    if is_dry:
        small = gpt2 = GptShape(1, 8, 2, 16, 8, (2, 4))
        deep, mlp = GptShape(2, 8, 2, 16, 8, (2, 4)), MlpShape(4, 8, 6, 2)
    cases = [
        Case("tiny", PointwiseShape("double", 5), double, False, 1000, 1e-6),
        Case("one_in_one_out", PointwiseShape("wave", 1024), wave, False, 1000, 1e-6),
        Case("gpt_2x128", small, make_gpt_step(small.heads), True, 200, 5e-3),
        Case("gpt_12x128", deep, make_gpt_step(deep.heads), True, 60, 5e-3),
        Case("gpt2_small", gpt2, make_gpt_step(gpt2.heads), True, 8, 5e-3),
        Case("mlp", mlp, step_mlp, True, 200, 5e-3),
    ]
    return [dataclasses.replace(case, calls=3) for case in cases] if is_dry else cases
