"""Attention over whole rows on a GPU, forward and backward: no less exact than XLA's."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import compute_exactly, jit_untried
from tests.gpu.test_attention import compare, widen
from tests.tracegraph.replacements.attention import test_whole_rows as ways
from tests.tracegraph.replacements.attention.masks import MASKS
from tests.tracegraph.replacements.attention.ways import draw
from tracegraph.capturing import fastest_variant
from tracegraph.replacements import place_errors
from tracegraph.replacements.attention.whole_rows import WholeRows

pytestmark = pytest.mark.usefixtures("gpu", "untried")


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """This replacement is used, and no other is tried: whether it wins is not what is tested.

    Small products XLA may compute by other units than tensor cores, with all bits.
    """
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: [2e-5, 1e-5])
    monkeypatch.setattr(place_errors.PlaceError, "is_allowed", True)
    monkeypatch.setattr(fastest_variant, "RULES", (WholeRows(),))
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")


def compare_steps(ours: Any, theirs: Any, exact: Any) -> None:
    """Compares losses and gradients; the error of one number is chance."""
    np.testing.assert_allclose(ours[0], exact[0], rtol=4e-3)
    compare(ours[1], theirs[1], exact[1])


def test_all_ways_in_one_step_are_as_exact_as_xlas() -> None:
    inputs = {name: make() for name, (_, make) in ways.WAYS.items()}

    def compute(inputs: Any) -> Any:
        return {
            name: ways.differentiate(ways.WAYS[name][0], tuple(range(len(args))))(*args)
            for name, args in inputs.items()
        }

    step: Any = tg.capture(compute, numerics="equivalent")
    ours, theirs = step(inputs), jit_untried(compute)(inputs)
    report = step.explain(inputs)
    assert "attention over whole rows: used" in report
    assert report.count("attention over whole rows") == 1
    exact = compute_exactly(compute, widen(inputs))
    for name in inputs:
        compare_steps(ours[name], theirs[name], exact[name])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 256, 5, 64), jnp.bfloat16),
        ((1, 208, 2, 128), jnp.float16),
        ((2, 256, 2, 80), jnp.bfloat16),
        ((2, 144, 3, 96), jnp.float32),
        ((1, 16, 1, 16), jnp.float32),
        ((40, 128, 8, 32), jnp.bfloat16),
    ],
)
def test_each_tiling_is_as_exact_as_xlas(shape: tuple[int, ...], dtype: Any) -> None:
    def attend(query: Any, key: Any, value: Any) -> Any:
        scores = jnp.einsum("bqhd,bthd->bhqt", query, key) * shape[-1] ** -0.5
        return jnp.einsum("bhqt,bthd->bqhd", jax.nn.softmax(ways.hide_future(scores)), value)

    compute = ways.differentiate(attend)
    args = [draw(*shape, dtype=dtype, seed=seed) for seed in range(3)]
    step: Any = tg.capture(compute, numerics="equivalent")
    ours, theirs = step(*args), jit_untried(compute)(*args)
    assert "attention over whole rows: used" in step.explain(*args)
    compare_steps(ours, theirs, compute_exactly(compute, *widen(args)))
    # Other values, and what a block leaves in its memory does not matter.
    again = [draw(*shape, dtype=dtype, seed=seed) for seed in range(3, 6)]
    exact = compute_exactly(compute, *widen(again))
    compare_steps(step(*again), jit_untried(compute)(*again), exact)


@pytest.mark.parametrize("name", MASKS)
def test_each_mask_on_indices_is_as_exact_as_xlas(name: str) -> None:
    args = [draw(1, 128, 2, 32, seed=seed) for seed in range(3)]
    compute = ways.differentiate(functools.partial(ways.attend, edit=MASKS[name]))
    step: Any = tg.capture(compute, numerics="equivalent")
    ours, theirs = step(*args), jit_untried(compute)(*args)
    assert "attention over whole rows: used" in step.explain(*args)
    compare_steps(ours, theirs, compute_exactly(compute, *widen(args)))


def test_layers_of_a_loop_train_as_with_jit() -> None:
    def train(weights: Any, x: Any) -> Any:
        @jax.checkpoint
        def apply(hidden: Any, each: Any) -> Any:
            return hidden + ways.attend_split(hidden, each), None

        def compute_loss(weights: Any) -> Any:
            hidden, _ = jax.lax.scan(apply, x, weights)
            return ((hidden - jnp.roll(x, 1, 0)).astype(jnp.float32) ** 2).mean()

        loss, gradient = jax.value_and_grad(compute_loss)(weights)
        return weights - 0.05 * gradient, loss

    size = ways.HEADS * ways.WIDTH
    weights = draw(3, size, 3 * size, dtype=jnp.float32) / 8
    x = draw(ways.BATCH, ways.ROWS, size, dtype=jnp.float32)
    step: Any = tg.capture(train, donate_argnums=0, numerics="equivalent")
    plain = jit_untried(train)
    ours, theirs = jnp.copy(weights), weights
    for _ in range(5):
        ours, loss = step(ours, x)
        theirs, wanted = plain(theirs, x)
        np.testing.assert_allclose(loss, wanted, rtol=2e-3)
    assert "attention over whole rows: used" in step.explain(ours, x)


def test_a_model_trains_as_with_jit() -> None:
    def train(weights: Any, x: Any) -> Any:
        def compute_loss(weights: Any) -> Any:
            hidden = x
            for each in weights:
                hidden = hidden + ways.attend_split(hidden, each)
            return ((hidden - jnp.roll(x, 1, 0)).astype(jnp.float32) ** 2).mean()

        loss, gradients = jax.value_and_grad(compute_loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.05 * g, weights, gradients), loss

    def make() -> list[Any]:
        size = ways.HEADS * ways.WIDTH
        return [draw(size, 3 * size, dtype=jnp.float32, seed=n) / 8 for n in range(3)]

    x = draw(ways.BATCH, ways.ROWS, ways.HEADS * ways.WIDTH, dtype=jnp.float32)
    step: Any = tg.capture(train, donate_argnums=0, numerics="equivalent")
    plain = jit_untried(train)
    ours, theirs = make(), make()
    losses = []
    for _ in range(20):
        ours, loss = step(ours, x)
        theirs, wanted = plain(theirs, x)
        np.testing.assert_allclose(loss, wanted, rtol=2e-3)
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
