"""Fusions along rows on a GPU: norms, activations and losses, no less exact than XLA's."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import compute_exactly, jit_untried
from tests.gpu.test_attention import compare, widen
from tests.tracegraph.replacements.attention.ways import draw
from tests.tracegraph.replacements.row_fusions import ways
from tracegraph.capturing import fastest_variant
from tracegraph.replacements import place_errors
from tracegraph.replacements.row_fusions.rule import RowFusions
from tracegraph.replacements.row_scatters import RowScatters
from tracegraph.runtime.cuda.libraries import nvrtc

pytestmark = pytest.mark.usefixtures("gpu", "untried")
NAME = "fusions along rows"
# Rows of a warp and of a block, that fill their vectors and that do not, in one turn and in many.
SHAPES = [(4, 128, 768), (3, 171, 520), (2, 64, 4104), (5, 1000, 264)]


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are used, and no others are tried: whether they win is not what is tested."""
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: [2e-5, 1e-5])
    monkeypatch.setattr(place_errors.PlaceError, "is_allowed", True)
    monkeypatch.setattr(fastest_variant, "RULES", (RowScatters(), RowFusions()))
    monkeypatch.setattr(fastest_variant, "count_own_matmuls", lambda _: 0)
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")


def check(function: Any, *args: Any) -> None:
    """Compares a captured function with `jax.jit` and float64, on two sets of values."""
    step: Any = tg.capture(function, numerics="equivalent")
    for turn in range(2):
        values = jax.tree.map(lambda each: jnp.roll(each, turn, 0), args)  # noqa: B023
        sides = step(*values), jit_untried(function)(*values)
        compare_leaves(*sides, compute_exactly(function, *widen(values)))
    assert f"{NAME}: used" in step.explain(*args)


def compare_leaves(ours: Any, theirs: Any, exact: Any) -> None:
    """Compares arrays with both; of a single number the error is chance."""
    leaves = [jax.tree.leaves(each) for each in (ours, theirs, exact)]
    for one, other, right in zip(*leaves, strict=True):
        if one.ndim:
            compare(one, other, right)
        else:
            np.testing.assert_allclose(one, right, rtol=4e-3)


# Values of 16 bits differ in one instruction.
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*itertools.product(SHAPES, [jnp.bfloat16, jnp.float32]), (SHAPES[0], jnp.float16)],
)
def test_norms_and_their_gradients(shape: tuple[int, ...], dtype: Any) -> None:
    width = shape[-1]
    x, added, way = (draw(*shape, dtype=dtype, seed=seed) * shape[0] ** 0.5 for seed in range(3))
    gain, bias = 1 + draw(width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    # Squares of float16 must be finite.
    matrix = draw(width, width, dtype=dtype) / width**0.5

    def compute(*args: Any) -> Any:
        return [ways.run_norm(norm)(*args) for norm in ways.NORMS.values()]

    check(compute, x, added, gain, bias, matrix, way)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("words", [1032, 50304])
def test_losses_and_their_gradients(words: int, dtype: Any) -> None:
    hidden, table = draw(4, 64, 128, dtype=dtype), draw(128, words, dtype=dtype) / 8
    targets = np.random.default_rng(0).integers(0, words, (4, 64)).astype(np.int32)

    def compute(*args: Any) -> Any:
        return [ways.run_loss(loss)(*args) for loss in ways.LOSSES.values()]

    check(compute, hidden, table, jnp.asarray(targets))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_activations_and_their_gradients(dtype: Any) -> None:
    x, up = draw(4, 128, 256, dtype=dtype), draw(256, 3072, dtype=dtype) / 16
    bias, down = draw(3072, dtype=dtype), draw(3072, 256, dtype=dtype) / 64

    def compute(*args: Any) -> Any:
        activations = (jax.nn.gelu, jax.nn.silu, jnp.tanh)
        return [ways.run_activation(each)(*args) for each in activations]

    check(compute, x, up, bias, down)


def test_a_loop_of_norms_and_values_that_are_not_numbers() -> None:
    def compute(x: Any, gain: Any) -> Any:
        def run(x: Any, gain: Any) -> Any:
            return x + ways.norm_by_hand(x, gain, gain), None

        return jax.lax.scan(jax.checkpoint(run), x, gain)[0]

    x, gain = draw(512, 768, dtype=jnp.float32), 1 + draw(3, 768, dtype=jnp.float32)
    check(compute, x, gain)
    step: Any = tg.capture(compute, numerics="equivalent")
    ours = step(x.at[7, 3].set(jnp.nan), gain)
    assert np.isnan(np.asarray(ours)).all(1).tolist() == [row == 7 for row in range(512)]
    assert not np.isnan(np.asarray(ours)[:7]).any()


def test_another_function_finds_the_graph_and_calls_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(tmp_path))
    x, gain = draw(4, 128, 768), 1 + draw(768)

    def normalise(x: Any, gain: Any) -> Any:
        return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype) * gain

    first = tg.capture(normalise, numerics="equivalent")(x, gain)
    before = tg.kernel_cache.info()
    assert before.entries > 1
    nvrtc._compile_cached.cache_clear()
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("NVRTC is called"))
    again = tg.capture(normalise, numerics="equivalent")
    np.testing.assert_array_equal(again(x, gain), first)
    assert f"{NAME}: used" in again.explain(x, gain)
    assert tg.kernel_cache.info().hits == before.hits + 1
    assert "compile" not in again.timings()
