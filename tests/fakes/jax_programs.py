"""Random programs of float32[3,3] arrays, and the comparison of results bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

Step: TypeAlias = tuple[str, int, int]
TABLE = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
DEVICE_TABLE = jnp.asarray(TABLE.T)


@jax.custom_jvp
def relu(x: Any) -> Any:
    return jnp.maximum(x, 0)


@relu.defjvp
def _relu_jvp(primals: Any, tangents: Any) -> Any:
    return relu(primals[0]), jnp.where(primals[0] > 0, tangents[0], 0.0)


@jax.jit
def nested(x: Any, y: Any) -> Any:
    return jnp.where(x > y, jnp.tanh(x) + TABLE, y * DEVICE_TABLE)


@jax.jit
def twice_nested(x: Any, y: Any) -> Any:
    return nested(nested(x, y), TABLE + x)


def scan_rows(x: Any, y: Any) -> Any:
    carry, rows = jax.lax.scan(lambda c, row: (jnp.tanh(c + row), c * row), x[0], y, reverse=True)
    return rows + carry


def loop(x: Any, y: Any) -> Any:
    def step(state: Any) -> Any:
        count, value = state
        return count + 1, jnp.sin(value + y)

    return jax.lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "branch": lambda x, y: jax.lax.cond(x[0, 0] > y[0, 0], lambda: x - y, lambda: nested(y, x)),
    "broadcast": lambda x, y: x + y.max(axis=0, keepdims=True),
    "constant": lambda x, y: x + TABLE,
    "divide": lambda x, y: x / (2.0 + jnp.abs(y)),
    "dot": lambda x, y: jnp.tanh(x @ y),
    "grad": lambda x, y: jax.grad(lambda z: jnp.sum(relu(z) * jnp.sin(z) * y))(x),
    "half": lambda x, y: (x.astype(jnp.bfloat16) * 0.5).astype(jnp.float32),
    "loop": loop,
    "multiply": lambda x, y: x * y,
    "negative": lambda x, y: -x,
    "nested": nested,
    "relu": lambda x, y: relu(x),
    "reshape": lambda x, y: jnp.flip(x.reshape(9)).reshape(3, 3),
    "scan": scan_rows,
    "sin": lambda x, y: jnp.sin(x),
    "transpose": lambda x, y: x.T,
    "twice_nested": twice_nested,
    "where": lambda x, y: jnp.where(x > y, x, -0.0),
    "zero": lambda x, y: x * 0.0 + 0.0,
}

programs = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=8,
)


def make_program(steps: Sequence[Step]) -> Callable[..., Any]:
    """Returns a function of two arrays that applies the steps; some of them to no use."""

    def program(x: Any, y: Any) -> Any:
        values = [x, y]
        for kind, left, right in steps:
            values.append(KINDS[kind](values[left % len(values)], values[right % len(values)]))
        return values[-1], {"again": values[-1], "middle": values[len(values) // 2]}

    return program


def make_arguments(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns two float32[3,3] arrays."""
    random = np.random.default_rng(seed)
    x, y = random.standard_normal((2, 3, 3)).astype(np.float32)
    return x, y


def assert_same_bits(got: Sequence[Any], want: Sequence[Any]) -> None:
    """Fails unless all arrays have the same dtype, shape and bytes; all NaNs count as one."""
    assert len(got) == len(want)
    for index, (left, right) in enumerate(
        zip(map(to_numpy, got), map(to_numpy, want), strict=True)
    ):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), f"result {index}"
        if left.tobytes() == right.tobytes():
            continue
        np.testing.assert_array_equal(left, right, err_msg=f"result {index}")
        nan = np.isnan(left)
        bits = left[~nan].tobytes(), right[~nan].tobytes()
        assert bits[0] == bits[1], f"result {index} differs in the sign of a zero"


def to_numpy(array: Any) -> np.ndarray:
    """Returns an array or typed key as NumPy."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    return np.asarray(array)
