"""Loops and branches of lax whose path depends on data: captured, equal to `jax.jit`, or refused.

Each program is called with arguments that take other paths than those it was captured with.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tracegraph.ir.interpreter import interpret

X = jnp.linspace(-1.0, 2.0, 4)
KEY = jax.random.key(0, impl="rbg")
TABLE = np.linspace(0.0, 1.0, 4, dtype=np.float32)


def branch(x: Any) -> Any:
    y = jnp.sin(x)
    return lax.cond(x.sum() > 0, lambda v: v * 2, lambda v: v - 1, y) + 1


def switch(x: Any) -> Any:
    index = (x[0] * 2).astype(int) + 1
    return lax.switch(index, [jnp.sin, jnp.cos, lambda v: v * TABLE], x)


def loop(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 1.5 + 1, x) - x


def count(x: Any) -> Any:
    return lax.fori_loop(0, jnp.abs(x[0] * 4).astype(int), lambda i, c: c * 0.5 + i, x)


def nest(x: Any) -> Any:
    """A branch in a loop in a loop."""

    def turn(i: Any, c: Any) -> Any:
        step = lax.cond(c[0] > i, lambda v: v * 0.5, lambda v: v + 1, c)
        return lax.while_loop(lambda v: v.max() > 3, lambda v: v * 0.25, step)

    return lax.scan(lambda c, row: (lax.fori_loop(0, 3, turn, c + row), c.sum()), x, x)


def differentiate(x: Any) -> Any:
    def loss(v: Any) -> Any:
        v, _ = lax.scan(lambda c, _: (lax.cond(c[0] > 0, jnp.sin, jnp.cos, c), None), v, None, 3)
        return (branch(v) * v).sum()

    return jax.value_and_grad(loss)(x)


def push_forward(x: Any) -> Any:
    return jax.jvp(loop, (x,), (jnp.ones_like(x),))


@jax.custom_vjp
def clip(x: Any) -> Any:
    return lax.cond(x.max() > 1, lambda v: v / v.max(), lambda v: v, x)


clip.defvjp(lambda x: (clip(x), x), lambda x, g: (lax.fori_loop(0, count_of(x), halve, g),))


def count_of(x: Any) -> Any:
    return jnp.abs(x.sum()).astype(int)


def halve(_: Any, x: Any) -> Any:
    return x * 0.5


def inside_other_calls(x: Any) -> Any:
    """In jit, in a derivative of one's own, recomputed, over a batch."""
    rows = jax.vmap(jax.jit(loop))(jnp.stack([x, x * 2]))
    again = jax.checkpoint(lambda v: branch(jnp.tanh(v)))
    return jax.grad(lambda v: (clip(v) * again(v)).sum())(x), rows


def draw(x: Any) -> Any:
    return jax.random.gamma(KEY, jnp.abs(x) + 0.5)


def converge(x: Any) -> Any:
    y = jnp.abs(x) + 0.5
    return lax.igamma(y, y * 2), lax.betainc(y, y + 1, y / (y + 1))


PROGRAMS: list[Callable[..., Any]] = [
    branch,
    switch,
    loop,
    count,
    nest,
    differentiate,
    push_forward,
    inside_other_calls,
    draw,
    converge,
]
ARGUMENTS = (X, -X, X * 3, X)


def call_all(function: Callable[..., Any]) -> list[Any]:
    return [function(x) for x in ARGUMENTS]


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[Any]]:
    return {program.__name__: call_all(jax.jit(program)) for program in PROGRAMS}


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_one_graph_gives_the_bits_of_jit(
    function: Callable[..., Any], wanted: dict[str, list[Any]]
) -> None:
    captured = tg.capture(function)
    assert_same(call_all(captured), wanted[function.__name__])
    assert captured.cache_info()[:2] == (3, 1)
    assert "cuts: none, all is one graph" in captured.explain(X)


def test_partial_mode_cuts_nothing(wanted: dict[str, list[Any]]) -> None:
    captured = tg.capture(nest, mode="partial")
    assert_same(call_all(captured), wanted["nest"])
    assert "cuts: none, all is one graph" in captured.explain(X)


def test_in_checking_mode(wanted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEGRAPH_CHECK_REPLAY", "1")
    assert_same(call_all(tg.capture(nest)), wanted["nest"])


@pytest.mark.parametrize("function", [branch, nest, differentiate], ids=lambda f: f.__name__)
def test_the_interpreter_walks_the_same_path(
    function: Callable[..., Any], wanted: dict[str, list[Any]]
) -> None:
    graph = tg.capture(function).trace(X).graph
    for x, expected in zip(ARGUMENTS, wanted[function.__name__], strict=True):
        for one, other in zip(interpret(graph, x), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def step(state: Any, x: Any) -> Any:
    """A solver: as many rounds as the data need, the state updated in place."""

    def turn(c: Any) -> Any:
        return {"w": c["w"] * 0.75, "rounds": c["rounds"] + 1}

    new = lax.while_loop(lambda c: jnp.abs(c["w"]).sum() > 1, turn, state | {"w": state["w"] + x})
    return new, lax.cond(new["rounds"] > 4, lambda: new["w"].sum(), lambda: jnp.float32(0))


def make_state() -> Any:
    return {"w": jnp.zeros(4), "rounds": jnp.int32(0)}


def test_donated_state_is_carried_by_a_loop() -> None:
    captured, jitted = tg.capture(step, donate_argnums=0), jax.jit(step)
    first = make_state()
    state, expected = first, make_state()
    addresses = []
    for x in ARGUMENTS:
        state, total = captured(state, x)
        expected, other = jitted(expected, x)
        assert_same((jax.tree.map(jnp.copy, state), total), (expected, other))
        addresses.append(state["w"].data_ptr())
    assert first["w"].is_deleted()
    assert len(set(addresses)) == 1


def test_loops_on_two_streams() -> None:
    side = tg.Stream()

    def function(x: Any) -> Any:
        main = tg.current_stream()
        side.wait_stream(main)
        with tg.stream(side):
            y = loop(x)
        z = branch(x)
        main.wait_stream(side)
        return y + z

    captured = tg.capture(function)
    for x in ARGUMENTS:
        np.testing.assert_allclose(captured(x), loop(x) + branch(x), rtol=1e-6)
    assert "region1: captured" in captured.explain(X, show="regions")


SIDE = tg.Stream()


def fork_in_a_scan(x: Any) -> Any:
    def turn(c: Any, row: Any) -> Any:
        main = tg.current_stream()
        SIDE.wait_stream(main)
        with tg.stream(SIDE):
            doubled = c * 2
        main.wait_stream(SIDE)
        return doubled, row

    return lax.scan(turn, x, jnp.ones(2))


def label_in_a_branch(x: Any) -> Any:
    def scale(v: Any) -> Any:
        with tg.stream(SIDE):
            return jax.jit(lambda u: u * 2)(v)

    return lax.scan(lambda c, _: (lax.cond(c[0] > 0, scale, lambda v: v, c), None), x, None, 2)[0]


def record_in_a_loop(x: Any) -> Any:
    def turn(c: Any) -> Any:
        tg.current_stream().record_event()
        return c * 2

    return lax.while_loop(lambda c: c.sum() < 9, turn, x)


@pytest.mark.parametrize(
    ("function", "holder", "offset"),
    [(fork_in_a_scan, "scan", 3), (label_in_a_branch, "cond", 3), (record_in_a_loop, "while", 2)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_streams_in_a_body_are_refused(
    function: Callable[..., Any], holder: str, offset: int
) -> None:
    captured = tg.capture(function)
    with pytest.raises(tg.CaptureError) as caught:
        captured(X)
    assert caught.value.anchor == "stream-in-body"
    assert f"inside the body of a `{holder}`" in str(caught.value)
    line = function.__code__.co_firstlineno + offset
    assert f"test_control_flow.py:{line} in " in str(caught.value)
    # Outside of a capture a stream is a label.
    assert_same(jax.jit(function)(X), function(X))


def test_a_loop_in_a_stream_block_is_on_that_stream() -> None:
    def function(x: Any) -> Any:
        main = tg.current_stream()
        SIDE.wait_stream(main)
        with tg.stream(SIDE):
            y = jax.jit(differentiate)(x)[1] + nest(x)[0]
        main.wait_stream(SIDE)
        return y

    captured = tg.capture(function)
    np.testing.assert_allclose(captured(X), jax.jit(function)(X), rtol=1e-5)
    loops = [op for op in captured.trace(X).graph.ops if op.name == "scan"]
    assert {op.origin.stream for op in loops} == {SIDE.number}


def test_loops_around_an_eager_callback() -> None:
    def function(x: Any) -> Any:
        y = loop(x)
        z = jax.pure_callback(np.sort, jax.typeof(y), -y)
        return branch(z) + y

    captured = tg.capture(function, mode="partial")
    for x in ARGUMENTS:
        np.testing.assert_allclose(captured(x), jax.jit(function)(x), rtol=1e-6)
    assert "cuts: 2 graphs, 1 eager part" in captured.explain(X)


def test_static_results_of_a_loop() -> None:
    captured = tg.capture(count, outputs="static")
    first = captured(X * 3)
    assert_same(jnp.copy(first), jax.jit(count)(X * 3))
    captured(-X)
    with pytest.raises(tg.StaleOutputError):
        np.asarray(first)


def test_control_flow_can_be_refused() -> None:
    captured = tg.capture(step, control_flow="refuse")
    with pytest.raises(tg.CaptureError) as caught:
        captured(make_state(), X)
    assert {violation.rule for violation in caught.value.violations} == {"control-flow"}
    # One line each.
    assert len(caught.value.violations) == 2
    assert "control_flow='refuse'" in captured.explain(make_state(), X)
    with pytest.raises(tg.CaptureError, match="computes `random_gamma`, which loops until"):
        tg.capture(draw, control_flow="refuse")(X)
    # Fixed lengths are no paths that depend on data.
    fixed = tg.capture(lambda x: lax.fori_loop(0, 3, halve, x), control_flow="refuse")
    assert_same(fixed(X), X * 0.125)


def test_refused_in_partial_mode_is_run_eagerly() -> None:
    captured = tg.capture(branch, mode="partial", control_flow="refuse")
    for x in ARGUMENTS:
        np.testing.assert_allclose(captured(x), jax.jit(branch)(x), rtol=1e-6)
    report = captured.explain(X)
    assert "eager because `branch` takes a branch that depends on data" in report
    assert "control_flow='refuse'" in report


@pytest.mark.parametrize("value", ["deny", None, True])
def test_another_word_is_refused_at_the_door(value: Any) -> None:
    with pytest.raises(tg.ConfigError) as caught:
        tg.capture(branch, control_flow=value)
    assert caught.value.what == f"control_flow={value!r} is unknown"
    assert caught.value.why == "they are allow, refuse"


def test_a_pickle_keeps_the_option() -> None:
    copied = pickle.loads(pickle.dumps(tg.capture(branch, control_flow="refuse")))
    with pytest.raises(tg.CaptureError, match="takes a branch that depends on data"):
        copied(X)


def test_the_outermost_capture_decides() -> None:
    strict, free = tg.capture(branch, control_flow="refuse"), tg.capture(branch)
    assert_same(tg.capture(lambda x: strict(x) * 2)(X), jax.jit(lambda x: branch(x) * 2)(X))
    with pytest.raises(tg.CaptureError, match="takes a branch that depends on data"):
        tg.capture(lambda x: free(x) * 2, control_flow="refuse")(X)


def test_python_control_flow_is_refused_as_ever() -> None:
    def choose(x: Any) -> Any:
        return lax.cond(x[0] > 0, lambda v: v if v[0] > 1 else -v, lambda v: v, x)

    with pytest.raises(tg.CaptureError) as caught:
        tg.capture(choose)(X)
    assert caught.value.anchor == "python-branch"
    with pytest.raises(tg.CaptureError, match="reads the value of an array") as caught:
        tg.capture(lambda x, n: lax.scan(lambda c, _: (c, c), x, None, n))(X, 3)
    assert caught.value.anchor == "host-read"


def test_a_callback_in_a_loop_is_refused_at_its_line() -> None:
    def function(x: Any) -> Any:
        def turn(c: Any) -> Any:
            return jax.pure_callback(np.tanh, jax.typeof(c), c) * 2 + 1

        return lax.while_loop(lambda c: c.sum() < 9, turn, x) + 1

    with pytest.raises(tg.CaptureError) as caught:
        tg.capture(function)(X)
    assert caught.value.anchor == "callback"
    line = function.__code__.co_firstlineno + 2
    assert f"{__name__.rpartition('.')[2]}.py:{line} in turn" in caught.value.where
    # In partial mode all of the loop is one eager part.
    captured = tg.capture(function, mode="partial")
    for x in (X, X + 3):
        np.testing.assert_allclose(captured(x), jax.jit(function)(x), rtol=1e-6)
    report = captured.explain(X)
    assert "cuts: 1 graph, 1 eager part" in report
    assert f":{line} in turn" in report


def test_python_work_in_a_body_is_found() -> None:
    ticks = iter(range(99))

    def function(x: Any) -> Any:
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: c + next(ticks) + 1, x)

    with pytest.raises(tg.CaptureError, match="Python work that changes"):
        tg.capture(function)(X)


def test_a_loop_without_a_use_is_dropped() -> None:
    """As in `jax.jit`: it would not end."""

    def function(x: Any) -> Any:
        lax.while_loop(lambda c: c.sum() > -1, lambda c: c + 1, jnp.abs(x))
        return x + 1

    captured = tg.capture(function)
    assert_same(captured(X), X + 1)
    assert [op.name for op in captured.trace(X).graph.ops] == ["add"]
