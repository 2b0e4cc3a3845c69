"""Functions that cannot be captured, captures that fail: nothing is lost, the next call works."""

import builtins
import gc
import re
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.error_lines import match
from tests.oracles.tree_equality import assert_same
from tracegraph.runtime.memory.providers.host import HostProvider

X = jnp.arange(3.0)
PRINT = builtins.print
FILE = "tests/public/errors/test_capture_failures.py"


def step(state, x):
    return {"w": state["w"] * x}, state["w"].sum()


def read_item(x):
    return x * x.sum().item()


def branch(x):
    return x if x.sum() > 0 else -x


def convert(x):
    return np.asarray(x) + 1


def print_value(x):
    print("x is", x)
    return x


def call_back(x):
    return jax.pure_callback(np.sin, jax.typeof(x), x)


def return_set(x):
    return {"a": x, "b": {1}}


def give_items(x):
    for item in range(3):
        yield item * x


def take_branch(x):
    return jax.lax.cond(x.sum() > 0, lambda v: v, lambda v: -v, x)


def mask(x):
    return x[x > 1].sum()


def draw(x):
    return x + np.random.default_rng().random()


FAULTS = [
    (read_item, 1, "reads the value of an array on the host with `.item()`", "the function is tra"),
    (branch, 1, "decides in Python on the value of an array (`if`, `while`, `and`", "the function"),
    (convert, 1, "reads the value of an array on the host with", "the function is traced with"),
    (print_value, 1, "prints a traced value with `print`", "the function is traced without"),
    (call_back, 1, "calls back into Python while it is being captured", "a CUDA graph replays dev"),
    (return_set, 0, "returns a set (`result['b']`), not an array", "a replay returns arrays of"),
    (give_items, 0, "returns a generator (`result`), not an array", "a replay returns arrays of"),
    (
        take_branch,
        1,
        "takes a branch that depends on data",
        'control_flow="refuse" launches',
    ),
    (mask, 1, "indexes with a boolean mask", "a CUDA graph replays fixed addresses and sizes"),
    (draw, 1, "does Python work that changes from one trace to the next", "0."),
]


# JAX warns of a generator among the results, before it is refused.
@pytest.mark.filterwarnings("ignore:Python iterable type")
@pytest.mark.parametrize(("function", "offset", "what", "why"), FAULTS, ids=lambda f: str(f)[:20])
def test_a_function_that_cannot_be_captured(function: Callable[..., Any], offset, what, why):
    gc.collect()
    before = count_segments()
    captured = tg.capture(function, donate_argnums=0, control_flow="refuse")
    x = jnp.ones(3)
    at = function.__code__.co_firstlineno + offset
    for _ in range(2):
        with pytest.raises(tg.CaptureError) as caught:
            captured(x)
        match(
            caught.value,
            f"`{function.__name__}` {what}",
            f"{FILE}:{at} in {function.__name__}",
            why,
            "",
        )
    assert captured.cache_info() == (0, 0, 64, 0)
    assert not x.is_deleted()
    gc.collect()
    assert count_segments() <= before
    assert_same(tg.capture(lambda v: v * 2)(x), x * 2)


def count_segments():
    return sum(type(each).__name__ == "Segment" for each in gc.get_objects())


def test_all_violations_are_reported_at_once_in_source_order():
    def function(x):
        y = jax.pure_callback(np.sin, jax.typeof(x), x)
        z = jax.lax.cond(y.sum() > 0, lambda v: v, lambda v: -v, y)
        jax.debug.print("{}", z)
        return z

    with pytest.raises(tg.CaptureError) as caught:
        tg.capture(function, control_flow="refuse")(X)
    first = function.__code__.co_firstlineno + 1
    assert caught.value.what == "`function` breaks 3 capture constraints"
    assert re.findall(rf"{FILE}:(\d+)", caught.value.where) == [str(first + i) for i in range(3)]
    assert str(caught.value).count("  why:   ") == 4


def test_an_exception_of_the_user_keeps_its_traceback_and_hides_ours():
    def helper(x):
        raise KeyError("mine")

    @tg.capture
    def function(x):
        return helper(x) + 1

    with pytest.raises(KeyError, match="mine") as caught:
        function(X)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames] == [
        "test_an_exception_of_the_user_keeps_its_traceback_and_hides_ours",
        "function",
        "helper",
    ]
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert function.cache_info().captures == 0


def test_our_own_errors_show_the_callers_line_only():
    captured = tg.capture(branch)
    with pytest.raises(tg.CaptureError) as caught:
        captured(X)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_our_own_errors_show_the_callers_line_only"]


def test_all_frames_are_shown_when_jax_shows_all():
    captured = tg.capture(branch)
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(tg.CaptureError) as caught:
            captured(X)
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "trace_call" in names


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interruption_leaves_everything_usable(error):
    is_on = [True]

    def function(state, x):
        if is_on:
            raise error
        return step(state, x)

    captured, state = tg.capture(function, donate_argnums=0), {"w": jnp.ones(3)}
    with pytest.raises(error):
        captured(state, 2.0)
    assert builtins.print is PRINT
    is_on.clear()
    assert_same(captured(state, 2.0), jax.jit(step)({"w": jnp.ones(3)}, 2.0))


def test_an_interrupt_is_raised_where_jax_is_left_tracing(monkeypatch):
    """One between two steps of JAX may leave its state so; JAX then refuses to name its mesh."""

    def refuse():
        raise ValueError("`get_mesh` can only be used outside of `jax.jit`")

    def function(x):
        monkeypatch.setattr(jax.sharding, "get_mesh", refuse)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tg.capture(function)(X)


def test_out_of_memory_in_the_plan(monkeypatch):
    captured = tg.capture(step, donate_argnums=0)
    state = {"w": jnp.ones(3)}
    with monkeypatch.context() as patch:
        patch.setattr(HostProvider, "available_bytes", lambda self: 100)
        with pytest.raises(tg.OutOfMemoryError) as caught:
            captured(state, 2.0)
    match(
        caught.value,
        "out of memory: tried to allocate ",
        "private pool (",
        "a graph keeps all of its buffers in memory of its own for as long as it lives",
        "donate the state (`donate_argnums`)",
    )
    assert "of which 100 bytes is free" in caught.value.where
    assert_same(captured(state, 2.0), jax.jit(step)({"w": jnp.ones(3)}, 2.0))
