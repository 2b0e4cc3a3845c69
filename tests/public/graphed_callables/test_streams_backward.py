"""The examples of PyTorch's section "Stream semantics of backward passes", in JAX's terms.

Each runs in a captured function and in a block. `g`, the forward pass, reads `w` on the capturing
stream unless an example says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.constraints import streams
from tracegraph.passes.pipeline import DEFAULT_PASSES, rewrite_graph
from tracegraph.runtime.streams.stream_capture import tracing
from tracegraph.tracing.trace import trace_function

W, X = jnp.linspace(0.1, 0.9, 12).reshape(3, 4), jnp.arange(1.0, 4.0)
SIDE = tg.Stream()


def g(w: Any) -> Any:
    return jnp.sin(X @ w)


def total(w: Any) -> Any:
    return jnp.sum(g(w))


def use(gradient: Any) -> Any:
    return gradient * 2


def grads_are_used_in_the_same_stream_context(w: Any) -> Any:
    SIDE.wait_stream(tg.current_stream())
    with tg.stream(SIDE):
        used = use(jax.grad(total)(w))
    tg.current_stream().wait_stream(SIDE)
    return used


def grads_are_used_after_a_wait(w: Any) -> Any:
    SIDE.wait_stream(tg.current_stream())
    with tg.stream(SIDE):
        gradient = jax.grad(total)(w)
    tg.current_stream().wait_stream(SIDE)
    return use(gradient)


def grads_are_used_without_a_wait(w: Any) -> Any:
    SIDE.wait_stream(tg.current_stream())
    with tg.stream(SIDE):
        gradient = jax.grad(total)(w)
    used = use(gradient)
    tg.current_stream().wait_stream(SIDE)
    return used


def the_initial_gradient_is_made_in_the_same_stream_context(w: Any) -> Any:
    y, back = jax.vjp(g, w)
    SIDE.wait_stream(tg.current_stream())
    with tg.stream(SIDE):
        (gradient,) = back(jnp.full_like(y, 3.0))
    tg.current_stream().wait_stream(SIDE)
    return use(gradient)


def the_initial_gradient_is_waited_for(w: Any) -> Any:
    y, back = jax.vjp(g, w)
    initial = jnp.full_like(y, 3.0)
    SIDE.wait_stream(tg.current_stream())
    with tg.stream(SIDE):
        (gradient,) = back(initial)
    tg.current_stream().wait_stream(SIDE)
    return use(gradient)


def the_initial_gradient_is_not_waited_for(w: Any) -> Any:
    SIDE.wait_stream(tg.current_stream())
    y, back = jax.vjp(g, w)
    initial = jnp.full_like(y, 3.0)
    with tg.stream(SIDE):
        (gradient,) = back(initial)
    tg.current_stream().wait_stream(SIDE)
    return use(gradient)


SAFE = [
    grads_are_used_in_the_same_stream_context,
    grads_are_used_after_a_wait,
    the_initial_gradient_is_made_in_the_same_stream_context,
    the_initial_gradient_is_waited_for,
]


def run_function(function: Callable[[Any], Any]) -> Any:
    captured: Any = tg.capture(function)
    return captured(W)


def run_block(function: Callable[[Any], Any]) -> Any:
    graph = tg.CUDAGraph()
    with tg.graph(graph):
        result = function(W)
    graph.replay()
    return result


@pytest.mark.parametrize("run", [run_function, run_block], ids=["function", "block"])
@pytest.mark.parametrize("example", SAFE, ids=lambda example: example.__name__)
def test_safe_examples_equal_jit(example: Callable[[Any], Any], run: Callable[..., Any]) -> None:
    np.testing.assert_allclose(run(example), jax.jit(example)(W), rtol=1e-6)


def list_unsafe() -> list[Any]:
    """Returns each unsafe example with the line that makes the value, and what it is told."""
    used, initial = grads_are_used_without_a_wait, the_initial_gradient_is_not_waited_for
    first = [function.__code__.co_firstlineno for function in (g, use, initial)]
    return [
        pytest.param(used, "on the capturing stream without", first[1] + 1, first[0] + 1, id="use"),
        pytest.param(initial, "calls a backward pass on", first[0] + 1, first[2] + 3, id="initial"),
    ]


@pytest.mark.parametrize("run", [run_function, run_block], ids=["function", "block"])
@pytest.mark.parametrize(("example", "what", "where", "made"), list_unsafe())
def test_unsafe_examples_name_both_lines_and_the_wait(
    example: Any, what: str, where: int, made: int, run: Callable[..., Any]
) -> None:
    with pytest.raises(tg.CaptureError) as raised:
        run(example)
    error = raised.value
    assert error.anchor == "stream-wait"
    assert what in error.what
    assert f"test_streams_backward.py:{where} in " in error.where
    assert f"test_streams_backward.py:{made} in " in error.why
    assert "write `a.wait_stream(b)` before " in error.fix


def list_streams(function: Callable[[Any], Any]) -> dict[str, list[tuple[int, int | None]]]:
    """Returns the stream of each op, and of the call of its backward pass, by the op's name."""
    with tracing("f", tg.Stream()):
        traced = trace_function(function, (W,), {}, name="f")
    found: dict[str, list[tuple[int, int | None]]] = {}
    for op in rewrite_graph(traced.graph, DEFAULT_PASSES).graph.ops:
        found.setdefault(op.name, []).append((op.origin.stream, op.origin.backward_on))
    return found


def test_a_backward_op_runs_on_the_stream_of_its_forward_op() -> None:
    other = tg.Stream()

    def forward(w: Any) -> Any:
        SIDE.wait_stream(tg.current_stream())
        with tg.stream(SIDE):
            y, back = jax.vjp(jax.jit(g), w)
        tg.current_stream().wait_stream(SIDE)
        other.wait_stream(tg.current_stream())
        with tg.stream(other):
            (gradient,) = back(y)
        tg.current_stream().wait_stream(other)
        return gradient

    found = list_streams(forward)
    assert found["sin"] == found["cos"] == [(SIDE.number, None)]
    assert found["mul"] == [(SIDE.number, other.number)]
    assert set(found["dot_general"]) == {(SIDE.number, None), (SIDE.number, other.number)}
    np.testing.assert_allclose(run_function(forward), jax.jit(forward)(W), rtol=1e-6)


def test_a_line_that_runs_on_two_streams_stays_where_it_is_called() -> None:
    def forward(w: Any) -> Any:
        backs = []
        for stream in (SIDE, None):
            if stream is not None:
                stream.wait_stream(tg.current_stream())
            with tg.stream(stream):
                backs.append(jax.vjp(g, w))
        tg.current_stream().wait_stream(SIDE)
        return [back(y)[0] for y, back in backs]

    assert list_streams(forward)["mul"] == [(0, 0), (0, 0)]


def test_streams_inside_of_the_forward_pass_are_those_of_the_backward_pass() -> None:
    def loss(w: Any) -> Any:
        SIDE.wait_stream(tg.current_stream())
        with tg.stream(SIDE):
            left = jnp.tanh(X @ w)
        right = jnp.sin(X @ w)
        tg.current_stream().wait_stream(SIDE)
        return jnp.sum(left * right)

    step = tg.capture(jax.value_and_grad(loss))
    for got, expected in zip(step(W), jax.value_and_grad(loss)(W), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    found = list_streams(jax.grad(loss))
    assert [stream for stream, caller in found["dot_general"] if caller == 0] == [0, SIDE.number]


def fork(w: Any) -> Any:
    SIDE.wait_stream(tg.current_stream())
    with tg.stream(SIDE):
        left = jnp.tanh(X @ w)
    right = jnp.sin(X @ w)
    tg.current_stream().wait_stream(SIDE)
    return jnp.sum(left * right)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.jit(jax.grad(jax.jit(f))),
        lambda f: jax.grad(jax.checkpoint(jax.jit(f))),
        lambda f: lambda w: jax.vmap(jax.jit(f))(jnp.stack([w, w])),
        lambda f: lambda w: jax.jvp(jax.jit(f), (w,), (w,))[1],
    ],
    ids=["grad", "jit", "checkpoint", "vmap", "jvp"],
)
def test_transforms_of_jitted_functions_keep_their_waits(transform: Any) -> None:
    function = transform(fork)
    np.testing.assert_allclose(run_function(function), function(W), rtol=1e-5)


def test_gradients_of_gradients_and_rematerialised_ones() -> None:
    def loss(w: Any) -> Any:
        SIDE.wait_stream(tg.current_stream())
        with tg.stream(SIDE):
            left = jax.checkpoint(lambda w: jnp.tanh(X @ w))(w)
        tg.current_stream().wait_stream(SIDE)
        return jnp.sum(left * jnp.sin(X @ w))

    def twice(w: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jax.grad(loss)(w) ** 2))(w)

    np.testing.assert_allclose(run_function(twice), jax.jit(twice)(W), rtol=1e-4, atol=1e-6)


def test_a_checker_that_trusts_backward_passes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: what a backward pass reads and makes is taken to be ready everywhere."""

    def trust(walk: Any, op: Any, *rest: Any) -> None:
        if op.origin.backward_on is None:
            judge(walk, op, *rest)

    judge = streams._StreamWalk._use
    monkeypatch.setattr(streams._StreamWalk, "_use", trust)
    with pytest.raises(pytest.fail.Exception):
        test_unsafe_examples_name_both_lines_and_the_wait(
            *list_unsafe()[1].values, run=run_function
        )
