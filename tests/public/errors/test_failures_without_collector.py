"""What fails holds no array when it is over: neither JAX, nor an error's traceback, nor a block."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.raw_graphs import N, record, use_device

X = jnp.ones(N)


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


@pytest.fixture(autouse=True)
def without_collector(device: Any) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def divide(w: Any, x: Any) -> Any:
    return w * x, 1 / 0


def read(w: Any, x: Any) -> Any:
    return float((w * x).sum())


def call_back(w: Any, x: Any) -> Any:
    return jax.pure_callback(np.sin, jax.typeof(w), w) * x


def draw(w: Any, x: Any) -> Any:
    return (w * x * jax.random.normal(tg.random.next_key(), (N,))).sum()


def record_with(function: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda w: record(lambda: function(w, X))


def capture_with(function: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda w: tg.capture(lambda x: function(w, x))(X)


# What is done with an array that is closed over.
CASES: dict[str, Callable[[Any], Any]] = {
    "a function raises": capture_with(divide),
    "a function reads": capture_with(read),
    "a function calls back": capture_with(call_back),
    "a callable reads": lambda w: tg.make_graphed_callables(lambda x: read(w, x), (X,)),
    "a block raises": record_with(divide),
    "a block reads": record_with(read),
    "a block calls back": record_with(call_back),
    "gradient of draws": lambda w: jax.grad(tg.capture(lambda x: draw(w, x)))(X),
    "loop of draws": lambda w: jax.vmap(tg.capture(lambda x: draw(w, x)))(X[None]),
    "a branch in a part": lambda w: tg.capture(
        lambda x: divide(w, x) if x.sum() > 0 else x, mode="partial"
    )(X),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_closed_over_goes_with_its_last_name(name: str) -> None:
    def run() -> weakref.ref[Any]:
        w = jnp.arange(float(N))
        with contextlib.suppress(tg.TracegraphError, ZeroDivisionError):
            CASES[name](w)
        return weakref.ref(w)

    assert run()() is None


def test_a_function_that_outlives_a_block_keeps_nothing_that_the_block_read() -> None:
    x = tg.static_input((N,))
    use = jax.jit(lambda y: y * x)

    def run() -> weakref.ref[Any]:
        w = jnp.arange(float(N))
        g, made = record(lambda: use(X) * w)
        g.replay()
        np.testing.assert_array_equal(made, np.asarray(x) * np.asarray(w))
        return weakref.ref(w)

    assert [run()(), run()()] == [None, None]
