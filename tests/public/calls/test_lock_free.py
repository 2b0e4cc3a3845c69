"""Graphs of one call that shares nothing between calls: no lock, no buffers, the same promises."""

import threading
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same

X = jnp.arange(4.0)


def capture_twice(function: Any, *args: Any, **options: Any) -> tuple[tg.GraphedFunction, bool]:
    """Captures, and calls once more so that the types of the arguments are known."""
    captured: tg.GraphedFunction = cast(Any, tg.capture)(function, **options)
    for _ in range(2):
        captured(*args)
    assert captured._latest is not None
    return captured, captured._latest.lock_free_call is not None


def test_one_array_per_argument_and_one_result_is_lock_free():
    captured, is_lock_free = capture_twice(lambda x, y: x * y, X, X)
    assert is_lock_free
    assert_same(captured(X, X + 1), X * (X + 1))
    assert captured.cache_info() == (2, 1, 64, 1)
    assert captured.cache_info() == (2, 1, 64, 1)


def test_keyword_arguments_are_put_in_order():
    captured = tg.capture(lambda x, y, z: x * y - z)
    for _ in range(3):
        assert_same(captured(X, z=X + 1, y=X + 2), X * (X + 2) - (X + 1))
    assert captured._latest is not None
    assert captured._latest.lock_free_call is not None
    assert captured.cache_info() == (2, 1, 64, 1)
    assert_same(captured(X, X + 2, X + 1), X * (X + 2) - (X + 1))
    assert captured.cache_info() == (3, 1, 64, 1)


@pytest.mark.parametrize(
    ("function", "args", "options"),
    [
        (lambda x: x["a"] * 2, ({"a": X},), {}),
        (lambda x: (x * 2, x), (X,), {}),
        (lambda x: x * X, (X,), {}),
        (lambda x: x, (X,), {}),
        (lambda x: x * 2, (X,), {"outputs": "static"}),
        (lambda x, y: y - x, (X, X), {}),
        (lambda x, n: x * n, (X, 2), {"static_argnums": 1}),
        (jax.random.split, (jax.random.key(0),), {}),
    ],
)
def test_what_is_not_lock_free_gives_the_same(function, args, options):
    captured, _ = capture_twice(function, *args, **options)
    if options.get("outputs") != "static":
        assert_same(captured(*args), function(*args))
    assert captured.cache_info().captures == 1


def test_a_donated_argument_is_still_consumed():
    captured = tg.capture(lambda x, y: y.sum() + 1, donate_argnums=0)
    for _ in range(3):
        given = jnp.ones(3)
        assert float(captured(given, X)) == 7.0
        assert given.is_deleted()


def test_wrong_arguments_are_refused_and_the_next_call_works():
    captured, is_lock_free = capture_twice(lambda x: x * 2, X)
    assert is_lock_free
    gone = X + 1
    gone.delete()
    with pytest.raises(tg.CaptureError, match="argument 0 `x` has been deleted"):
        captured(gone)
    assert_same(captured(np.ones(4, np.float32)), jnp.ones(4) * 2)
    assert_same(captured(X), X * 2)


def test_threads_get_their_own_results_and_every_call_counts():
    captured, is_lock_free = capture_twice(lambda x: x * 2, X)
    assert is_lock_free
    before, wrong = captured.cache_info().hits, []

    def call(number: int) -> None:
        x = X + number
        wrong.extend(1 for _ in range(200) if not np.array_equal(captured(x), (X + number) * 2))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert captured.cache_info().hits == before + 800
