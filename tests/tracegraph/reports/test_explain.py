"""`explain`: the report of a capture, and of a function that cannot be captured."""

import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.gpu_programs import copy, fill, kernel
from tracegraph.reports.explain_gpu import count_nodes
from tracegraph.runtime.graph import Stage

X = jnp.ones((2, 3))
TITLES = ["signature", "graph", "passes", "regions", "memory plan", "nodes", "per call", "pool"]
TITLES += ["verification"]


def step(state, x, kind="a"):
    w = state["w"] + x
    return {"w": w}, w.sum(), kind and x


def list_titles(report):
    return [each for each in report.split("\n") if each and not each.startswith((" ", "`"))]


def test_a_report_has_all_sections_and_captures_nothing():
    captured = tg.capture(step, donate_argnums=0, static_argnames="kind")
    state = {"w": jnp.zeros((2, 3))}
    report = captured.explain(state, X, kind="b")
    assert report.startswith("`step` can be captured (mode='whole', outputs='fresh')\n")
    assert list_titles(report) == TITLES
    for text in (
        "state['w']: f32[2,3]",
        "static argument kind: 'b'",
        f"test_explain.py:{step.__code__.co_firstlineno + 1}",
        "region0: captured, stream 0",
        "bytes, known before the first run",
        "donated: copied in once, resident from then on",
    ):
        assert text in report
    assert captured.cache_info() == (0, 0, 64, 0)
    assert captured.pool_bytes == 0
    assert not state["w"].is_deleted()


def test_the_pool_bytes_are_those_of_the_first_run():
    captured = tg.capture(step, donate_argnums=0)
    report = captured.explain({"w": jnp.zeros((2, 3))}, X)
    known = re.search(r"\n  ([\d,]+) bytes, known before the first run", report)
    assert known is not None
    arena_bytes = int(known[1].replace(",", ""))
    assert arena_bytes == captured.lower({"w": jnp.zeros((2, 3))}, X).pool_bytes
    captured({"w": jnp.zeros((2, 3))}, X)
    assert arena_bytes <= captured.pool_bytes < arena_bytes + 512


def test_types_are_enough_for_a_report():
    captured = tg.capture(step)
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert captured.explain({"w": shape}, shape) == captured.explain({"w": X}, X)
    assert "%0: f32[2,3]" in str(captured.trace({"w": shape}, shape))


def test_a_report_is_the_same_each_time():
    captured = tg.capture(step, donate_argnums=0)
    assert captured.explain({"w": X}, X + 1) == captured.explain({"w": X}, X + 1)


def test_violations_are_reported():
    def function(x):
        y = jax.pure_callback(np.sin, jax.typeof(x), x)
        return jax.lax.cond(y.sum() > 0, lambda v: v, lambda v: -v, y)

    report = tg.capture(function).explain(X)
    assert report.startswith("`function` cannot be captured (mode='whole'")
    assert list_titles(report) == ["signature", "violations"]
    first = function.__code__.co_firstlineno + 1
    place = "tests/tracegraph/reports/test_explain.py"
    assert f"{place}:{first}, {place}:{first + 1}" in re.sub(r" in [\w<>.]+", "", report)
    partial = tg.capture(function, mode="partial").explain(X)
    assert partial.startswith("`function` can be captured (mode='partial'")
    assert partial.count("eager because") == 2
    assert "calls back into Python" in partial


def test_trace_errors_are_reported():
    report = tg.capture(lambda x: x.item(), name="read").explain(X)
    assert "`read` cannot be captured" in report
    assert "reads the value of an array on the host with `.item()`" in report


def test_an_exception_of_the_user_passes():
    def function(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tg.capture(function).explain(X)


def test_wrong_arguments_are_refused():
    with pytest.raises(tg.CaptureError, match="argument 1 `x` is a str"):
        tg.capture(step).explain({"w": X}, "text")


def test_without_arguments_and_without_ops():
    assert "  no arguments\n" in tg.capture(lambda: 1.0).explain()
    report = tg.capture(lambda x: x).explain(X)
    assert "none: every result is an argument or a constant" in report


def test_many_leaves_are_cut_short():
    report = tg.capture(lambda xs: sum(xs)).explain([1.0] * 50)
    assert "... and 10 more leaves" in report


def test_nodes_are_counted_by_cudas_names_for_them():
    steps = (fill("a", "s"), fill("b", "t"), copy("c", "s", "t"), kernel("d", "t", "u"))
    stage = Stage(tuple(step.node for step in steps), ((0, 2), (2, 3)))
    lowered: Any = types.SimpleNamespace(definition=types.SimpleNamespace(stages=(stage,)))
    wanted = "1 graph: 1 kernel, 1 memcpy, 2 memsets; 2 edges, 0 of them programmatic"
    assert count_nodes(lowered) == wanted
