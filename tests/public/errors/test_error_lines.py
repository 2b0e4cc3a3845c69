"""The `where` line of an error names the user's own line, also when a library made the op."""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.oracles.error_lines import line

optax = pytest.importorskip("optax")
FILE = "tests/public/errors/test_error_lines.py"
X = jnp.arange(4.0)


@functools.cache
def make_optimizer() -> Any:
    return optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=3)


def read_where(captured, *args):
    with pytest.raises(tg.CaptureError) as caught:
        captured(*args)
    return caught.value.where


def test_the_user_s_line_then_the_library_s():
    optimizer = make_optimizer()

    def step(state, grads):
        return optimizer.update(grads, state)

    at = line() - 2
    captured = tg.capture(step, control_flow="refuse")
    where = read_where(captured, optimizer.init(X), X)
    assert re.match(
        re.escape(f"{FILE}:{at} in step (in optax/") + r"[\w/]+\.py:\d+ `\w+`\), .* = cond ", where
    )


def test_a_library_s_function_that_is_captured_itself():
    optimizer = make_optimizer()
    state = optimizer.init(X)
    captured = tg.capture(
        lambda grads, state: optimizer.update(grads, state), name="update", control_flow="refuse"
    )
    at = line() - 2
    assert read_where(captured, X, state).startswith(f"{FILE}:{at} in <lambda> (in optax/")
    update: Any = tg.capture(optimizer.update, control_flow="refuse")
    with pytest.raises(tg.CaptureError) as caught:
        update(X, state)
    at = line() - 1
    own = f"{FILE}:{at} in test_a_library_s_function_that_is_captured_itself"
    assert caught.value.where.startswith(f"{own} (in optax/")


def test_a_library_that_reads_a_value_while_it_is_traced(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "reading"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def read(x):\n    return float(x)\n")
    monkeypatch.syspath_prepend(folder.parent)
    reading = importlib.import_module("reading")

    def step(x):
        return x * reading.read(x)

    where = read_where(tg.capture(step), X[0])
    at = step.__code__.co_firstlineno + 1
    assert where == f"{FILE}:{at} in step (in reading/__init__.py:2 `read`)"
    where = read_where(tg.capture(reading.read), X[0])
    assert re.fullmatch(rf"{FILE}:\d+ in read_where \(in reading/__init__.py:2 `read`\)", where)


def test_code_of_a_notebook():
    text = "def step(x):\n    return jax.pure_callback(abs, x, x)\n"
    space: dict = {"jax": jax, "__name__": "__main__"}
    exec(compile(text, "<ipython-input-1-0a>", "exec"), space)
    where = read_where(tg.capture(space["step"]), X)
    assert where.startswith("<ipython-input-1-0a>:2 in step, ")


def test_the_printed_graph_keeps_short_lines():
    optimizer = make_optimizer()
    captured = tg.capture(lambda g, s: optimizer.update(g, s), name="update")
    text = str(captured.trace(X, optimizer.init(X)))
    assert re.search(r"= cond .*  # \w+\.py:\d+ in \w+$", text, re.MULTILINE)


def test_an_op_of_many_results_is_counted():
    def step(x, flags):
        many = [x + number for number in range(27)]
        return jax.lax.cond(flags, lambda *v: v, lambda *v: tuple(each * 2 for each in v), *many)

    where = read_where(tg.capture(step, control_flow="refuse"), X, True)
    assert re.search(r"in step, 27 results, first: %\d+ = cond %.* and 22 more$", where)
