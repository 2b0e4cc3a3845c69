"""What is prepared while XLA compiles: memory for as many ops as the program will have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

import tracegraph as tg
from tracegraph.capturing.capture_lowering import MOST_LOOP_OPS, count_ops


def scan(length: int) -> Callable[[Any], Any]:
    return lambda x: lax.scan(lambda c, _: (jnp.sin(c) * 2, None), x, None, length)[0]


def nest(x: Any) -> Any:
    return lax.scan(lambda c, _: (scan(4)(c), None), x, None, 3)[0]


def loop(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 5, lambda c: jnp.sin(c) * 2, x)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: jnp.sin(x) * 2, 2),
        (scan(0), 1 + 2),
        (scan(5), 1 + 5 * 2),
        (scan(1 << 20), 1 + MOST_LOOP_OPS),
        (nest, 1 + 3 * (1 + 4 * 2)),
        # The condition has two.
        (loop, 1 + 2 + 2),
    ],
)
def test_ops_of_loops_count_as_often_as_they_may_be_unrolled(
    function: Callable[[Any], Any], count: int
) -> None:
    assert count_ops(tg.capture(function).trace(jnp.ones(3)).graph) == count
