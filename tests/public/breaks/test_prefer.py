"""`prefer`: a graph with eager parts is used only where it does not lose against `jax.jit`."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import tracegraph as tg
from tests.oracles.error_lines import match
from tests.oracles.tree_equality import assert_same
from tracegraph.verification import jit_comparison

# Before the fixture of the session takes its place.
TIME_BOTH = jit_comparison.time_both
X = jnp.linspace(0.5, 2.0, 4)


def sort(x: Any) -> Any:
    return jax.pure_callback(np.sort, jax.typeof(x), x[::-1])


def show(x: Any) -> Any:
    return sort(x * 2) + x


def step(state: Any, x: Any, rate: float = 0.5) -> Any:
    gradient = sort(state["w"] * x)
    return {"w": state["w"] - rate * gradient, "n": state["n"] + 1}, gradient.sum()


def make_state() -> dict[str, Any]:
    return {"w": X + 1, "n": jnp.zeros((), "int32")}


@pytest.fixture
def jit_wins(monkeypatch: Any) -> None:
    monkeypatch.setattr(jit_comparison, "time_both", lambda *_: (200e-6, 100e-6))


def capture(function: Any, **options: Any) -> Any:
    return tg.capture(function, mode="partial", name="step", **options)


@pytest.mark.usefixtures("jit_wins")
def test_calls_run_as_jit_where_the_graph_loses() -> None:
    captured = capture(show)
    for _ in range(3):
        assert_same(captured(X), jax.jit(show)(X))
    assert captured.cache_info() == tg.CacheInfo(2, 1, 64, 1)
    report = captured.explain(X)
    assert (
        "calls run as jax.jit, without the graph: 200 µs with the graph, 100 µs as jax.jit; "
        'prefer="graph" keeps it\n'
    ) in report
    assert "compare" in captured.timings()
    # The memory of the graph is given back.
    assert captured.pool_bytes == 0


def test_the_graph_is_used_where_it_wins() -> None:
    captured = capture(show)
    asked = "calls run as the faster one of the graph and jax.jit, timed at the first call\n"
    assert asked in captured.explain(X)
    assert_same(captured(X), jax.jit(show)(X))
    assert "calls run with the graph: 100 µs with the graph, 200 µs as jax.jit\n" in (
        captured.explain(X)
    )
    assert captured.pool_bytes > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prefer": "graph"}, 'prefer="graph"'),
        ({"outputs": "static"}, 'outputs="static" are the graph\'s own buffers'),
    ],
)
@pytest.mark.usefixtures("jit_wins")
def test_the_graph_is_used_where_only_it_will_do(options: Any, reason: str) -> None:
    captured = capture(show, **options)
    first = captured(X)
    assert_same(np.asarray(first), jax.jit(show)(X))
    assert f"calls run with the graph, not compared with jax.jit: {reason}\n" in captured.explain(X)
    if "outputs" in options:
        captured(X + 1)
        with pytest.raises(tg.StaleOutputError):
            np.asarray(first)


@pytest.mark.usefixtures("jit_wins")
def test_effects_happen_once_per_call() -> None:
    seen: list[float] = []

    def record(x: Any) -> Any:
        io_callback(lambda value: seen.append(float(value)), None, x.sum(), ordered=False)
        return x * 2

    captured = capture(record)
    for _ in range(2):
        captured(X)
        jax.effects_barrier()
    assert len(seen) == 2
    assert "not compared with jax.jit: eager parts have effects" in captured.explain(X)


@pytest.mark.usefixtures("jit_wins")
def test_invalid_floats_are_looked_for_in_the_graph() -> None:
    captured = capture(lambda x: jnp.log(sort(x)))
    with jax.debug_nans(True):
        captured(X)
        assert "jax_debug_nans or jax_debug_infs is on" in captured.explain(X)
        with pytest.raises(FloatingPointError):
            captured(-X)


@pytest.mark.usefixtures("jit_wins")
def test_whole_graphs_are_not_compared() -> None:
    captured = capture(jnp.sin)
    captured(X)
    assert "calls run" not in captured.explain(X)
    assert "compare" not in captured.timings()


@pytest.mark.usefixtures("jit_wins")
def test_donated_leaves_are_deleted_as_under_jit() -> None:
    captured = capture(step, donate_argnums=0)
    state, wanted, before = make_state(), make_state(), make_state()
    for _ in range(3):
        before = state
        state, total = captured(state, X)
        wanted, expected = jax.jit(step)(wanted, X)
        assert before["w"].is_deleted()
        assert_same((state, total), (wanted, expected))
    assert captured.cache_info().captures == 1
    with pytest.raises(tg.CaptureError, match="state"):
        captured(before, X)
    with pytest.raises(tg.CaptureError):
        captured({"w": X, "n": state["n"]}, state["w"].at[:].set(1), rate=before["w"])
    state, _ = captured(state, X)


@pytest.mark.usefixtures("jit_wins")
def test_an_array_that_is_donated_twice_is_refused() -> None:
    captured = capture(lambda x, y: (sort(x), y + 1), donate_argnums=(0, 1))
    captured(X + 1, X + 2)
    z = X + 3
    with pytest.raises(tg.CaptureError, match="donated"):
        captured(z, z)
    captured(X + 1, X + 2)


@pytest.mark.usefixtures("jit_wins")
def test_leaves_of_other_graphs_are_taken() -> None:
    other = tg.capture(lambda s: s * 2, donate_argnums=0)
    captured = capture(lambda s: sort(s) + 1, donate_argnums=0)
    captured(X + 0)
    leaf = other(X + 0)
    assert isinstance(leaf, tg.Array)
    assert_same(captured(leaf), sort(X * 2) + 1)
    assert leaf.is_deleted()
    with pytest.raises(tg.ReplayError, match="step"):
        np.asarray(leaf)
    again = other(X + 0)
    assert_same(capture(lambda s: sort(s) + 1)(again), sort(X * 2) + 1)
    assert not again.is_deleted()


@pytest.mark.usefixtures("jit_wins")
def test_other_signatures_are_captured_anew() -> None:
    def scale(x: Any, factor: Any, *, kind: str = "up", model: Any = None) -> Any:
        y = sort(x) * factor
        return model(y) if model is not None else (y if kind == "up" else -y)

    captured = capture(scale, static_argnames="kind")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((X, 2.0), {}),
        ((jnp.arange(6.0), 2.0), {}),
        ((X, jnp.float32(2.0)), {}),
        ((X.astype("int32"), 2.0), {}),
        ((X, 2.0), {"kind": "down"}),
        ((X, 2.0), {"model": jnp.tanh}),
        ((X, 2.0), {"model": jnp.sin}),
    ]
    for _ in range(2):
        for args, kwargs in calls:
            assert_same(captured(*args, **kwargs), scale(*args, **kwargs))
    assert captured.cache_info().captures == len(calls)
    # The same calls, spelled otherwise.
    assert_same(captured(factor=2.0, x=X), scale(X, 2.0))
    assert_same(captured(X, 3.0, kind="up"), scale(X, 3.0))
    assert captured.cache_info().captures == len(calls)
    with pytest.raises(tg.CaptureError):
        captured(X, 2.0, kind=[])
    assert "calls run as jax.jit" in captured.explain(X, 2.0, kind="down")


@pytest.mark.usefixtures("jit_wins")
def test_calls_survive_that_jax_drops_its_caches() -> None:
    captured = capture(show)
    captured(X)
    jax.clear_caches()
    assert_same(captured(X), jax.jit(show)(X))
    assert captured.cache_info().captures == 1


@pytest.mark.usefixtures("jit_wins")
def test_a_callback_that_raises_is_not_called_twice() -> None:
    calls: list[int] = []
    is_failing = False

    def work(x: Any) -> Any:
        calls.append(1)
        if is_failing:
            raise ValueError("no more deleted data")
        return np.sort(x)

    captured = capture(lambda x: jax.pure_callback(work, jax.typeof(x), x) * 2)
    captured(X)
    is_failing = True
    count = len(calls)
    with pytest.raises(Exception, match="no more deleted data"):
        jax.block_until_ready(captured(X))
    assert len(calls) == count + 1
    is_failing = False
    assert_same(captured(X), sort(X) * 2)


@pytest.mark.usefixtures("jit_wins")
def test_precision_flags_hold_for_jit_too() -> None:
    captured = capture(lambda x: sort((x @ x)[0]))
    x = jnp.ones((4, 4))
    with tg.backends.matmul.flags(allow_tf32=False):
        captured(x)
    text = str(captured._latest._jaxpr)
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in text


@pytest.mark.usefixtures("jit_wins")
def test_nothing_is_kept_after_reset() -> None:
    captured = capture(show)
    captured(X)
    gc.disable()
    try:
        held = weakref.ref(captured._latest)
        captured.reset()
        assert held() is None
    finally:
        gc.enable()


def test_an_unknown_preference_is_refused() -> None:
    with pytest.raises(tg.ConfigError) as caught:
        tg.capture(show, prefer="jit")  # pyright: ignore[reportArgumentType, reportCallIssue]
    match(
        caught.value,
        "prefer='jit' is unknown",
        "tests/public/breaks/test_p",
        "they are auto",
        "corr",
    )


def time_with(monkeypatch: Any, seconds: list[float]) -> Any:
    """Captures with a clock that gives these durations in turn: of a replay, of a call of jit."""
    durations = iter([seconds[1], seconds[0], *seconds * 100])
    now, is_started = 0.0, False

    def tell() -> float:
        nonlocal now, is_started
        if is_started:
            now += next(durations)
        is_started = not is_started
        return now

    monkeypatch.setattr(jit_comparison, "time_both", TIME_BOTH)
    monkeypatch.setattr(jit_comparison, "time", types.SimpleNamespace(perf_counter=tell))
    captured = capture(step, donate_argnums=0)
    state = make_state()
    result = captured(state, X)
    assert_same(result, jax.jit(step)(make_state(), X))
    # What was timed were copies.
    assert state["w"].is_deleted()
    return captured.explain(result[0], X)


def test_medians_decide(monkeypatch: Any) -> None:
    assert "20 µs with the graph, 10 µs as jax.jit; prefer" in time_with(monkeypatch, [2e-5, 1e-5])
    assert "with the graph: 10 µs with the graph, 20 µs" in time_with(monkeypatch, [1e-5, 2e-5])


def test_a_difference_within_the_noise_keeps_the_graph(monkeypatch: Any) -> None:
    assert "calls run with the graph: 102 µs" in time_with(monkeypatch, [1.02e-4, 1e-4])


def test_slow_functions_are_timed_a_few_times(monkeypatch: Any) -> None:
    rounds: list[int] = []
    time_graph = jit_comparison._time_graph

    def count(*args: Any) -> float:
        rounds.append(1)
        return time_graph(*args)

    monkeypatch.setattr(jit_comparison, "_time_graph", count)
    time_with(monkeypatch, [2.0, 1.0])
    assert len(rounds) == 1 + jit_comparison.MIN_ROUNDS
    rounds.clear()
    time_with(monkeypatch, [2e-5, 1e-5])
    assert len(rounds) == 1 + jit_comparison.MAX_ROUNDS


def test_no_memory_for_jit_keeps_the_graph(monkeypatch: Any) -> None:
    def fail(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(jit_comparison, "time_both", fail)
    captured = capture(show)
    assert_same(captured(X), jax.jit(show)(X))
    assert "not compared with jax.jit: no memory is left" in captured.explain(X)
