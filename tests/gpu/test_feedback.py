"""Results of graphs as arguments of graphs, with calls that are enqueued without a wait."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

pytestmark = pytest.mark.usefixtures("gpu")


def advance(x):
    return jnp.roll(x, 1) + 1


def compute(x, steps):
    """Returns what so many steps make of whole numbers, which floats hold exactly."""
    return np.roll(x, steps) + np.float32(steps)


@pytest.mark.parametrize("size", [7, 1 << 20])
@pytest.mark.parametrize("is_held", [False, True])
def test_a_loop_over_its_own_result(size, is_held):
    step, kept, start = tg.capture(advance), [], np.arange(size, dtype=np.float32)
    x, steps = jnp.asarray(start), 400 if size < 100 else 40
    for _ in range(steps):
        x = step(x)
        kept += [x] * is_held
    np.testing.assert_array_equal(x, compute(start, steps))
    for index, result in enumerate(kept):
        np.testing.assert_array_equal(result, compute(start, index + 1))


def test_a_loop_alternates_between_two_addresses():
    step: Any = tg.capture(advance)
    addresses: list[int] = []
    x = step(step(jnp.ones(1024)))
    for _ in range(20):
        x = step(x)
        addresses.append(x.data_ptr())
    assert len(set(addresses)) == 2


def test_two_graphs_and_jax_in_turn():
    double, increment = tg.capture(lambda x: x * 2), tg.capture(lambda x: x + 1)
    halve = jax.jit(lambda x: x / 2)
    x = jnp.arange(1 << 16, dtype=jnp.float32)
    for index in range(100):
        x = increment(double(x))
        if index % 5 == 0:
            x = halve(x)
        else:
            x = increment(double(x) * 0.25)
    wanted = np.arange(1 << 16, dtype=np.float32)
    for index in range(100):
        wanted = wanted * 2 + 1
        wanted = wanted / 2 if index % 5 == 0 else wanted * 2 * np.float32(0.25) + 1
    np.testing.assert_array_equal(x, wanted)


def test_a_result_on_a_side_stream():
    step, side, start = tg.capture(advance), tg.Stream(), np.arange(1 << 18, dtype=np.float32)
    x = jnp.asarray(start)
    for index in range(30):
        if index % 2:
            with tg.stream(side):
                x = step(x)
        else:
            x = step(x)
    np.testing.assert_array_equal(x, compute(start, 30))
