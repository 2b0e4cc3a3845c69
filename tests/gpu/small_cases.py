"""Small graphs of every kind of node, for checking tools: ``python -m tests.gpu.small_cases``.

A checking tool slows a program down a hundred times, so arrays and counts of replays are small.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tracegraph as tg
from tests.gpu.reference import assert_replayed, copy_arguments

REPLAYS = 3


def draw(*shapes: tuple[int, ...]) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    """Returns a maker of one normally distributed float32 array per shape."""
    return lambda rng: tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def fork_and_join(x: Any) -> Any:
    """Sorts on a second stream while the first one sums."""
    side = tg.Stream()
    side.wait_stream(tg.current_stream())
    with tg.stream(side):
        left = jnp.sort(x)
    right = jnp.cumsum(x)
    tg.current_stream().wait_stream(side)
    return left + right


def update(state: Any, x: Any) -> Any:
    """Updates two leaves from each other."""
    return {"a": state["a"] * 0.5 + x, "b": state["b"] + state["a"]}, state["a"].sum()


def choose(x: Any) -> Any:
    """Takes a branch by its data, within a loop that ends by its data."""

    def turn(c: Any) -> Any:
        return lax.cond(c[0] > 0, lambda: jnp.sort(c) * 1.5, lambda: jnp.cumsum(c) / 9) + 1

    return lax.while_loop(lambda c: jnp.abs(c).sum() < 500, turn, x)


def make_update(rng: np.random.Generator) -> tuple[Any, ...]:
    """Returns a state and an input for `update`."""
    a, b, x = draw((129,), (129,), (129,))(rng)
    return {"a": a, "b": b}, x


CASES: dict[str, tuple[Callable[..., Any], Callable[[np.random.Generator], tuple[Any, ...]]]] = {
    "elementwise": (lambda x, y: jnp.tanh(x) + y * 2, draw((37, 11), (11,))),
    "reduction": (lambda x: (x.sum(), x.max(0), x.mean(1)), draw((33, 65))),
    "matmul": (lambda x, y: x @ y + 1, draw((48, 32), (32, 40))),
    "product_highest": (
        lambda x, y: jnp.matmul(x, y, precision="highest"),
        draw((17, 32), (32, 23)),
    ),
    "padded_product": (
        lambda x, y, z: jnp.tanh(
            x.astype(jnp.bfloat16) @ y.astype(jnp.bfloat16) + z.astype(jnp.bfloat16)
        ),
        draw((6, 3), (3, 4), (4,)),
    ),
    "transpose": (lambda x: x.T * 2, draw((65, 33))),
    "sort": (lambda x: jnp.sort(x), draw((300,))),
    "sorted_numbers": (lambda x: jnp.argsort(x + 1) * 2, draw((30,))),
    "unique": (
        lambda x: jnp.unique(jnp.round(x), return_counts=True, size=6, fill_value=-9),
        draw((8,)),
    ),
    "cumulative_sum": (lambda x: jnp.cumsum(x, 0), draw((50, 9))),
    "gather": (lambda x, y: x[jnp.argsort(y)], draw((40, 3), (40,))),
    "scatter": (lambda x, y: x.at[jnp.arange(5) * 2].add(y), draw((20, 4), (5, 4))),
    "softmax": (lambda x: jax.nn.softmax(x), draw((8, 100))),
    "copies": (lambda x, y: (y, x, x), draw((17,), (9, 3))),
    "constants": (lambda x: (x + jnp.arange(12.0), jnp.zeros((5,)), jnp.ones((3, 3))), draw((12,))),
    "scan": (lambda x: lax.scan(lambda c, _: (jnp.sin(c), c[:8]), x, None, 5), draw((33,))),
    "long_scan": (lambda x: lax.scan(lambda c, _: (c * 0.9, c[:8]), x, None, 1100), draw((33,))),
    "loop_and_branch": (choose, draw((40,))),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(16)), draw((16, 16))),
    "fft": (lambda x: jnp.abs(jnp.fft.rfft(x)) * 2, draw((3, 20))),
    "solve": (lambda x, y: jnp.linalg.solve(x + 9 * jnp.eye(12), y), draw((12, 12), (12, 2))),
    "streams": (fork_and_join, draw((257,))),
    "state": (update, make_update),
}


def run_case(name: str) -> None:
    """Captures one case without verification, replays it and compares every result."""
    function, make_arguments = CASES[name]
    captured = tg.capture(function, donate_argnums=(0,) if name == "state" else (), verify=False)
    rng = np.random.default_rng(0)
    for index in range(REPLAYS):
        args = make_arguments(rng)
        given = jax.device_put(args) if index % 2 else copy_arguments(args)
        assert_replayed(captured, captured(*given), args)


def main(names: Sequence[str]) -> None:
    """Runs cases, all of them if none is named, and says how many were equal."""
    names = names or tuple(CASES)
    for name in names:
        run_case(name)
    print(f"{len(names)} cases equal")


if __name__ == "__main__":
    main(sys.argv[1:])
