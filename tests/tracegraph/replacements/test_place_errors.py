"""Errors in place: both sides are measured on the values that the function computes there."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.ir.graph import Graph
from tracegraph.passes.pipeline import DEFAULT_PASSES, run_passes
from tracegraph.replacements import place_errors
from tracegraph.replacements.bodies import list_bodies
from tracegraph.replacements.match import Match, OpBody
from tracegraph.replacements.place_errors import PlaceError, measure_places
from tracegraph.tracing.trace import trace_function

X = jnp.linspace(1.0, 2.0, 4)
TABLE = np.arange(4, dtype=np.float32)


def measure(*computes: Any, reference: Any = jnp.sin, x: Any = X) -> list[PlaceError]:
    def function(x: Any) -> Any:
        return [jnp.sin(x * (index + 1) + TABLE) for index in range(len(computes))]

    graph = run_passes(trace_function(function, (x,), {}, name="f").graph, DEFAULT_PASSES)[0]
    sines = [op for op in graph.ops if op.name == "sin"]
    matches = [
        Match(op, op.results, op.operands, lambda x, f=compute: (f(x),), lambda x: (reference(x),))
        for op, compute in zip(sines, computes, strict=True)
    ]
    # In another order than in the graph.
    return measure_places(graph, matches[::-1], [x])[::-1]


def test_each_place_is_measured_on_its_own_values() -> None:
    one, other = measure(jnp.sin, lambda x: jnp.sin(x) + 0.25 * (x > 4))
    assert one.ours == one.theirs == 0.0
    assert other.ours == pytest.approx(0.25, rel=1e-5)
    assert (one.is_allowed, other.is_allowed) == (True, False)


def test_equal_places_are_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    with jax.log_compiles(True):
        measure(jnp.sin, jnp.sin, jnp.sin)
        other = measure(jnp.sin, jnp.cos)
    assert len([each for each in caplog.messages if "XLA compilation of jit(compare)" in each]) == 3
    assert other[1].ours > 0.1


def test_threads_compile_under_the_settings_of_the_caller() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(np.linspace(1, 2, 4))
        (error,) = measure(lambda x: jnp.sin(x) + 1e-12, x=x)
    # As float32, nothing would be left of it.
    assert 0.5e-12 < error.ours < 2e-12


def test_what_cannot_be_compiled_is_raised_and_leaves_no_thread() -> None:
    def call_missing(x: Any) -> Any:
        return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_target"):
        measure(call_missing)
    assert not [each for each in threading.enumerate() if "tracegraph-errors" in each.name]


def test_programs_of_one_text_take_the_same_arrays() -> None:
    """The second match does not read its first input, and the first not its second."""

    def function(x: Any, y: Any) -> Any:
        return [jnp.sin(x), jnp.sin(y)]

    args = (X, 10 * X)
    graph = run_passes(trace_function(function, args, {}, name="f").graph, DEFAULT_PASSES)[0]
    sines = [op for op in graph.ops if op.name == "sin"]

    def make(number: int) -> Match:
        def compute(*given: Any) -> Any:
            return (jnp.sin(given[number]),)

        return Match(sines[number], sines[number].results, graph.inputs, compute, compute)

    for error in measure_places(graph, [make(0), make(1)], args):
        assert error.ours == 0.0
        assert error.theirs <= error.rounding


def test_as_exact_as_xla_is_exact_enough() -> None:
    (error,) = measure(lambda x: jnp.sin(x) - 0.125, reference=lambda x: jnp.sin(x) + 0.125)
    assert error.ours == pytest.approx(0.25, rel=1e-5)
    assert error.theirs == pytest.approx(0.125, rel=1e-5)
    assert not error.is_allowed
    (error,) = measure(lambda x: jnp.sin(x) + 0.03, reference=lambda x: jnp.sin(x) + 0.125)
    assert error.is_allowed


def test_half_a_unit_in_the_last_place_is_allowed() -> None:
    assert PlaceError(0.5, 0.0, 0.5).is_allowed
    assert not PlaceError(0.6, 0.0, 0.5).is_allowed
    (error,) = measure(jnp.sin)
    # The largest sine of these is of 0 + 1.0 ... 3 + 2.0, below 1.
    largest = float(jnp.max(jnp.abs(jnp.sin(X + TABLE))))
    assert error.rounding == pytest.approx(largest * 2.0**-24)


@pytest.mark.parametrize("wrong", [jnp.nan, jnp.inf])
def test_what_is_finite_on_one_side_only_is_never_allowed(wrong: float) -> None:
    (error,) = measure(lambda x: jnp.where(x > 4, wrong, jnp.sin(x)))
    assert error.ours == np.inf
    assert not error.is_allowed
    (error,) = measure(jnp.sin, reference=lambda x: jnp.where(x > 4, wrong, jnp.sin(x)))
    assert error.ours == error.theirs == np.inf
    assert error.is_allowed


def test_equal_nans_are_no_difference() -> None:
    (error,) = measure(jnp.sin, x=X.at[1].set(jnp.nan).at[2].set(jnp.inf))
    assert (error.ours, error.theirs) == (0.0, 0.0)
    assert error.is_allowed


def test_bodies_are_compiled_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes values in a loop needs no values to be compiled."""

    def function(x: Any) -> Any:
        outer = jnp.sin(x)
        carry, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), outer, None, length=3)
        return outer, carry

    graph = run_passes(trace_function(function, (X,), {}, name="f").graph, DEFAULT_PASSES)[0]
    events: list[str] = []
    submit = place_errors._PlaceCompiler._submit

    def note(*args: Any) -> Any:
        events.append("compile")
        return submit(*args)

    run = place_errors._run_programs
    monkeypatch.setattr(place_errors._PlaceCompiler, "_submit", note)
    monkeypatch.setattr(
        place_errors, "_run_programs", lambda *args: events.append("run") or run(*args)
    )
    errors = measure_places(graph, find_sines(graph), [X])
    assert [error.ours for error in errors] == [0.0, 0.0]
    # Values of the function and of its loop, and one program that compares both sines.
    assert events == ["compile", "compile", "compile", "run", "run"]


def compute_sine(x: Any) -> Any:
    return (jnp.sin(x),)


def find_sines(graph: Graph) -> list[Match]:
    """Returns a match of each sine, in the function and in its loop."""
    found = []
    for op in graph.ops:
        if op.name == "sin":
            found.append(Match(op, op.results, op.operands, compute_sine, compute_sine))
    for op, name, inner in list_bodies(graph):
        body = OpBody(op, name, inner)
        found += [dataclasses.replace(each, path=(body, *each.path)) for each in find_sines(inner)]
    return found
