"""The programs of `whole_programs.py`, as users of flax, optax, equinox and diffrax write them.

Each is one function with its arguments, at a size for a GPU and at one that a CPU compiles in
seconds. Parameters come from fixed seeds, so that two processes start from the same numbers.

Longer than other files: scripts import it from its folder and tests from the checkout, so it can
import no neighbour.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import diffrax
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax

Implementation: TypeAlias = Literal["xla", "cudnn"] | None

# Adam divides by this and the root of the second moment: with the usual 1e-8 its first step is the
# sign of the gradient, in which rounding alone turns one sign into the other.
EPSILON = 1e-3


@dataclasses.dataclass(frozen=True)
class Setup:
    """A function and what it is called with.

    Attributes:
        function: ``(state, *batch)`` to ``(state, result)``, the state donated.
        state: before the first call, of NumPy arrays.
        batch: of every call, of NumPy arrays.
    """

    function: Callable[..., Any]
    state: Any
    batch: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class WholeProgram:
    """One row of the benchmark.

    Attributes:
        name: in the tables.
        make: returns the function and its arguments; takes True for small ones.
        tolerance: greatest difference of a leaf from that of `jax.jit`, as a ratio of norms.
        limit: greatest ratio to the time of `jax.jit`.
        calls: calls of one timed block.
    """

    name: str
    make: Callable[[bool], Setup]
    tolerance: float
    limit: float
    calls: int


def _make_parameters(shapes: Any) -> Any:
    """Returns parameters with the shapes of a tree, drawn by the names of its leaves."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> np.ndarray[Any, Any]:
        name = str(getattr(path[-1], "key", ""))
        if name in ("scale", "var"):
            return np.ones(leaf.shape, leaf.dtype)
        if name in ("bias", "mean"):
            return np.zeros(leaf.shape, leaf.dtype)
        wide = 0.02 if name == "embedding" else np.sqrt(1 / max(np.prod(leaf.shape[-4:-1]), 1))
        return (wide * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def _init(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Returns the variables of a module; nothing is compiled for them."""
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs, **options))
    return _make_parameters(shapes)


def _init_optimizer(optimizer: optax.GradientTransformation, parameters: Any) -> Any:
    shapes = jax.eval_shape(optimizer.init, parameters)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses.mean()


def _draw(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def _pick(count: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(2).integers(0, count, shape, dtype=np.int32)


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms, and the way around them."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any, is_training: bool) -> Any:
        """Returns the images of the next block."""
        strides = (self.stride, self.stride)
        around = x
        if self.stride > 1 or x.shape[-1] != self.width:
            around = nn.Conv(self.width, (1, 1), strides, use_bias=False)(x)
            around = nn.BatchNorm(not is_training)(around)
        x = nn.Conv(self.width, (3, 3), strides, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(not is_training)(x))
        x = nn.BatchNorm(not is_training)(nn.Conv(self.width, (3, 3), use_bias=False)(x))
        return nn.relu(x + around)


class ResNet18(nn.Module):
    """ResNet-18 for small images: its first layer has a stride of 1 and no pooling."""

    width: int

    @nn.compact
    def __call__(self, x: Any, is_training: bool) -> Any:
        """Returns logits."""
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(not is_training)(x))
        for stage in range(4):
            for block in range(2):
                stride = 2 if stage and not block else 1
                x = ResidualBlock(self.width << stage, stride)(x, is_training)
        return nn.Dense(10)(x.mean((1, 2)))


def make_resnet18(is_small: bool) -> Setup:
    """Returns a train step of ResNet-18 with batch norm and momentum."""
    images = _draw(4, 16, 16, 3) if is_small else _draw(64, 32, 32, 3)
    model, optimizer = ResNet18(8 if is_small else 64), optax.sgd(0.1, momentum=0.9)

    def step(state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        variables, moments = state

        def compute_loss(parameters: Any) -> tuple[Any, Any]:
            logits, updates = model.apply(
                {**variables, "params": parameters}, images, True, mutable=["batch_stats"]
            )
            return _cross_entropy(logits, labels), updates

        compute = jax.value_and_grad(compute_loss, has_aux=True)
        (loss, updates), gradient = compute(variables["params"])
        changes, moments = optimizer.update(gradient, moments)
        parameters = optax.apply_updates(variables["params"], changes)
        return ({"params": parameters, **updates}, moments), loss

    variables = _init(model, images, False)
    state = (variables, _init_optimizer(optimizer, variables["params"]))
    return Setup(step, state, (images, _pick(10, len(images))))


class EncoderBlock(nn.Module):
    """A layer of a vision transformer."""

    heads: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns the tokens of the next layer."""
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden)


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, learned positions."""

    layers: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, images: Any) -> Any:
        """Returns logits."""
        x = nn.Conv(self.width, (4, 4), (4, 4), padding="VALID")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        normal = nn.initializers.normal(0.02)
        first = self.param("embedding", normal, (1, 1, self.width))
        x = jnp.concatenate([jnp.tile(first, (x.shape[0], 1, 1)), x], 1)
        x = x + self.param("positions", normal, (1, x.shape[1], self.width))
        for _ in range(self.layers):
            x = EncoderBlock(self.heads)(x)
        return nn.Dense(10)(nn.LayerNorm()(x)[:, 0])


def make_vit(is_small: bool) -> Setup:
    """Returns a train step of a vision transformer with AdamW."""
    images = _draw(2, 16, 16, 3) if is_small else _draw(64, 32, 32, 3)
    model = VisionTransformer(2, 16, 2) if is_small else VisionTransformer(6, 192, 3)
    labels = _pick(10, len(images))
    return _make_training(model, optax.adamw(3e-4, eps=EPSILON), images, labels)


class DecoderBlock(nn.Module):
    """A layer of a GPT; ``implementation`` is that of `jax.nn.dot_product_attention`."""

    heads: int
    dtype: Any
    implementation: Implementation

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> tuple[Any, None]:
        """Returns the tokens of the next layer, and nothing besides."""
        batch, length, width = x.shape
        joined = nn.Dense(3 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        parts = joined.reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (parts[:, :, index] for index in range(3))
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=self.implementation
        )
        x = x + nn.Dense(width, dtype=self.dtype)(mixed.reshape(x.shape))
        hidden = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(hidden)), None


class Gpt(nn.Module):
    """A GPT whose layers are one loop, or one after another; a loop is checkpointed."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    is_loop: bool
    dtype: Any = jnp.float32
    implementation: Implementation = None

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        """Returns logits."""
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        normal = nn.initializers.normal(0.02)
        positions = self.param("positions", normal, (tokens.shape[1], self.width))
        x = embed(tokens) + positions.astype(self.dtype)
        options = (self.heads, self.dtype, self.implementation)
        if self.is_loop:
            layers = nn.scan(
                nn.remat(DecoderBlock),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = layers(*options)(x, None)
        else:
            for _ in range(self.layers):
                x, _ = DecoderBlock(*options)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def _make_training(
    model: nn.Module, optimizer: optax.GradientTransformation, inputs: Any, labels: Any
) -> Setup:
    """Returns a train step on the cross entropy of a model without other variables."""

    def step(state: Any, inputs: Any, labels: Any) -> tuple[Any, Any]:
        parameters, moments = state
        compute = jax.value_and_grad(lambda p: _cross_entropy(model.apply(p, inputs), labels))
        loss, gradient = compute(parameters)
        changes, moments = optimizer.update(gradient, moments, parameters)
        return (optax.apply_updates(parameters, changes), moments), loss

    parameters = _init(model, inputs)
    state = (parameters, _init_optimizer(optimizer, parameters))
    return Setup(step, state, (inputs, labels))


def make_gpt_scan(is_small: bool) -> Setup:
    """Returns a train step of a GPT: `scan` over 12 layers, each under `jax.checkpoint`."""
    model = Gpt(3, 16, 2, 32, True) if is_small else Gpt(12, 128, 4, 256, True)
    tokens = _pick(32, 2, 8) if is_small else _pick(256, 4, 64)
    return _make_training(model, optax.adam(1e-3, eps=EPSILON), tokens, np.roll(tokens, -1, 1))


def make_gpt_bf16(is_small: bool) -> Setup:
    """Returns a train step of a GPT in bf16, whose attention is cuDNN's where there is a GPU."""
    implementation: Implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    options: dict[str, Any] = {"dtype": jnp.bfloat16, "implementation": implementation}
    size = (1, 64, 1, 32, False) if is_small else (4, 512, 8, 1024, False)
    tokens = _pick(32, 2, 64) if is_small else _pick(1024, 8, 512)
    model = Gpt(*size, **options)
    return _make_training(model, optax.adam(1e-3, eps=EPSILON), tokens, np.roll(tokens, -1, 1))


class Tagger(nn.Module):
    """An LSTM and a linear layer on each of its outputs."""

    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns logits."""
        return nn.Dense(10)(nn.RNN(nn.OptimizedLSTMCell(self.width))(x))


def make_lstm(is_small: bool) -> Setup:
    """Returns a train step of an LSTM over 100 steps, which flax writes as a `scan`."""
    inputs = _draw(2, 100, 4) if is_small else _draw(64, 100, 128)
    model = Tagger(8 if is_small else 256)
    labels = _pick(10, *inputs.shape[:2])
    return _make_training(model, optax.adam(1e-3, eps=EPSILON), inputs, labels)


def make_diffrax(is_small: bool) -> Setup:
    """Returns the solution of a neural differential equation with steps of adaptive size."""
    width, batch = (8, 2) if is_small else (64, 256)
    network = equinox.nn.MLP(2, 2, width, 2, activation=jnp.tanh, key=jax.random.key(0))
    parameters, fixed = equinox.partition(network, equinox.is_array)

    def solve(parameters: Any, starts: Any) -> tuple[Any, Any]:
        field = equinox.combine(parameters, fixed)
        term = diffrax.ODETerm(lambda _time, y, _: jax.vmap(field)(y) - y)
        solution: Any = diffrax.diffeqsolve(
            term,
            diffrax.Tsit5(),
            0.0,
            2.0,
            0.1,
            starts,
            saveat=diffrax.SaveAt(steps=True),
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
            max_steps=64,
            # An error that is raised calls back into Python, and so does the check of given times.
            throw=False,
        )
        # What is behind the last step is infinite.
        found = jnp.where(jnp.isfinite(solution.ys), solution.ys, 0)
        return parameters, (found, solution.stats["num_steps"])

    return Setup(solve, jax.tree.map(np.asarray, parameters), (_draw(batch, 2),))


def make_gaussian_process(is_small: bool) -> Setup:
    """Returns a step of gradient descent on the likelihood of a Gaussian process."""
    points = _draw(16 if is_small else 1024, 3)
    values = np.sin(points.sum(1))

    def measure(parameters: Any, points: Any, values: Any) -> Any:
        scale, width, noise = (jnp.exp(parameters[name]) for name in ("scale", "width", "noise"))
        squares = ((points[:, None] - points[None]) ** 2).sum(-1)
        kernel = scale * jnp.exp(-squares / (2 * width**2)) + noise * jnp.eye(len(points))
        factor = jnp.linalg.cholesky(kernel)
        weights = jax.scipy.linalg.cho_solve((factor, True), values)
        return 0.5 * values @ weights + jnp.log(jnp.diagonal(factor)).sum()

    def step(parameters: Any, points: Any, values: Any) -> tuple[Any, Any]:
        loss, gradient = jax.value_and_grad(measure)(parameters, points, values)
        # Small steps: once the noise is gone the kernel is singular, and all that follows is NaN.
        return jax.tree.map(lambda p, g: p - 1e-6 * g, parameters, gradient), loss

    start = {"scale": 0.0, "width": 0.0, "noise": -2.0}
    return Setup(step, {k: np.float32(v) for k, v in start.items()}, (points, values))


def make_decode(is_small: bool) -> Setup:
    """Returns one step of a decoder with a cache of keys and values: one token per sequence."""
    layers, width, heads, context = (2, 16, 2, 8) if is_small else (12, 768, 12, 512)
    vocabulary, batch, dtype = 32 if is_small else 32_000, 1, jnp.bfloat16
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return (rng.standard_normal(shape, dtype=np.float32) / np.sqrt(shape[-2])).astype(dtype)

    block = {
        "qkv": draw(layers, width, 3 * width),
        "out": draw(layers, width, width),
        "up": draw(layers, width, 4 * width),
        "down": draw(layers, 4 * width, width),
    }
    weights = {"embed": draw(vocabulary, width), "blocks": block}
    cache = np.zeros((layers, 2, batch, context, heads, width // heads), dtype)

    def normalise(x: Any) -> Any:
        return x * lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)).astype(dtype)

    def advance(state: Any, weights: Any, tokens: Any) -> tuple[Any, Any]:
        cache, position = state

        def apply(carried: Any, layer: Any) -> tuple[Any, Any]:
            x, block, kept = carried, *layer
            parts = (normalise(x) @ block["qkv"]).reshape(batch, 3, heads, width // heads)
            # The new key and value go to this position of the layer's cache.
            new = parts[:, 1:].transpose(1, 0, 2, 3)[:, :, None]
            kept = lax.dynamic_update_slice_in_dim(kept, new, position, 2)
            scores = jnp.einsum("bhd,bthd->bht", parts[:, 0], kept[0]) / np.sqrt(width // heads)
            is_past = jnp.arange(context) <= position
            shares = jax.nn.softmax(jnp.where(is_past, scores.astype(jnp.float32), -1e9))
            mixed = jnp.einsum("bht,bthd->bhd", shares.astype(dtype), kept[1])
            x = x + mixed.reshape(batch, width) @ block["out"]
            return x + jax.nn.silu(normalise(x) @ block["up"]) @ block["down"], kept

        x, cache = lax.scan(apply, weights["embed"][tokens], (weights["blocks"], cache))
        # Results that are tokens would turn on the last bit of two logits.
        logits = (normalise(x) @ weights["embed"].T).astype(jnp.float32)
        return (cache, (position + 1) % context), logits

    return Setup(advance, (cache, np.int32(0)), (weights, np.zeros(batch, np.int32)))


PROGRAMS = (
    WholeProgram("resnet18", make_resnet18, 2e-2, 1.0, 40),
    WholeProgram("vit", make_vit, 2e-2, 1.0, 40),
    WholeProgram("gpt_scan_12", make_gpt_scan, 5e-3, 0.35, 40),
    WholeProgram("gpt_bf16_cudnn", make_gpt_bf16, 5e-2, 1.0, 40),
    WholeProgram("lstm_100", make_lstm, 5e-3, 0.35, 20),
    WholeProgram("diffrax", make_diffrax, 5e-3, 0.35, 20),
    WholeProgram("gaussian_process", make_gaussian_process, 5e-3, 1.0, 40),
    WholeProgram("decode", make_decode, 5e-2, 1.0, 100),
)
