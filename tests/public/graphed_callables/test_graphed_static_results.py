"""Results of graphed callables that are no arrays: texts, functions, and what no graph returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.raw_graphs import use_device

X = jnp.arange(3.0)


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


def describe(x: Any) -> dict[str, Any]:
    return {"kind": "square", "act": jnp.tanh, "none": None, "y": x * x}


def graph_by_samples(function: Callable[..., Any]) -> Callable[..., Any]:
    return tg.make_graphed_callables(function, (X,))


WAYS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "callable": graph_by_samples,
    "capture": tg.capture,
}


@pytest.mark.parametrize("way", WAYS)
def test_static_results_pass_through(way: str):
    graphed = WAYS[way](describe)
    plain = graphed(X)
    assert (plain["kind"], plain["act"], plain["none"]) == ("square", jnp.tanh, None)
    seen = []

    def measure(x: Any) -> Any:
        result = graphed(x)
        seen.append((result["kind"], result["act"], result["none"]))
        return result["y"].sum()

    for _ in range(2):
        value, slope = jax.value_and_grad(measure)(X)
        np.testing.assert_array_equal(value, 5)
        np.testing.assert_array_equal(slope, 2 * X)
    assert seen == [("square", jnp.tanh, None)] * 2
    # The callable itself is not differentiated here.
    np.testing.assert_array_equal(jax.grad(lambda s: (graphed(X)["y"] * s).sum())(2.0), 5)
    np.testing.assert_array_equal(jax.jacrev(lambda x: graphed(x)["y"])(X), jnp.diag(2 * X))
    if way == "callable":
        assert "3 graphs" in repr(graphed)
    else:
        assert graphed.cache_info().captures == 2


def test_a_text_that_python_makes_anew_is_refused():
    with pytest.raises(tg.CaptureError) as raised:
        graph_by_samples(lambda x: (x * 2, str(time.perf_counter_ns())))
    assert raised.value.anchor == "python-work"


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


def test_what_is_neither_array_nor_static_is_refused_by_its_path():
    with pytest.raises(tg.CaptureError) as raised:
        graph_by_samples(lambda x: {"y": x * 2, "other": [Unhashable()]})
    error = raised.value
    assert error.anchor == "non-array-output"
    assert "Unhashable (`result['other'][0]`)" in error.what
    assert error.where.startswith("tests/public/graphed_callables/test_graphed_static_results.py:")
    assert str(error).count("\n") == 3
