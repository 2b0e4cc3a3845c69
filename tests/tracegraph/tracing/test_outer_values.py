"""What a function reads from around it, and what has changed since."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.tracing.outer_values import MAX_FUNCTIONS, find_stale, read_outer_values

RATE: Any = 0.1
TREE: Any = {"w": jnp.ones(3), "name": "linear"}
TABLE: Any = np.arange(4.0)
OBJECT: Any = object()
NUMBERS: Any = iter([1, 2])


def scale(x: Any) -> Any:
    return x * RATE


def use_all(x: Any) -> Any:
    assert OBJECT is not NUMBERS
    return [scale(x) + each for each in TREE["w"]], TABLE, jnp.sin


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RATE", "TREE", "TABLE"):
        monkeypatch.setitem(globals(), name, globals()[name])
    return monkeypatch


def test_globals_of_a_function_and_of_those_that_it_calls():
    found = read_outer_values(use_all)
    place = f"of module `{__name__}`"
    assert set(found) == {(place, "RATE"), (place, "TREE"), (place, "TABLE")}
    assert [str(mark) for mark in found[place, "TREE"]] == ["'linear'", "float32[3]"]
    assert find_stale(found, use_all) == []


def test_what_changed_is_named(restored: pytest.MonkeyPatch):
    found = read_outer_values(use_all)
    for name, value in (("RATE", 0.2), ("TREE", {"w": jnp.ones(3), "name": "linear"})):
        restored.setitem(globals(), name, value)
    place = f"of module `{__name__}`"
    assert set(find_stale(found, use_all)) == {
        f"`RATE` {place} was 0.1, and is 0.2",
        f"`TREE` {place} was another 'linear', float32[3]",
    }


def test_an_array_of_numpy_that_was_written(restored: pytest.MonkeyPatch):
    restored.setitem(globals(), "TABLE", np.arange(4.0))
    found = read_outer_values(use_all)
    TABLE[1] = 7
    assert find_stale(found, use_all) == [f"`TABLE` of module `{__name__}` was another float64[4]"]
    restored.delitem(globals(), "TABLE")
    assert find_stale(found, use_all) == [
        f"`TABLE` of module `{__name__}` was float64[4], and is gone"
    ]


def test_enclosing_functions_partials_and_wrappers():
    rate = 0.5
    later: Any

    @functools.wraps(scale)
    def wrapped(x: Any) -> Any:
        return x * rate, later

    for function in (wrapped, functools.partial(wrapped), jax.jit(wrapped)):
        found = read_outer_values(function)
        assert (f"around `{wrapped.__qualname__}`", "rate") in found
        rate = rate + 1
        assert len(find_stale(found, function)) == 1
    later = 3


def test_functions_that_name_each_other_end():
    functions: list[Any] = [lambda x: x]
    for _ in range(2 * MAX_FUNCTIONS):
        functions.append((lambda inner: lambda x: inner(x))(functions[-1]))
    assert read_outer_values(functions[-1]) == {}


def test_nothing_is_kept_alive():
    held = [jnp.arange(3.0)]

    def add(x: Any) -> Any:
        return x + held[0]

    found = read_outer_values(add)
    kept = weakref.ref(held.pop())
    gc.collect()
    assert kept() is None
    (line,) = find_stale(found, add)
    assert line == f"`held` around `{add.__qualname__}` was float32[3], and is an object"


def test_explain_says_what_is_stale_and_the_checking_mode_refuses(
    restored: pytest.MonkeyPatch,
):
    step = tg.capture(lambda x: scale(x), name="step")
    x = jnp.ones(3)
    step(x)
    assert "stale" not in step.explain(x)
    restored.setitem(globals(), "RATE", 0.25)
    line = f"stale: `RATE` of module `{__name__}` was 0.1, and is 0.25"
    assert line in step.explain(x).splitlines()
    np.testing.assert_allclose(step(x), 0.1)
    step.reset()
    np.testing.assert_allclose(step(x), 0.25)

    restored.setenv("TRACEGRAPH_CHECK_REPLAY", "1")
    checked = tg.capture(lambda x: scale(x), name="checked")
    np.testing.assert_allclose(checked(x), 0.25)
    np.testing.assert_allclose(checked(x), 0.25)
    restored.setitem(globals(), "RATE", 0.5)
    with pytest.raises(tg.ReplayError, match=r"was 0\.25, and is 0\.5") as caught:
        checked(x)
    assert caught.value.anchor == "stale-value"
    restored.setitem(globals(), "RATE", 0.25)
    np.testing.assert_allclose(checked(x), 0.25)
    restored.setitem(globals(), "RATE", 0.5)
    checked.reset()
    np.testing.assert_allclose(checked(x), 0.5)
