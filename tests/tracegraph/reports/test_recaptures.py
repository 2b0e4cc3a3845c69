"""Why a function was captured anew: named, logged when asked for, and warned of once."""

from __future__ import annotations

import dataclasses
import doctest
import gc
import inspect
import logging
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.processes import run_copy
from tracegraph.jax_internals import list_setting_names, read_settings
from tracegraph.reports import differences
from tracegraph.reports.differences import find_differences
from tracegraph.reports.recaptures import FIXES, MANY_CAPTURES, RecaptureLog
from tracegraph.tracing.prepared_call import prepare_call
from tracegraph.tracing.signature import LeafType, Signature

X = jnp.ones((2, 3))


def pick(x: Any, kind: str = "a", **rest: Any) -> Any:
    return jax.tree.leaves(x)[0] + sum(jnp.sum(value) for value in rest.values())


def capture() -> Any:
    return tg.capture(pick, static_argnames="kind", verify=False)


def explain_latest(captured: Any) -> list[str]:
    lines = str(captured.explain(X)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("captured anew: "))
    return lines[start : start + 2]


def with_precision(function: Callable[[Any], Any]) -> Any:
    with jax.default_matmul_precision("highest"):
        return function(X)


def name_line(function: Callable[..., Any]) -> str:
    return f"tests/tracegraph/reports/test_recaptures.py:{function.__code__.co_firstlineno} in "


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shape": (lambda f: f(jnp.ones((4, 3))), "x: f32[4,3] after f32[2,3]"),
    "dtype": (lambda f: f(X.astype(int)), "x: i32[2,3] after f32[2,3]"),
    "static value": (lambda f: f(X, kind="b"), "static argument kind: 'b' after nothing"),
    "tree": (lambda f: f([X]), "x[0]: f32[2,3] after nothing"),
    "argument": (lambda f: f(X, y=X), "y: f32[2,3] after nothing"),
    "setting": (with_precision, "jax_default_matmul_precision: 'highest' after None"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_named(name: str):
    captured = capture()
    captured(X)
    assert "captured anew" not in captured.explain(X)
    call, wanted = CASES[name]
    call(captured)
    head, difference = explain_latest(captured)
    assert head.startswith(
        "captured anew: capture 2 after 1 call, at tests/tracegraph/reports/test_recaptures.py:"
    )
    assert difference == f"  {wanted}"


def test_a_weak_type_is_named():
    captured = tg.capture(lambda x: x * 2, verify=False)
    captured(jnp.float32(1.0))
    captured(1.0)
    report = captured.explain(1.0)
    assert "  x: f32[] (weak type) after f32[]\n" in report


def test_static_values_that_are_equal_in_python_are_told_apart():
    captured = tg.capture(lambda x, n: x * n, static_argnums=1, verify=False)
    captured(X, 1)
    captured(X, True)
    assert "  static argument n: True after 1\n" in captured.explain(X, 1)


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ({"a": [X, X]}, {"a": (X, X)}, "the tree at x['a'][0]: "),
        ([None, X], [(), X], "a tree without leaves: "),
    ],
)
def test_trees_with_the_same_leaves_are_told_apart(one: Any, other: Any, wanted: str):
    captured = capture()
    captured(one)
    captured(other)
    report = captured.explain(one)
    (line,) = [line for line in report.splitlines() if " after PyTreeDef(" in line]
    assert line.startswith(f"  {wanted}PyTreeDef(")


def test_the_nearest_graph_is_compared():
    captured = capture()
    for shape in ((2, 3), (5, 7)):
        captured({"a": jnp.ones(shape), "b": jnp.ones(shape)})
    captured({"a": jnp.ones((2, 3)), "b": jnp.ones((5, 3))})
    assert "  x['b']: f32[5,3] after f32[2,3]\n" in captured.explain(X)
    captured({"a": jnp.ones((5, 7)), "b": jnp.ones((5, 8))})
    assert "  x['b']: f32[5,8] after f32[5,7]\n" in captured.explain(X)


def test_all_that_differs_is_counted():
    captured = capture()
    captured([jnp.ones(2)] * 60)
    captured([jnp.ones(3)] * 60)
    report = captured.explain(X)
    assert "  x[0]: f32[3] after f32[2]\n  and 39 more differences\n" in report


def test_a_reset_is_named():
    captured = capture()
    captured(X)
    captured.reset()
    captured(X)
    assert explain_latest(captured)[1] == "  no graph was left after reset()"


def test_a_function_that_cannot_be_captured_says_it_too():
    captured = tg.capture(
        lambda x, flag: jnp.sum(x) if flag else x.item(), static_argnums=1, verify=False
    )
    captured(X, True)
    captured(X + 1, 1)
    assert "captured anew: capture 2 after 1 call" in captured.explain(X, False)


def test_a_capture_that_fails_is_none():
    captured = tg.capture(lambda x: x.item() if x.ndim == 1 else x, verify=False)
    captured(X)
    with pytest.raises(tg.CaptureError):
        captured(jnp.ones(1))
    assert "captured anew" not in captured.explain(X)
    captured(jnp.ones((1, 1)))
    assert "captured anew: capture 2 after 1 call" in captured.explain(X)


def test_a_graph_that_is_dropped_for_another_is_mentioned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tracegraph.capturing.capture_cache.MAX_SIGNATURES", 2)
    captured = capture()
    for size in (1, 2, 3):
        captured(jnp.ones(size))
    assert explain_latest(captured)[0].startswith(
        "captured anew: capture 3 after 2 calls (one graph was dropped for it), at "
    )


@pytest.mark.parametrize("switch", ["variable", "config"])
def test_recaptures_are_logged_when_asked_for(
    switch: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    captured = capture()
    captured(X)
    with caplog.at_level(logging.WARNING, logger="tracegraph"):
        captured(jnp.ones(1))
        assert caplog.records == []
        if switch == "variable":
            monkeypatch.setenv("TRACEGRAPH_EXPLAIN_RECAPTURES", "1")
            captured(jnp.ones(2))
        else:
            monkeypatch.setattr(logging.getLogger("jax"), "disabled", True)
            with jax.explain_cache_misses(True):
                captured(jnp.ones(2))
    ours = [record for record in caplog.records if record.name == "tracegraph"]
    assert [record.levelno for record in ours] == [logging.WARNING]
    lines = ours[0].getMessage().splitlines()
    where = name_line(test_recaptures_are_logged_when_asked_for).partition(":")[0]
    assert lines[0].startswith(f"capturing `pick` anew: capture 3 after 2 calls, at {where}:")
    assert lines[1:] == ["  x: f32[2] after f32[1]"]


def test_the_first_capture_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("TRACEGRAPH_EXPLAIN_RECAPTURES", "1")
    with caplog.at_level(logging.WARNING, logger="tracegraph"):
        capture()(X)
    assert caplog.records == []


def test_a_wrong_setting_is_refused_before_anything_is_captured(monkeypatch: pytest.MonkeyPatch):
    captured = capture()
    monkeypatch.setenv("TRACEGRAPH_EXPLAIN_RECAPTURES", "yes")
    with pytest.raises(tg.ConfigError, match="TRACEGRAPH_EXPLAIN_RECAPTURES has the value 'yes'"):
        captured(X)
    assert captured.cache_info().currsize == 0
    monkeypatch.delenv("TRACEGRAPH_EXPLAIN_RECAPTURES")
    assert captured(X).shape == (2, 3)


def test_a_process_that_asks_for_it_prints_each_recapture():
    program = "import jax.numpy as jnp, tracegraph as tg\nf = tg.capture(jnp.sin, name='f')\n"
    program += "for size in (1, 2):\n    f(jnp.ones(size))\n"
    done = run_copy(["-c", program], variables={"TRACEGRAPH_EXPLAIN_RECAPTURES": "1"})
    assert done.returncode == 0
    wanted = "capturing `f` anew: capture 2 after 1 call, at <string>:4 in <module>\n"
    assert done.stderr == f"{wanted}  x: f32[2] after f32[1]\n"


def test_many_captures_warn_once():
    captured = capture()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in range(1, MANY_CAPTURES):
            captured(jnp.ones(size))
            captured(jnp.ones(size))
        assert caught == []
        line = sys._getframe().f_lineno + 2
        for size in range(20, 30):
            captured(jnp.ones(size))
    (warning,) = caught
    assert warning.category is tg.RecaptureWarning
    assert (warning.filename, warning.lineno) == (__file__, line)
    what, where, why, fix = str(warning.message).splitlines()
    assert what == "`pick` was captured 8 times within 15 calls"
    assert where.startswith("  where: tests/tracegraph/reports/test_recaptures.py:")
    assert where.endswith(f":{line} in test_many_captures_warn_once, x: f32[20] after f32[7]")
    assert why.startswith("  why:   each capture traces and compiles the function")
    assert fix.startswith(f"  fix:   {FIXES['shape']}")


def test_a_warning_that_is_an_error_loses_nothing():
    captured = capture()
    for size in range(1, MANY_CAPTURES):
        captured(jnp.ones(size))
    with pytest.raises(tg.RecaptureWarning):
        captured(jnp.ones(MANY_CAPTURES))
    assert captured.cache_info().captures == MANY_CAPTURES
    assert captured(jnp.ones(MANY_CAPTURES)).shape == (MANY_CAPTURES,)
    assert captured.cache_info().captures == MANY_CAPTURES


@pytest.mark.parametrize(("step", "is_often"), [(14, True), (15, False)])
def test_captures_that_are_far_apart_warn_of_nothing(step: int, is_often: bool):
    captured = capture()
    captured(X)
    recapture = _make_recapture(captured)
    log = RecaptureLog("f")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(MANY_CAPTURES * 3):
            log.add(recapture, number * step)
    assert len(caught) == is_often


def test_captures_after_a_reset_are_counted_anew():
    log = RecaptureLog("f")
    captured = capture()
    captured(X)
    recapture = _make_recapture(captured)
    for number in range(MANY_CAPTURES * 3):
        log.add(recapture, number)
        if number % (MANY_CAPTURES - 1) == MANY_CAPTURES - 2:
            log.forget()


def _make_recapture(captured: Any) -> Any:
    captured(jnp.ones(7))
    recapture = captured._recaptures.latest
    assert recapture is not None
    return recapture


def test_a_record_keeps_no_value_alive():
    class Value:
        pass

    value, array = Value(), jnp.ones(5)
    captured = tg.capture(lambda x, value: x * 2, static_argnums=1, verify=False)
    captured(X, None)
    captured(array, value)
    watched = weakref.ref(value)
    report = captured.explain(array, value)
    captured.reset()
    assert "lue object at 0x" in report.parts["signature"]
    del value
    gc.collect()
    assert watched() is None


def test_a_value_that_cannot_be_printed_stops_no_capture():
    class Silent:
        def __repr__(self) -> str:
            raise ValueError("nothing to say")

    captured = tg.capture(lambda x, value: x * 2, static_argnums=1, verify=False)
    captured(X, Silent())
    value = Silent()
    assert captured(X, value).shape == (2, 3)
    assert "static argument value: <Silent instance at 0x" in captured.explain(X, value)


def test_every_setting_has_a_name():
    assert len(list_setting_names()) == len(read_settings())


def test_static_leaves_are_named():
    captured = tg.capture(lambda d: d["x"] * 2, verify=False)
    captured({"x": X, "name": "relu"})
    captured({"x": X, "name": "gelu"})
    report = captured.explain({"x": X, "name": "gelu"})
    assert "  static leaf d['name']: 'gelu' after 'relu'\n" in report
    captured({"x": X})
    assert "  static leaf d['name']: nothing after 'gelu'\n" in captured.explain({"x": X})


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("tree", jax.tree.structure((([0],), {}))),
        ("leaves", (LeafType((2,), np.dtype("f4"), False),)),
        ("statics", ((1, 2),)),
        ("static_kinds", (bool,)),
        ("positions", (2,)),
        ("settings", ((), 1)),
    ],
)
def test_no_difference_stays_without_a_reason(field: str, other: Any):
    def function(x: Any, kind: Any, y: Any) -> None:
        """Only its parameters are looked at."""

    options = tg.capture(function, static_argnums=1)._options
    arguments = (jax.ShapeDtypeStruct((3,), jnp.float32), 1)
    function.__signature__ = inspect.signature(lambda *args: None)  # pyright: ignore
    prepared = prepare_call(function, options, arguments, {}, device=None, has_values=False)
    changed = dataclasses.replace(prepared.signature, **{field: other})
    assert len(find_differences(prepared, prepared.names, changed)) == 1
    assert find_differences(prepared, prepared.names, prepared.signature) == []


def test_every_field_of_a_signature_is_tried_above():
    fields = {field.name for field in dataclasses.fields(Signature)}
    assert fields == {"tree", "leaves", "statics", "static_kinds", "positions", "settings"}


def test_the_examples():
    assert doctest.testmod(differences).failed == 0
