"""Float32 matmuls on tensor cores, on a GPU: more exact than XLA's, and the same special values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import find_captured, jit_untried
from tracegraph.capturing import fastest_variant
from tracegraph.replacements import float_matmuls
from tracegraph.runtime.definition.nodes import KernelNode

pytestmark = pytest.mark.usefixtures("gpu", "untried")

# Rows, depth, columns, and which sides memory has transposed.
CASES = [
    (320, 2048, 1024, False, False),
    (1000, 640, 516, True, False),
    (2048, 644, 256, False, True),
    (64, 516, 68, True, True),
    (128, 33, 132, True, False),
]


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """This replacement wins, and no other is tried: whether it is faster is not what is tested."""
    if tg.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: [2e-5, 1e-5])
    monkeypatch.setattr(float_matmuls, "XLA_OPERATIONS_A_US", 1.0)
    monkeypatch.setattr(fastest_variant, "RULES", (float_matmuls.FloatMatmuls(),))
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")


def turn(array: Any, is_transposed: bool) -> Any:
    return array.T if is_transposed else array


def draw(seed: int, shape: tuple[int, int], *, transposed: bool) -> Any:
    return jax.random.normal(jax.random.key(seed), shape[::-1] if transposed else shape)


def count_kernels(step: Any) -> int:
    stages = find_captured(step).lowered.definition.stages
    nodes = [node for stage in stages for node in stage.nodes if isinstance(node, KernelNode)]
    return sum(node.code.symbol.startswith("float_matmul") for node in nodes)


def test_they_are_more_exact_than_xlas() -> None:
    def multiply(pairs: Any) -> Any:
        return [
            jnp.matmul(turn(x, left), turn(y, right), precision="highest")
            for (x, y), (*_, left, right) in zip(pairs, CASES, strict=True)
        ]

    step: Any = tg.capture(multiply, numerics="equivalent")
    plain = jit_untried(multiply)
    for seed in range(2):
        pairs = [
            (
                draw(2 * seed, (rows, depth), transposed=left),
                draw(2 * seed + 1, (depth, columns), transposed=right),
            )
            for rows, depth, columns, left, right in CASES
        ]
        for (x, y), (*_, left, right), ours, theirs in zip(
            pairs, CASES, step(pairs), plain(pairs), strict=True
        ):
            wide = [np.asarray(each, np.float64) for each in (x, y)]
            wanted = turn(wide[0], left) @ turn(wide[1], right)
            errors = [measure(each, wanted) for each in (ours, theirs)]
            rounding = np.finfo(np.float32).eps / 2 * measure(0, wanted)
            assert errors[0] <= max(errors[1], rounding), (x.shape, y.shape)
    assert count_kernels(step) == len(CASES)


def measure(found: Any, wanted: Any) -> float:
    """Returns the root mean square of the differences."""
    return float(np.sqrt(((np.asarray(found) - wanted) ** 2).mean()))


def test_values_that_are_not_finite_are_those_of_float32() -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape).astype(np.float32) for shape in [(256, 512), (512, 256)])
    x[3, 5], x[200, 7], y[9, 11] = np.inf, np.nan, -np.inf
    x[17] *= 1e30
    y[:, 100] *= 1e-30
    x[50], y[:, 60] = 0, 0
    # Rounded to bfloat16 it would be infinite.
    x[50, 0], y[0, 60] = np.finfo(np.float32).max, 0.75
    step: Any = tg.capture(
        lambda x, y: jnp.matmul(x, y, precision="highest"), numerics="equivalent"
    )
    ours = np.asarray(step(x, y))
    with np.errstate(all="ignore"):
        wanted = x @ y
    is_finite = np.isfinite(wanted)
    np.testing.assert_array_equal(ours[~is_finite], wanted[~is_finite])
    with np.errstate(all="ignore"):
        size = np.abs(x.astype(np.float64)) @ np.abs(y.astype(np.float64))
    error = np.abs(ours[is_finite] - wanted[is_finite].astype(np.float64))
    assert (error <= 1e-6 * size[is_finite]).all()
    assert ours[50, 60] == np.float32(0.75) * np.finfo(np.float32).max
    assert count_kernels(step) == 1


def test_a_train_step_uses_them_in_both_directions() -> None:
    def compute_loss(weights: Any, x: Any) -> Any:
        hidden = jnp.tanh(jnp.matmul(x, weights[0], precision="highest"))
        return (jnp.matmul(hidden, weights[1], precision="highest") ** 2).mean()

    def train(weights: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(compute_loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    def make_weights() -> Any:
        sizes = [(512, 1024), (1024, 256)]
        return [draw(seed, size, transposed=False) / 32 for seed, size in enumerate(sizes)]

    step: Any = tg.capture(train, donate_argnums=0, numerics="equivalent")
    plain = jit_untried(train)
    ours, theirs = make_weights(), make_weights()
    batches = [draw(seed + 9, (384, 512), transposed=False) for seed in range(5)]
    for x in batches:
        ours, loss = step(ours, x)
        theirs, wanted = plain(theirs, x)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert count_kernels(step) == 5
    assert "float32 matmuls on tensor cores: used; 20 µs without" in step.explain(ours, batches[0])
