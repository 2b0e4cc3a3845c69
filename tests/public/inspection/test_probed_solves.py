"""`tg.probe` in the functions of `custom_linear_solve` and `custom_root`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg

A = jnp.array([[4.0, 1.0], [1.0, 3.0]])
B = jnp.array([1.0, 2.0])
Function = Callable[[jax.Array, jax.Array], Any]


def solve(a: jax.Array, b: jax.Array) -> jax.Array:
    def run(_matvec: Any, rhs: jax.Array) -> jax.Array:
        return tg.probe("solution", jnp.linalg.solve(a, rhs))

    return lax.custom_linear_solve(lambda x: a @ x, b, run, symmetric=True)


def solve_with_both(a: jax.Array, b: jax.Array) -> jax.Array:
    def run(_matvec: Any, rhs: jax.Array) -> jax.Array:
        return tg.probe("solution", jnp.linalg.solve(a, rhs))

    def run_transposed(_vecmat: Any, rhs: jax.Array) -> jax.Array:
        return tg.probe("transposed", jnp.linalg.solve(a.T, rhs))

    return lax.custom_linear_solve(lambda x: a @ x, b, run, run_transposed)


def step_once(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.custom_linear_solve(
        lambda x: tg.probe("product", a @ x),
        b,
        lambda matvec, rhs: rhs - matvec(rhs) / 4,
        symmetric=True,
    )


def find_root(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.custom_root(
        lambda x: a @ x - b,
        jnp.zeros(2),
        lambda _f, _x: tg.probe("root", jnp.linalg.solve(a, b)),
        lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y),
    )


def never_call(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.custom_linear_solve(
        lambda x: tg.probe("product", a @ x),
        b,
        lambda _matvec, rhs: jnp.linalg.solve(a, rhs),
        symmetric=True,
    )


def iterate(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.scipy.sparse.linalg.cg(lambda x: tg.probe("product", a @ x), b)[0]


def solve_twice(a: jax.Array, b: jax.Array) -> jax.Array:
    return solve(a, solve(a, b))


def solve_twice_in_jit(a: jax.Array, b: jax.Array) -> jax.Array:
    jitted = jax.jit(solve)
    return jitted(a, jitted(a, b))


def differentiate(function: Function, argument: int) -> Function:
    return jax.value_and_grad(lambda a, b: function(a, b).sum(), argument)


def scan(function: Function) -> Function:
    def run(a: jax.Array, b: jax.Array) -> Any:
        def loss(b: jax.Array) -> jax.Array:
            return lax.scan(lambda c, _: (function(a, c), None), b, None, length=3)[0].sum()

        return jax.value_and_grad(loss)(b)

    return run


def push(function: Function) -> Function:
    return lambda a, b: jax.jvp(lambda b: function(a, b), (b,), (b,))


SOLUTION = np.linalg.solve(A, B)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (solve, {"solution": SOLUTION}),
        (jax.jit(solve), {"solution": SOLUTION}),
        (differentiate(solve, 0), {"solution": SOLUTION}),
        (differentiate(solve, 1), {"solution": SOLUTION}),
        (push(solve), {"solution": SOLUTION}),
        (
            scan(solve),
            {"solution": [np.linalg.matrix_power(np.linalg.inv(A), n) @ B for n in (1, 2, 3)]},
        ),
        (solve_with_both, {"solution": SOLUTION}),
        (
            differentiate(solve_with_both, 1),
            {"solution": SOLUTION, "transposed": np.linalg.solve(A.T, np.ones(2))},
        ),
        (step_once, {"product": A @ B}),
        (differentiate(step_once, 1), {"product": A @ B}),
        (find_root, {"root": SOLUTION}),
        (differentiate(find_root, 1), {"root": SOLUTION}),
        (differentiate(never_call, 0), {"product": B}),
    ],
)
def test_what_the_solver_computes_is_kept_once(function: Function, wanted: dict[str, Any]) -> None:
    captured = tg.capture(function)
    result = captured(A, B)
    assert list(captured.probes()) == list(wanted)
    for name, value in captured.probes().items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(function(A, B)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_batch_of_solves_is_probed_whole() -> None:
    captured = tg.capture(lambda a, b: jax.vmap(lambda b: solve(a, b))(jnp.stack([b, b * 2])))
    captured(A, B)
    solution = captured.probes()["solution"]
    np.testing.assert_allclose(solution, [SOLUTION, SOLUTION * 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (never_call, "probe 'product' is in the `matvec` of `custom_linear_solve`, which is not"),
        (jax.jit(never_call), "probe 'product' is in the `matvec`"),
        (differentiate(never_call, 1), "probe 'product' is in the `matvec`"),
        (iterate, "probe 'product' is inside of `while`"),
        (solve_twice, "probe 'solution' is there twice"),
        (solve_twice_in_jit, "probe 'solution' is there twice"),
        (differentiate(step_once, 0), "probe 'product' is there twice"),
    ],
)
def test_what_no_one_value_stands_for_is_refused(function: Function, words: str) -> None:
    captured = tg.capture(function)
    with pytest.raises(tg.CaptureError) as caught:
        captured(A, B)
    message = str(caught.value)
    assert words in message
    assert "test_probed_solves.py" in message
    assert len(message.splitlines()) == 4
