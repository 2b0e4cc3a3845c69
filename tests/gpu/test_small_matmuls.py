"""Small matmuls on a GPU, in layers and in loops of layers: no less exact than XLA's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.gpu.reference import compute_exactly, jit_untried
from tests.gpu.test_attention import compare, widen
from tests.tracegraph.replacements.attention.ways import draw
from tests.tracegraph.replacements.few_rows.recurrent import run_cells
from tracegraph.capturing import fastest_variant
from tracegraph.replacements import place_errors
from tracegraph.replacements.few_rows.small_matmuls import SmallMatmuls

pytestmark = pytest.mark.usefixtures("gpu", "untried")
LAYERS, ROWS, WIDTH, HIDDEN = 3, 72, 128, 256


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """This replacement is used, and no other is tried: whether it wins is not what is tested."""
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: [2e-5, 1e-5])
    monkeypatch.setattr(place_errors.PlaceError, "is_allowed", True)
    monkeypatch.setattr(fastest_variant, "RULES", (SmallMatmuls(),))
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")


def make_layers(count: int) -> dict[str, Any]:
    shapes = {"gain": (WIDTH,), "up": (WIDTH, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, WIDTH)}
    drawn = {
        name: draw(count, *shape, dtype=jnp.float32, seed=seed) * (count / shape[0]) ** 0.5
        for seed, (name, shape) in enumerate(shapes.items())
    }
    return drawn | {"gain": 1 + drawn["gain"]}


def run_layer(x: Any, layer: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * layer["gain"]
    return x + jax.nn.gelu(scaled @ layer["up"] + layer["bias"]) @ layer["down"]


def run_written_out(layers: Any, x: Any) -> Any:
    for layer in zip(*layers.values(), strict=True):
        x = run_layer(x, dict(zip(layers, layer, strict=True)))
    return x


def run_loop(layers: Any, x: Any) -> Any:
    apply = jax.checkpoint(lambda hidden, layer: (run_layer(hidden, layer), None))
    return lax.scan(apply, x, layers)[0]


@pytest.mark.parametrize("run", [run_written_out, run_loop])
def test_gradients_are_as_exact_as_xlas(run: Any) -> None:
    def compute(layers: Any, x: Any) -> Any:
        return jax.grad(lambda *args: jnp.sin(run(*args)).sum(), (0, 1))(layers, x)

    layers = make_layers(LAYERS)
    args = layers, draw(2, ROWS, WIDTH, dtype=jnp.float32)
    step: Any = tg.capture(compute, numerics="equivalent")
    ours, theirs = step(*args), jit_untried(compute)(*args)
    assert "small matmuls: used" in step.explain(*args)
    compare(ours, theirs, compute_exactly(compute, *widen(args)))
    again = layers, draw(2, ROWS, WIDTH, dtype=jnp.float32, seed=1)
    exact = compute_exactly(compute, *widen(again))
    compare(step(*again), jit_untried(compute)(*again), exact)


def test_a_cell_of_four_gates_is_as_exact_as_xlas() -> None:
    def compute(weights: Any, xs: Any) -> Any:
        return jax.grad(lambda each: jnp.sin(run_cells(each, xs)).sum())(weights)

    names = {"given": 64, "carried": WIDTH}
    weights = {
        name: draw(depth, 4 * WIDTH, dtype=jnp.float32) * depth**-0.5
        for name, depth in names.items()
    }
    step: Any = tg.capture(compute, numerics="equivalent")
    first, second = (
        (weights, draw(10, ROWS, 64, dtype=jnp.float32, seed=seed)) for seed in range(2)
    )
    for args in (first, second):
        exact = compute_exactly(compute, *widen(args))
        compare(step(*args), jit_untried(compute)(*args), exact)
    assert "small matmuls: used" in step.explain(*first)
    nodes = step.explain(*first, show="nodes").splitlines()
    # One for what the inputs give and one for the cell, in each iteration.
    assert len([line for line in nodes if "ffi_call" in line]) >= 2 * 10


def test_weights_that_are_updated_in_place_train_as_with_jit() -> None:
    def train(layers: Any, x: Any) -> Any:
        def compute_loss(layers: Any) -> Any:
            return ((run_written_out(layers, x) - jnp.roll(x, 1, 0)) ** 2).mean()

        loss, gradients = jax.value_and_grad(compute_loss)(layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), loss

    layers = [make_layers(1) for _ in range(LAYERS)]
    stacked = jax.tree.map(lambda *each: jnp.concatenate(each), *layers)
    x = draw(2, ROWS, WIDTH, dtype=jnp.float32)
    step: Any = tg.capture(train, donate_argnums=0, numerics="equivalent")
    plain = jit_untried(train)
    ours, theirs = jax.tree.map(jnp.copy, stacked), stacked
    losses = []
    for _ in range(20):
        ours, loss = step(ours, x)
        theirs, wanted = plain(theirs, x)
        np.testing.assert_allclose(loss, wanted, rtol=2e-3)
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
