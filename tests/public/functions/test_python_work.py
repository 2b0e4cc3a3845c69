"""What Python computes from clocks, random numbers and its own state is found, where it matters."""

from __future__ import annotations

import datetime
import pickle
import random
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.error_lines import line, match

X = jnp.arange(3.0)
FILE = "tests/public/functions/test_python_work.py"


def multiply(x):
    return x * jnp.float32(time.time())


def round_down(x):
    return x * int(time.time())


def use_second(x):
    return x + datetime.datetime.now().second


def choose_by_hour(x):
    return x if datetime.datetime.now().hour < 12 else -x


def choose_by_parity(x):
    return x if int(time.time()) % 2 else -x


def flip_coin(x):
    return x if random.random() < 0.5 else -x


def flip_numpy_coin(x):
    return x if np.random.randint(2) else -x


def seed_by_time(x):
    return x + np.random.RandomState(int(time.time())).rand()


LIMIT = time.time() + 86400.0


def read_or_raise(x):
    if time.time() > LIMIT:
        raise RuntimeError("too late")
    return x + 1


@pytest.mark.parametrize(
    ("function", "source"),
    [
        (multiply, "time.time"),
        (round_down, "time.time"),
        (use_second, "datetime.datetime.now"),
        (choose_by_hour, "datetime.datetime.now"),
        (choose_by_parity, "time.time"),
        (flip_coin, "random.random"),
        (flip_numpy_coin, "np.random.randint"),
        (seed_by_time, "time.time"),
        (read_or_raise, "time.time"),
    ],
)
def test_frozen_python_work_is_named_with_its_source_and_line(function: Any, source):
    captured: Any = tg.capture(function)
    with pytest.raises(tg.CaptureError) as caught:
        captured(X)
    at = function.__code__.co_firstlineno + 1
    assert caught.value.anchor == "python-work"
    assert f"`{source}` gave " in caught.value.why
    assert f" at {FILE}:{at} in {function.__name__}" in caught.value.why
    assert caught.value.where.startswith((f"{FILE}:{at}", f"{FILE}:{at + 1}"))
    assert captured.cache_info().currsize == 0


def test_a_duration_that_is_printed_is_no_error_and_appears_once(capsys):
    def step(x):
        start = time.time()
        y = jnp.sin(x)
        print("traced in", round(time.time() - start), "s")
        return y

    captured = tg.capture(step)
    assert np.array_equal(captured(X), jnp.sin(X))
    assert capsys.readouterr().out == "traced in 0 s\n"


def test_numbers_of_a_seed_are_constants():
    def step(x):
        np.random.seed(0)
        return x * np.random.rand() + np.random.default_rng(3).random()

    wanted = step(X)
    state = pickle.dumps(np.random.get_state())
    assert np.allclose(tg.capture(step)(X), wanted)
    assert pickle.dumps(np.random.get_state()) == state


def test_a_counter_is_the_user_s_error():
    calls = 0

    def step(x):
        nonlocal calls
        calls += 1
        return x * calls

    at = line() - 2
    with pytest.raises(tg.CaptureError) as caught:
        tg.capture(step)(X)
    match(
        caught.value,
        "`step` does Python work that changes from one trace to the next",
        f"{FILE}:{at} in step, %1 = mul %0, 1.0:f32[]",
        "1.0 in the first trace, 2.0 in the second; a CUDA graph would freeze one of them (a count",
        "pass the value as an argument",
    )


def test_a_function_that_reads_no_clock_is_traced_twice():
    traces = []

    def step(x):
        traces.append(1)
        return x + 1

    tg.capture(step)(X)
    assert len(traces) == 2


def test_the_true_clock_is_back_after_an_error():
    with pytest.raises(tg.CaptureError):
        tg.capture(round_down)(X)
    assert abs(time.time() - datetime.datetime.now().timestamp()) < 600
    assert type(datetime.datetime.now()) is datetime.datetime
    assert type(time).__name__ == "module"
