"""Triangular solves in graphs on a GPU: the bits of `jax.jit`, and what builds on them."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.linalg import cho_solve, solve_triangular

import tracegraph as tg
from tests.gpu.reference import assert_replayed

pytestmark = pytest.mark.usefixtures("gpu")

DTYPES = (np.float32, np.float64, np.complex64, np.complex128)


def draw(dtype: Any, *shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) + 1j * rng.normal(size=shape)
    return (values if np.issubdtype(dtype, np.complexfloating) else values.real).astype(dtype)


def draw_system(
    dtype: Any, batch: tuple[int, ...], order: int, columns: int, *, is_left: bool, seed: int
) -> tuple[Any, Any]:
    a = draw(dtype, *batch, order, order, seed=seed) + (3 * np.eye(order)).astype(dtype)
    shape = (order, columns) if is_left else (columns, order)
    return jnp.asarray(a), jnp.asarray(draw(dtype, *batch, *shape, seed=seed + 100))


OPTIONS = [*itertools.product((True, False), (True, False), (True, False), "NTC")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (3, 2)])
def test_solves_equal_jit_in_whole_mode(dtype: Any, batch: tuple[int, ...]) -> None:
    is_short = dtype is not np.float32 or batch
    with jax.enable_x64(dtype in (np.float64, np.complex128)):
        for is_left, is_lower, is_unit, transpose in OPTIONS[:: 5 if is_short else 1]:

            def solve(
                a: Any,
                b: Any,
                options: Any = (is_left, is_lower, is_unit, transpose),
            ) -> Any:
                left, lower, unit, operation = options
                return lax.linalg.triangular_solve(
                    a,
                    b,
                    left_side=left,
                    lower=lower,
                    unit_diagonal=unit,
                    transpose_a=operation != "N",
                    conjugate_a=operation == "C",
                )

            captured: Any = tg.capture(solve)
            for seed in range(2):
                a, b = draw_system(dtype, batch, 9, 5, is_left=is_left, seed=seed)
                result = captured(a, b)
                assert_replayed(captured, result, (a, b))
                assert np.asarray(result).tobytes() == np.asarray(jax.jit(solve)(a, b)).tobytes()


@pytest.mark.parametrize(
    ("order", "columns", "batch"), [(300, 1, ()), (1024, 64, ()), (2, 2, (999,))]
)
def test_sizes(order: int, columns: int, batch: tuple[int, ...]) -> None:
    captured: Any = tg.capture(lambda a, b: solve_triangular(a, b, lower=True))
    for seed in range(2):
        a, b = draw_system(np.float32, batch, order, columns, is_left=True, seed=seed)
        a = jnp.tril(a) + order * jnp.eye(order)
        assert_replayed(captured, captured(a, b), (a, b))


def test_a_batch_of_another_graph_in_between() -> None:
    # The addresses of a batch were written once, when each graph was built.
    captured = [tg.capture(lambda a, b: solve_triangular(a, b, lower=True)) for _ in range(2)]
    for seed in range(4):
        a, b = draw_system(np.float32, (4,), 6, 3, is_left=True, seed=seed)
        for each in captured:
            function: Any = each
            assert_replayed(function, function(a, b), (a, b))


def gaussian_process(length: Any, x: Any, y: Any) -> Any:
    distances = (x[:, None] - x[None]) / length
    kernel = jnp.exp(-0.5 * distances**2) + 0.1 * jnp.eye(len(x))
    factor = jnp.linalg.cholesky(kernel)
    return y @ cho_solve((factor, True), y) / 2 + jnp.log(jnp.diag(factor)).sum()


def test_a_gaussian_process_and_its_gradient_in_whole_mode() -> None:
    function = jax.value_and_grad(gaussian_process)
    captured: Any = tg.capture(function)
    x, y = (jnp.asarray(draw(np.float32, 64, seed=i)) for i in (0, 50))
    for seed in range(4):
        length = jnp.float32(0.5 + seed)
        assert_replayed(captured, captured(length, x + seed, y), (length, x + seed, y))
    stages = captured.lower(jnp.float32(1), x, y).lowered.definition.stages
    assert [stage.is_captured for stage in stages] == [True]


FUNCTIONS: dict[str, Any] = {
    "solve": lambda a, b: jnp.linalg.solve(a, b),
    "solve positive": lambda a, b: jax.scipy.linalg.solve(a @ a.T, b, assume_a="pos"),
    "inv": lambda a, b: jnp.linalg.inv(a) @ b,
    "gradient": jax.grad(lambda a, b: (jnp.linalg.solve(a, b) ** 2).sum()),
    "in a scan": lambda a, b: lax.scan(
        lambda c, _: (solve_triangular(a, c, lower=True) + b, c.sum()), b, None, 5
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_builds_on_solves(name: str) -> None:
    captured: Any = tg.capture(FUNCTIONS[name])
    for seed in range(3):
        a, b = draw_system(np.float32, (), 16, 4, is_left=True, seed=seed)
        a = a + 16 * jnp.eye(16)
        assert_replayed(captured, captured(a, b), (a, b))


def test_memory_of_solves_goes_with_the_graph() -> None:
    captured: Any = tg.capture(lambda a, b: solve_triangular(a, b, lower=True))
    captured(*draw_system(np.float32, (4,), 6, 3, is_left=True, seed=0))
    before = tg.memory.memory_allocated()
    captured.clear_cache()
    assert tg.memory.memory_allocated() < before
