"""`numerics="equivalent"`: replaced where it is faster and as exact, and said so; else as XLA."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.oracles.error_lines import match
from tests.oracles.tree_equality import assert_same
from tracegraph.capturing import fastest_variant
from tracegraph.replacements import scatter_sums
from tracegraph.replacements.match import Machine
from tracegraph.runtime.errors import OutOfMemoryError, UnsupportedError

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 8)), jnp.int32)
FASTER, SLOWER = [20e-6, 10e-6], [10e-6, 20e-6]


def loss(table: Any, tokens: Any) -> Any:
    hidden = jnp.tanh(table[tokens].mean(1))
    return (hidden @ table.T).astype(jnp.float32).var()


def train(state: Any, tokens: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(state["table"], tokens)
    return {"table": state["table"] - 8 * gradient}, value


def make_state() -> Any:
    table = np.random.default_rng(1).normal(size=(1024, 4))
    return {"table": jnp.asarray(table, jnp.bfloat16)}


def run(step: Any, steps: int = 3) -> tuple[Any, list[Any]]:
    state, values = make_state(), []
    for _ in range(steps):
        state, value = step(state, TOKENS)
        values.append(np.asarray(value))
    return jax.tree.map(np.asarray, state), values


def capture(function: Any = train, **options: Any) -> Any:
    return tg.capture(function, donate_argnums=0, numerics="equivalent", **options)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What every trial is said to have measured: by default the replacement wins."""
    found = list(FASTER)
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: list(found))
    return found


def count_wide_scatters(step: Any) -> int:
    text = step.explain(make_state(), TOKENS, show="ir")
    return sum("scatter-add" in line and "f32" in line for line in text.splitlines())


@pytest.mark.usefixtures("times")
def test_what_is_faster_is_used_and_listed() -> None:
    step = capture()
    report = step.explain(make_state(), TOKENS)
    assert "replaced: what is faster, timed at the first call" in report
    state, values = run(step)
    wanted, wanted_values = run(jax.jit(train))
    assert np.allclose(values, wanted_values, rtol=2e-2)
    assert np.allclose(
        *(np.asarray(each["table"], np.float32) for each in (state, wanted)), atol=0.1
    )
    report = step.explain(make_state(), TOKENS)
    verdict = "used; 20 µs without, 10 µs with"
    assert f"replaced:\n  scattered sums in float32: {verdict} (" in report
    assert "in loss)\n" in report
    assert "results equal XLA's executable bit for bit" in report
    assert count_wide_scatters(step) == 1
    assert "compare" in step.timings()


def test_what_is_not_faster_is_dropped_with_its_times(times: list[float]) -> None:
    times[:] = SLOWER
    step = capture()
    assert_same(run(step), run(jax.jit(train)))
    report = step.explain(make_state(), TOKENS)
    assert "not used: it is not faster here; 10 µs without, 20 µs with (" in report
    assert count_wide_scatters(step) == 0


def test_the_default_replaces_nothing() -> None:
    step = tg.capture(train, donate_argnums=0)
    assert_same(run(step), run(jax.jit(train)))
    assert "replaced" not in step.explain(make_state(), TOKENS)


@pytest.mark.usefixtures("times")
def test_nothing_to_replace_is_said() -> None:
    double = tg.capture(lambda x: x * 2, numerics="equivalent")
    assert_same(double(jnp.ones(3)), 2 * jnp.ones(3))
    assert "replaced: nothing\n" in double.explain(jnp.ones(3))


def test_what_an_older_gpu_cannot_replace_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(*_: Any) -> Any:
        raise AssertionError

    machine = Machine("8.0", 108, compile_nothing)
    monkeypatch.setattr(fastest_variant, "find_machine", lambda _: machine)
    multiply: Any = tg.capture(lambda x, w: x @ w, name="multiply", numerics="equivalent")
    x, w = jnp.ones((1, 256), jnp.bfloat16), jnp.ones((256, 256), jnp.bfloat16)
    assert_same(multiply(x, w), x @ w)
    (line,) = [each for each in multiply.explain(x, w).splitlines() if "few rows" in each]
    assert "not used: it needs compute capability 9.0, and this GPU has 8.0 (" in line


@pytest.mark.usefixtures("times")
def test_a_replacement_that_computes_something_else_is_never_used(monkeypatch: Any) -> None:
    def forget_owner(self: Any, operand: Any, indices: Any, updates: Any) -> Any:
        rows = updates.reshape(-1, operand.shape[-1])
        return (operand.at[indices.reshape(-1)].set(rows.astype(operand.dtype)),)

    sparse = scatter_sums.ScatterSum.__call__

    def compute(self: Any, *operands: Any) -> Any:
        return (forget_owner if self.is_sparse else sparse)(self, *operands)

    monkeypatch.setattr(scatter_sums.ScatterSum, "__call__", compute)
    step = capture()
    assert_same(run(step), run(jax.jit(train)))
    report = step.explain(make_state(), TOKENS)
    assert "not used: its error is " in report
    assert ", where XLA's is " in report
    assert count_wide_scatters(step) == 0


@pytest.mark.usefixtures("times")
@pytest.mark.parametrize("error", [OutOfMemoryError, UnsupportedError])
def test_what_cannot_be_tried_is_dropped(monkeypatch: Any, error: Any) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error("there is no such kernel", where="here", why="planted", fix="none", anchor="x")

    monkeypatch.setattr(fastest_variant, "_time", fail)
    step = capture()
    assert_same(run(step), run(jax.jit(train)))
    reasons = {
        OutOfMemoryError: "no memory is left to time it",
        UnsupportedError: "there is no such kernel",
    }
    assert f"not used: {reasons[error]} (" in step.explain(make_state(), TOKENS)


@pytest.mark.usefixtures("times")
def test_no_memory_of_a_trial_stays() -> None:
    step, plain = capture(), tg.capture(train, donate_argnums=0)
    run(plain)
    run(step)
    before = tg.memory.memory_allocated()
    step.reset()
    state = step(make_state(), TOKENS)
    assert step.pool_bytes == step.lower(make_state(), TOKENS).pool_bytes
    assert tg.memory.memory_allocated() == before
    del state


@pytest.mark.usefixtures("times")
def test_another_process_uses_the_choice_without_a_trial(
    monkeypatch: Any, tmp_path: Any, compiled: list[str]
) -> None:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(tmp_path / "kernels"))
    first = run(capture())
    assert len(compiled) == 2
    compiled.clear()
    monkeypatch.setattr(fastest_variant, "choose_variant", None)
    step = capture()
    # Already before the first call.
    assert count_wide_scatters(step) == 1
    assert_same(run(step), first)
    assert compiled == []
    assert "used; 20 µs without, 10 µs with (" in step.explain(make_state(), TOKENS)
    assert "replaced" not in tg.capture(train, donate_argnums=0).explain(make_state(), TOKENS)


@pytest.mark.usefixtures("times")
def test_gradients_of_a_captured_function_are_replaced_too() -> None:
    captured = tg.capture(loss, numerics="equivalent")
    table = make_state()["table"]
    value, gradient = jax.value_and_grad(captured)(table, TOKENS)
    wanted = jax.grad(loss)(table, TOKENS)
    assert np.allclose(np.asarray(gradient, np.float32), np.asarray(wanted, np.float32), atol=1e-3)
    assert np.isfinite(value)


@pytest.mark.usefixtures("times")
def test_parts_of_a_function_with_eager_parts_are_left() -> None:
    def function(table: Any, tokens: Any) -> Any:
        return jax.pure_callback(np.sin, jax.typeof(table), jax.grad(loss)(table, tokens))

    captured = tg.capture(function, numerics="equivalent", mode="partial", prefer="graph")
    table = make_state()["table"]
    assert_same(captured(table, TOKENS), jax.jit(function)(table, TOKENS))
    assert "replaced: nothing\n" in captured.explain(table, TOKENS)


@pytest.mark.usefixtures("times")
def test_a_capture_beside_the_calls_switches_over_to_the_replacement() -> None:
    step = capture(warm=False)
    run(step)
    step.wait_until_captured()
    assert "used; 20 µs without" in step.explain(make_state(), TOKENS)
    assert np.allclose(run(step)[1], run(jax.jit(train))[1], rtol=2e-2)


@pytest.mark.usefixtures("times")
def test_buckets_are_replaced_each() -> None:
    def read(x: Any, table: Any, indices: Any, rows: Any) -> Any:
        return x * 2, table.at[indices].add(rows)

    captured: Any = tg.capture(read, numerics="equivalent", buckets={"x": {0: (4, 8)}})
    table = make_state()["table"]
    args = table, jnp.arange(8, dtype=jnp.int32), jnp.ones((8, 4), jnp.bfloat16)
    for size in (3, 7):
        assert_same(captured(jnp.ones(size), *args), jax.jit(read)(jnp.ones(size), *args))
    assert "used; 20 µs without" in captured.explain(jnp.ones(3), *args)


@pytest.mark.usefixtures("times")
def test_a_gpu_gets_the_program_of_the_replacement(monkeypatch: Any) -> None:
    kernels = capture_for_gpu(monkeypatch).driver.kernels
    before = set(kernels)
    step = capture()
    _, values = run(step)
    assert np.allclose(values, run(jax.jit(train))[1], rtol=2e-2)
    # One kernel per program: without the replacement and with it.
    assert len(set(kernels) - before) == 2
    assert count_wide_scatters(step) == 1


def test_the_times_are_those_of_the_two_graphs() -> None:
    """Nothing is patched: whichever wins, both were timed and the results are right."""
    step = capture()
    assert np.allclose(run(step)[1], run(jax.jit(train))[1], rtol=2e-2)
    report = step.explain(make_state(), TOKENS)
    (line,) = [line for line in report.splitlines() if "scattered sums" in line]
    assert " µs with (" in line
    assert " µs without, " in line


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(tg.ConfigError) as caught:
        tg.capture(train, numerics="fast")  # pyright: ignore[reportArgumentType, reportCallIssue]
    match(
        caught.value,
        "numerics='fast' is unknown",
        "tests/public/kernels/test_n",
        "they are equiv",
        "corr",
    )


def test_a_replacement_prints_in_one_line() -> None:
    one = fastest_variant.Replacement("sums", (0,), ("a.py:1 in f",), "", 12.4, 9.6)
    assert str(one) == "sums: used; 12 µs without, 10 µs with (a.py:1 in f)"
    two = dataclasses.replace(
        one, places=("a.py:1 in f", "a.py:2 in f"), dropped="why", after_us=None
    )
    assert str(two) == "sums: not used: why (a.py:1 in f and 1 more)"
