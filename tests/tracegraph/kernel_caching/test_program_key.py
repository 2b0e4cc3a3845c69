"""Keys of programs: equal for equal programs, other for any difference, none where unknown."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.processes import run_python
from tracegraph.capturing.partition import find_embedded
from tracegraph.kernel_caching.program_key import NoKey, make_key

X = jnp.linspace(0.1, 1, 16).reshape(4, 4)
LARGE = np.ones(1 << 19, np.float32)


def find_key(function: Callable[..., Any], *args: Any, **surroundings: Any) -> str:
    graph = tg.capture(function, mode="partial", name="f").trace(*(args or (X,))).graph
    return make_key(graph, find_embedded(graph), surroundings)


@jax.custom_vjp
def cube(x: jax.Array) -> jax.Array:
    return x**3


def reduce_both(one: Any, other: Any) -> Any:
    return one[0] + other[0], one[1] * other[1]


cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))

PROGRAMS: dict[str, Callable[..., Any]] = {
    "ops": lambda x: jnp.sin(x) @ x.T + 2.5,
    "scan": lambda x: lax.scan(lambda c, y: (c + y, c * y), x[0], x),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 99, lambda c: c * 2, x),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "gather": lambda x: x[jnp.array([1, 2])].at[0].add(2.0),
    "random": lambda x: x + jax.random.normal(jax.random.key(7), x.shape),
    "custom derivative": lambda x: jax.grad(lambda y: cube(y).sum())(x) + cube(x),
    "checkpoint": lambda x: jax.grad(jax.checkpoint(lambda y: jnp.sin(y).sum()))(x),
    "linalg": lambda x: jnp.linalg.eigh(x @ x.T),
    "relu": lambda x: jax.nn.relu(x) + jax.nn.gelu(x),
    "reduce": lambda x: lax.reduce((x, x), (0.0, 1.0), reduce_both, (0,)),
    "reduce by twice": lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * 2, (0,)),
    "reduce by thrice": lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * 3, (0,)),
    "reduce a window": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "solve": lambda x: jax.scipy.sparse.linalg.cg(lambda v: x.T @ (x @ v) + v, x[0])[0],
    "platform": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "fft": lambda x: jnp.fft.fft(x),
    "interp": lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0)),
    "searchsorted": lambda x: jnp.searchsorted(x[0], x),
    "attention": lambda x: jax.nn.dot_product_attention(*[x[None, :, None]] * 3),
}


def show_keys() -> str:
    return "\n".join(f"{name}: {find_key(function)}" for name, function in PROGRAMS.items())


def test_keys_are_the_same_in_another_process():
    program = "from tests.tracegraph.kernel_caching.test_program_key import *; print(show_keys())"
    seed = {"PYTHONHASHSEED": "12345", "JAX_PLATFORMS": "cpu"}
    done = run_python(["-c", program], variables=seed)
    assert done.stdout.strip() == show_keys(), done.stderr
    keys = show_keys().splitlines()
    assert len({line.split(": ")[1] for line in keys}) == len(PROGRAMS)


def add(x: jax.Array, *, factor: float = 2.0, stop: int = 3) -> jax.Array:
    return lax.fori_loop(0, stop, lambda _, c: c + factor * x, x)


DIFFERENT: dict[str, Callable[[], str]] = {
    "literal": lambda: find_key(functools.partial(add, factor=3.0)),
    "trips": lambda: find_key(functools.partial(add, stop=4)),
    "shape": lambda: find_key(add, X[:3]),
    "dtype": lambda: find_key(add, X.astype(jnp.float16)),
    "memory": lambda: find_key(add, jax.device_put(X, jax.memory.Space.Host)),
    "weak type": lambda: find_key(lambda x: add(x), jnp.asarray(1.0)),
    "surroundings": lambda: find_key(add, option=2),
    "op": lambda: find_key(lambda x: -add(x)),
    "op in a loop": lambda: find_key(lambda x: lax.fori_loop(0, 3, lambda _, c: c - 2.0 * x, x)),
    "order": lambda: find_key(lambda x: lax.fori_loop(0, 3, lambda _, c: 2.0 * x + c, x)),
    "result": lambda: find_key(lambda x: (add(x), x)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_any_difference_is_another_key(name: str):
    assert DIFFERENT[name]() != find_key(add)


def test_names_and_lines_make_no_difference():
    def other(y: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, carry: carry + 2.0 * y, y)

    assert find_key(other) == find_key(add)


def test_precision_and_scopes_of_matmuls():
    keys = {find_key(lambda x, p=p: jnp.dot(x, x, precision=p)) for p in (None, "high", "highest")}
    assert len(keys) == 3


def test_small_closed_over_arrays_count_by_their_bytes_large_ones_by_their_type():
    def close(array: Any) -> str:
        return find_key(lambda x: x.sum() + array)

    small = np.arange(4.0, dtype=np.float32)
    assert close(small) == close(small.copy()) != close(small + 1)
    graph = tg.capture(lambda x: x.sum() + LARGE).trace(X).graph
    assert len(find_embedded(graph)) == 0
    assert close(LARGE) == close(LARGE + 1) != close(LARGE.astype(np.float16))


def test_streams_are_numbered_by_their_first_use():
    def fork(side: tg.Stream, other: tg.Stream | None = None) -> str:
        def run(x: jax.Array) -> jax.Array:
            main = tg.current_stream()
            for each in filter(None, (side, other)):
                each.wait_stream(main)
            with tg.stream(side):
                y = jnp.sin(x)
            with tg.stream(other or side):
                z = jnp.cos(x)
            for each in filter(None, (side, other)):
                main.wait_stream(each)
            return y + z

        return find_key(run)

    first, second, third = tg.Stream(), tg.Stream(), tg.Stream()
    assert fork(first) == fork(second)
    assert fork(first, second) == fork(third, first) != fork(first)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.pure_callback(np.sin, x, x),
        lambda x: (jax.debug.callback(print, x), x)[1],
    ],
)
def test_what_calls_back_has_no_key(function: Any):
    with pytest.raises(NoKey):
        find_key(function)


def test_parameters_of_primitives_that_are_objects_make_a_difference():
    keys = [
        find_key(lambda x, side=side, method=method: jnp.searchsorted(x[0], x, side, method=method))
        for side in ("left", "right")
        for method in ("scan", "sort")
    ]
    assert len(set(keys)) == 4


def test_a_primitive_of_others_that_is_an_object_has_no_key():
    hijax = pytest.importorskip("jax.experimental.hijax")
    base: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive", None)
    if base is None:
        pytest.skip("this JAX has no such primitives for users")

    class Double(base):
        def __init__(self, aval: Any) -> None:
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, x: Any) -> Any:
            return 2 * x

    with pytest.raises(NoKey, match="Double"):
        find_key(lambda x: Double(jax.typeof(x))(x))


def test_an_unknown_kind_of_surroundings_has_no_key():
    with pytest.raises(NoKey, match="`option` is a"):
        find_key(add, option=object())
