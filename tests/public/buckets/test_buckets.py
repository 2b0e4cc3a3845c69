"""`tg.capture(..., buckets=)`: padding, replay, cut results; counts, refusals, memory."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg


def check_lines(error):
    lines = str(error).split("\n")
    assert [each[:9] for each in lines[1:4]] == ["  where: ", "  why:   ", "  fix:   "]


def capture(function: Any, **options: Any) -> Any:
    return tg.capture(function, **options)


def make_rows(size: int, columns: int = 3) -> jax.Array:
    return jnp.arange(1.0, 1.0 + size * columns).reshape(size, columns) / 7


def step(x, w):
    hidden = jnp.tanh(x["a"] @ w)
    return {"hidden": hidden, "sum": hidden.sum(1) + x["b"], "weights": w * 2}


@pytest.fixture(scope="module")
def bucketed():
    return tg.capture(step, buckets={"x": {0: (1, 2, 4, 8)}})


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 4])
def test_results_are_those_of_the_function(bucketed, size):
    x = {"a": make_rows(size), "b": jnp.arange(size)}
    w = jnp.ones((3, 2))
    found, expected = bucketed(x, w), step(x, w)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_result_keeps_its_value(bucketed):
    w = jnp.ones((3, 2))
    first = bucketed({"a": make_rows(3), "b": jnp.zeros(3)}, w)
    before = jax.tree.map(np.array, first)
    bucketed({"a": make_rows(7), "b": jnp.ones(7)}, w * 5)
    bucketed({"a": make_rows(4), "b": jnp.ones(4)}, w * 3)
    jax.tree.map(np.testing.assert_array_equal, first, before)


def test_hits_are_counted_per_bucket():
    double = capture(lambda x: x * 2, buckets={0: {0: (2, 4)}})
    assert [each.pool_bytes for each in double.bucket_info()] == [None, None]
    for size in (1, 2, 2, 3):
        double(make_rows(size))
    small, large = double.bucket_info()
    assert (small.bucket, small.hits, small.full) == (2, 3, 2)
    assert (large.bucket, large.hits, large.full) == (4, 1, 0)
    assert small.pool_bytes
    assert large.pool_bytes
    assert double.cache_info().captures == 2


def test_several_sizes_are_padded_each_by_itself():
    @functools.partial(
        capture, buckets={"x": {0: (2, 4), 1: {"columns": (3, 6)}}, "y": {0: {"columns": (3, 6)}}}
    )
    def scale(x, y):
        row = jnp.arange(x.shape[1]) < tg.bucket_size("y")
        return jnp.where(row, x * y, 0).sum(1), tg.bucket_size("x", 0), tg.bucket_size("columns")

    x, y = make_rows(3, 5), jnp.arange(5.0)
    total, rows, columns = scale(x, y)
    np.testing.assert_allclose(total, (x * y).sum(1), rtol=1e-6)
    assert (rows, columns) == (3, 5)
    assert rows.dtype == jnp.int32
    assert [each.hits for each in scale.bucket_info()] == [0, 0, 0, 1]


def test_a_key_of_a_generator_is_drawn_as_by_the_function():
    generator = tg.random.Generator().manual_seed(3)

    def add_noise(x):
        return x + jax.random.normal(generator.next_key(), (3,))

    noisy = capture(add_noise, buckets={"x": {0: (4,)}})
    found = [noisy(jnp.zeros((2, 3))), noisy(jnp.zeros((3, 3)))]
    generator.manual_seed(3)
    expected = [add_noise(jnp.zeros((2, 3))), add_noise(jnp.zeros((3, 3)))]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_donated_state_stays_and_moves_between_buckets():
    @tg.capture(buckets={"x": {0: (2, 4)}}, donate_argnames="state")
    def count(state, x):
        return {"rows": state["rows"] + tg.bucket_size()}, x + 1

    state = {"rows": jnp.int32(0)}
    for size in (1, 3, 2, 4, 3):
        state, after = count(state, make_rows(size))
        assert after.shape == (size, 3)
    assert state["rows"] == 13


def test_the_size_is_known_inside_of_other_programs():
    @tg.capture(buckets={"x": {0: (4, 8)}})
    def mean(x):
        mask = jnp.arange(x.shape[0]) < tg.bucket_size()
        return jnp.where(mask[:, None], x, 0).sum(0) / tg.bucket_size()

    x = make_rows(5)
    np.testing.assert_allclose(jax.jit(mean)(x), x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(mean(x), x.mean(0), rtol=1e-6)
    assert mean.eval_shape(x).shape == (3,)
    assert mean.lower(jax.ShapeDtypeStruct((5, 3), x.dtype)).pool_bytes > 0
    assert "`mean` is captured" in str(mean.explain(x))
    assert "graph mean" in str(mean.trace(x))


def test_copies_and_pickles_have_buckets_of_their_own(bucketed):
    x = {"a": make_rows(3), "b": jnp.zeros(3)}
    for each in (copy.copy(bucketed), pickle.loads(pickle.dumps(keep_rows))):
        assert isinstance(each, tg.BucketedFunction)
    assert copy.copy(bucketed)(x, jnp.ones((3, 2)))["sum"].shape == (3,)


@tg.capture(buckets={"x": {0: (4,)}})
def keep_rows(x):
    return x


def test_threads_get_their_own_results(bucketed):
    failures = []

    def call(size):
        x = {"a": jnp.full((size, 3), float(size)), "b": jnp.zeros(size)}
        for _ in range(5):
            found = bucketed(x, jnp.eye(3, 2))["hidden"]
            if found.shape != (size, 2) or not np.allclose(found, np.tanh(size)):
                failures.append(size)

    threads = [threading.Thread(target=call, args=(size,)) for size in (1, 3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class TestRefusals:
    def test_an_argument_larger_than_the_largest_bucket(self, bucketed):
        with pytest.raises(tg.CaptureError, match="smaller than its argument") as caught:
            bucketed({"a": make_rows(9), "b": jnp.zeros(9)}, jnp.ones((3, 2)))
        check_lines(caught.value)

    def test_an_empty_argument(self, bucketed):
        with pytest.raises(tg.CaptureError, match="nothing is computed"):
            bucketed({"a": make_rows(0), "b": jnp.zeros(0)}, jnp.ones((3, 2)))

    def test_arguments_of_one_size_that_differ(self, bucketed):
        with pytest.raises(tg.CaptureError, match="with the same buckets") as caught:
            bucketed({"a": make_rows(3), "b": jnp.zeros(2)}, jnp.ones((3, 2)))
        check_lines(caught.value)

    def test_a_leaf_without_the_axis(self, bucketed):
        with pytest.raises(tg.CaptureError, match=r"x\['b'\]"):
            bucketed({"a": make_rows(3), "b": jnp.float32(1)}, jnp.ones((3, 2)))

    def test_an_argument_that_is_left_out(self):
        with pytest.raises(tg.CaptureError, match="is not given"):
            tg.capture(lambda x=1: x, buckets={"x": {0: (2,)}})()

    @pytest.mark.parametrize("empty", [None, [], {"a": None}])
    def test_an_argument_without_an_array_has_no_size(self, empty):
        step = tg.capture(lambda x: 1.0, buckets={"x": {0: (2, 4)}})
        with pytest.raises(tg.CaptureError, match="axis 0 of `x` is missing") as caught:
            step(empty)
        assert len(str(caught.value).splitlines()) == 4

    def test_one_argument_of_a_size_may_be_left_out(self):
        step = tg.capture(
            lambda x, mask: x * 2 if mask is None else x * mask,
            buckets={"x": {0: (2, 4)}, "mask": {0: (2, 4)}},
        )
        np.testing.assert_array_equal(step(jnp.ones(3), None), np.full(3, 2.0))

    @pytest.mark.parametrize(
        "buckets",
        [
            {},
            {"y": {0: (1,)}},
            {"x": (1, 2)},
            {"x": {0: ()}},
            {"x": {0: (2, 1)}},
            {"x": {0: (0, 1)}},
            {"x": {-1: (1, 2)}},
            {"x": {0: (1.5,)}},
            {"x": {0: {"n": (1,)}, 1: {"n": (2,)}}},
            {"x": {0: (1, 2)}, 0: {0: (1, 2)}},
        ],
    )
    def test_buckets_that_are_none(self, buckets):
        with pytest.raises(tg.ConfigError) as caught:
            tg.capture(lambda x: x, buckets=buckets)
        check_lines(caught.value)

    @pytest.mark.parametrize(
        "option",
        [
            {"donate_argnums": 0},
            {"static_argnames": "x"},
            {"mode": "partial"},
            {"outputs": "static"},
        ],
    )
    def test_options_that_do_not_fit(self, option):
        with pytest.raises(tg.ConfigError, match="bucket"):
            tg.capture(lambda x: x, buckets={"x": {0: (1, 2)}}, **option)

    def test_too_many_buckets(self):
        with pytest.raises(tg.ConfigError, match="makes 65 graphs"):
            tg.capture(lambda x: x, buckets={"x": {0: range(1, 66)}})

    def test_bucket_size_outside(self):
        with pytest.raises(tg.CaptureError, match="no bucket") as caught:
            tg.bucket_size()
        check_lines(caught.value)

    def test_bucket_size_of_another_name(self):
        with pytest.raises(tg.CaptureError, match="does not name one size"):
            tg.capture(lambda x: x * tg.bucket_size("y"), buckets={"x": {0: (1, 2)}})(make_rows(2))

    def test_the_next_call_works(self):
        function = capture(lambda x: x.sum(0), buckets={"x": {0: (1, 4)}})
        for _ in range(2):
            with pytest.raises(tg.CaptureError, match="reduce_sum"):
                function(make_rows(3))
        np.testing.assert_array_equal(function(make_rows(1)), make_rows(1)[0])


def chain(x, w):
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return x


class TestMemory:
    W = jnp.eye(64)
    SIZES = tuple(range(4, 36, 4))

    @pytest.fixture
    def largest_bytes(self):
        alone = tg.capture(chain, name="alone")
        return alone.lower(jnp.ones((self.SIZES[-1], 64)), self.W).pool_bytes

    def test_all_sizes_take_the_memory_of_the_largest(self, largest_bytes):
        step = capture(chain, buckets={"x": {0: self.SIZES}}, verify=False)
        infos = step.warm_up(jax.ShapeDtypeStruct((1, 64), jnp.float32), self.W)
        assert [each.bucket for each in infos] == list(self.SIZES)
        assert all(each.hits == 0 for each in infos)
        assert infos[-1].pool_bytes <= largest_bytes + 1024
        assert step.pool_bytes <= 1.15 * infos[-1].pool_bytes + 512 * len(infos)
        assert step.pool_bytes <= 1.15 * largest_bytes
        found = step(jnp.ones((5, 64)), self.W)
        np.testing.assert_allclose(found, chain(jnp.ones((5, 64)), self.W), rtol=1e-6)
        assert step.cache_info().captures == len(self.SIZES)

    def test_sizes_that_come_smallest_first_end_in_the_same_memory(self, largest_bytes):
        step = capture(chain, buckets={"x": {0: (4, 16, 32)}}, verify=False)
        rows = [jnp.full((size, 64), size / 100) for size in (3, 15, 32, 3, 15)]
        for x in rows:
            np.testing.assert_allclose(step(x, self.W), chain(x, self.W), rtol=1e-6)
        assert step.pool_bytes <= 1.15 * largest_bytes
        assert step.cache_info().captures == 3

    def test_release_gives_memory_back_and_a_call_takes_it_again(self):
        step = capture(chain, buckets={"x": {0: (4, 8)}}, verify=False)
        x = jnp.full((3, 64), 0.5)
        first = step(x, self.W)
        before = np.array(first)
        step.release()
        assert step.pool_bytes == 0
        np.testing.assert_array_equal(first, before)
        np.testing.assert_array_equal(step(x, self.W), before)
        assert step.cache_info().captures == 1
        step.release()
        step.restore()
        assert step.pool_bytes > 0
        np.testing.assert_array_equal(step(x, self.W), before)
        assert step.cache_info()[:2] == (2, 1)
