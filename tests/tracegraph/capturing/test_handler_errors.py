"""Calls of handlers that nothing has registered: four lines that name them and the user's line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tracegraph.capturing.handler_errors import translate_compile_error
from tracegraph.ir.graph import Graph
from tracegraph.tracing.trace import trace_function

X = jnp.ones(3)
# What XLA says, on a CPU and for a GPU, with the new and the old interface.
WORDS = [
    "NOT_FOUND: No FFI handler registered for solve on a platform CUDA (canonical cuda)",
    "NOT_FOUND: No registered implementation for custom call to solve for platform CUDA",
]


def call(name: str, x: Any) -> Any:
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def trace() -> Graph:
    def step(x: Any) -> Any:
        return jax.lax.cond(x[0] > 0, lambda x: call("solve", x), lambda x: call("other", x), x)

    return trace_function(step, (X,), {}, name="step").graph


@pytest.mark.parametrize("mode", ["whole", "partial"])
def test_a_capture_names_the_call(mode: Any) -> None:
    step: Any = tg.capture(lambda x: call("no_handler_of_any", x) + 1, mode=mode, name="step")
    for _ in range(2):
        with pytest.raises(tg.CaptureError) as caught:
            step(X)
        error = caught.value
        assert error.what == "`step` calls `no_handler_of_any`, which is not registered"
        assert error.anchor == "ffi-handler"
        assert "test_handler_errors.py" in error.where
        assert "= ffi_call %" in error.where
        assert error.why.endswith("for the platform cpu")
        assert len(str(error).splitlines()) == 4
    assert step.cache_info().currsize == 0


def test_a_block_names_the_call() -> None:
    x: Any = tg.static_input(X)
    with (
        pytest.raises(tg.CaptureError, match="`no_handler_of_any`, which is not") as caught,
        tg.graph(tg.CUDAGraph()),
    ):
        y = call("no_handler_of_any", x)
    assert " in call, %1 = ffi_call %0" in caught.value.where
    assert not tg.is_current_stream_capturing()
    g = tg.CUDAGraph()
    with tg.graph(g):
        y = x + 1
    g.replay()
    assert y.tolist() == [2.0] * 3


@pytest.mark.parametrize("words", WORDS)
def test_calls_in_branches_are_found(words: str) -> None:
    error = translate_compile_error(jax.errors.JaxRuntimeError(words), trace())
    assert error is not None
    (violation,) = error.violations
    assert "`solve`" in violation.what
    assert 'register_ffi_target("solve", handler, platform="CUDA")' in violation.fix


def test_a_call_that_the_graph_does_not_show_is_named_all_the_same() -> None:
    words = WORDS[0].replace("solve", "inner")
    error = translate_compile_error(jax.errors.JaxRuntimeError(words), trace())
    assert error is not None
    assert error.where == "XLA's call of inner"


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), ValueError(WORDS[0])]
)
def test_other_errors_are_left(error: Exception) -> None:
    assert translate_compile_error(error, trace()) is None
