"""Results passed to graphs again on a CudaDevice: which calls the driver gets, in what order.

The device works on host memory, at once or as late as is allowed. What such calls compute, on the
host device too, is in `calls/test_feedback.py`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes import regions_as_kernels
from tests.fakes.cuda_on_host import CudaOnHost, make_device
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.graphed_function import GraphedFunction
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.cuda import buffer
from tracegraph.runtime.cuda.memory import jax_arrays
from tracegraph.runtime.cuda.results import ResultPort
from tracegraph.runtime.errors import CaptureError, CudaError

X = np.arange(4, dtype=np.float32)


@pytest.fixture(params=["at once", "late"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    make = functools.partial(make_device, is_deferred=request.param == "late")
    monkeypatch.setattr(regions_as_kernels, "make_device", make)
    # That of host memory.
    monkeypatch.setattr(buffer, "ALIGNMENT", 64)
    return capture_for_gpu(monkeypatch)


@pytest.fixture
def stay_fast(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns what makes every call fail that leaves the fast path from then on."""

    def fail(*arguments: Any) -> Any:
        raise AssertionError("a call left the fast path")

    def stay() -> None:
        monkeypatch.setattr(GraphedFunction, "_call_generally", fail)
        monkeypatch.setattr(CapturedGraph, "_load", fail)

    return stay


def capture(function: Callable[..., Any], **options: Any) -> Any:
    # Verification compares with XLA, which does its work on the host at once.
    return tg.capture(function, verify=False, **options)


class Work:
    """Counts the calls of the driver, from its creation on."""

    NAMES = ("send", "launch", "copy_async", "synchronize_stream")

    def __init__(self, device: CudaOnHost) -> None:
        self._count_calls = device.driver.count_calls
        self._before = [self._count_calls(name) for name in self.NAMES]

    def read(self) -> dict[str, int]:
        after = [self._count_calls(name) for name in self.NAMES]
        counts = [now - before for now, before in zip(after, self._before, strict=True)]
        return {name: count for name, count in zip(self.NAMES, counts, strict=True) if count}


def advance(x: Any) -> Any:
    return x * 0.5 + 1


def compute(x: Any, steps: int) -> Any:
    for _ in range(steps):
        x = np.float32(0.5) * x + np.float32(1)
    return x


@pytest.mark.parametrize("is_held", [False, True])
def test_a_loop_over_its_own_result_copies_nothing(
    device: CudaOnHost, is_held: bool, stay_fast: Callable[[], None]
) -> None:
    step, kept = capture(advance), []
    x = step(step(X))
    stay_fast()
    work = Work(device)
    for _ in range(50):
        x = step(x)
        kept += [x] * is_held
    # One node reads the last result and writes the next one elsewhere.
    assert work.read() == {"send": 100, "launch": 50}
    np.testing.assert_array_equal(x, compute(X, 52))
    for index, result in enumerate(kept):
        np.testing.assert_array_equal(result, compute(X, 3 + index))


def test_a_loop_alternates_between_two_pieces_of_memory(device: CudaOnHost) -> None:
    step = capture(advance)
    x, addresses = step(X), []
    for _ in range(12):
        x = step(x)
        addresses.append(x.data_ptr())
    assert len(set(addresses)) == 2
    assert addresses[:2] * 6 == addresses


@pytest.mark.parametrize("is_held", [False, True])
def test_two_graphs_feed_each_other(
    device: CudaOnHost, is_held: bool, stay_fast: Callable[[], None]
) -> None:
    double, increment, kept = capture(lambda x: x * 2), capture(lambda x: x + 1), []
    x = increment(double(increment(double(X))))
    stay_fast()
    work, wanted = Work(device), ((X * 2 + 1) * 2 + 1)
    for _ in range(20):
        x = increment(double(x))
        wanted = wanted * 2 + 1
        kept += [(x, wanted)] * is_held
    # What is dropped is written again at once, so that half of the nodes stay as they are.
    counts = work.read()
    assert counts.pop("send") <= 41
    assert counts == {"launch": 40}
    for result, value in [*kept, (x, wanted)]:
        np.testing.assert_array_equal(result, value)


def test_a_result_that_was_read_is_not_copied_either(device: CudaOnHost) -> None:
    step = capture(advance)
    x, wanted = step(X), compute(X, 1)
    step(x)
    work = Work(device)
    for _ in range(10):
        np.testing.assert_array_equal(x, wanted)
        x, wanted = step(x), compute(wanted, 1)
    # Those of the reads.
    assert work.read()["copy_async"] == 10
    np.testing.assert_array_equal(x, wanted)


def test_results_in_trees_and_more_than_once(device: CudaOnHost) -> None:
    mix = capture(lambda tree, y: {"a": tree["a"] + y, "b": [tree["b"][0] * 0.5]})
    tree, wanted = {"a": X, "b": [X]}, {"a": X, "b": X}
    y = capture(advance)(X)
    tree = mix(tree, y)
    tree = mix(tree, tree["a"])
    wanted = {"a": X + compute(X, 1), "b": X / 2}
    wanted = {"a": wanted["a"] * 2, "b": wanted["b"] / 2}
    work = Work(device)
    for _ in range(10):
        tree = mix(tree, tree["a"])
        wanted = {"a": wanted["a"] * 2, "b": wanted["b"] / 2}
    assert "copy_async" not in work.read()
    np.testing.assert_array_equal(tree["a"], wanted["a"])
    np.testing.assert_array_equal(tree["b"][0], wanted["b"])


def test_the_same_result_as_every_argument(device: CudaOnHost) -> None:
    add = capture(lambda x, y: x + y)
    x = add(X, X)
    for _ in range(5):
        x = add(x, x)
    np.testing.assert_array_equal(x, X * 2**6)


def test_typed_keys_come_back(device: CudaOnHost) -> None:
    draw = capture(lambda key: (jax.random.split(key, 1)[0], jax.random.uniform(key)))
    # Kept: memory that work waits for is freed in that order on a GPU, here at once.
    key = wanted = kept = jax.random.key(3)
    for _ in range(5):
        key, value = draw(key)
        wanted, expected = jax.random.split(wanted, 1)[0], jax.random.uniform(wanted)
        assert float(value) == float(expected)
    work = Work(device)
    for _ in range(5):
        key, _ = draw(key)
    assert "copy_async" not in work.read()
    assert key.shape == kept.shape
    # Key data is no key, though the two are the same in memory.
    data = capture(jax.random.key_data)(key)
    raw, _ = draw(data)
    assert draw.cache_info().captures == 2
    assert (raw.dtype, key.dtype) == (np.uint32, wanted.dtype)


def test_an_input_that_cannot_be_rebound_is_copied_in_one_step(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch, stay_fast: Callable[[], None]
) -> None:
    step = capture(advance)
    x = step(step(X))
    # As on memory that is misaligned.
    monkeypatch.setattr(buffer, "ALIGNMENT", 1 << 60)
    stay_fast()
    work = Work(device)
    for _ in range(10):
        x = step(x)
    assert work.read()["copy_async"] == 10
    np.testing.assert_array_equal(x, compute(X, 12))


def test_a_donated_result_is_consumed(device: CudaOnHost) -> None:
    update = capture(lambda state, x: (state + x, state.sum()), donate_argnums=0)
    state = first = capture(advance)(X)
    for _ in range(3):
        state, _ = update(state, X)
    assert first.is_deleted()
    np.testing.assert_array_equal(state, compute(X, 1) + 3 * X)


def test_a_deleted_result_is_refused_and_the_graph_goes_on(device: CudaOnHost) -> None:
    step = capture(advance)
    x = step(step(X))
    unread, read = step(x), step(x)
    read.jax().delete()
    unread.delete()
    for gone in (unread, read):
        with pytest.raises((CaptureError, RuntimeError), match="deleted"):
            step(gone)
    np.testing.assert_array_equal(step(x), compute(X, 3))


def test_a_failed_launch_leaves_the_value_as_it_was(device: CudaOnHost) -> None:
    step = capture(advance)
    x = step(step(X))
    for name in ("send", "launch"):
        device.driver.fail_on = name
        with pytest.raises(CudaError, match=name):
            step(x)
        np.testing.assert_array_equal(step(x), compute(X, 3))
    np.testing.assert_array_equal(x, compute(X, 2))


def test_no_memory_is_asked_for_in_a_loop(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = capture(advance)
    x = step(step(X))

    def fail(*arguments: Any) -> Any:
        raise AssertionError("memory was allocated")

    monkeypatch.setattr(ResultPort, "allocate", fail)
    monkeypatch.setattr(jax_arrays, "_make_allocator", fail)
    for _ in range(20):
        x = step(x)
    monkeypatch.undo()
    assert x.shape == (4,)


def test_loops_in_several_threads(device: CudaOnHost) -> None:
    step, found = capture(advance), {}
    step(step(X))

    def work(number: int) -> None:
        x = step(np.float32(number) + X)
        for _ in range(30):
            x = step(x)
        found[number] = np.asarray(x)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2, 3]
    for number, value in found.items():
        np.testing.assert_array_equal(value, compute(np.float32(number) + X, 31))


def test_key_data_is_rebound_too(device: CudaOnHost, stay_fast: Callable[[], None]) -> None:
    draw = capture(lambda key, x: x + jax.random.uniform(key, (4,)))
    keys = list(jax.random.split(jax.random.key(5), 6))
    x = draw(keys[0], draw(keys[0], X))
    stay_fast()
    work = Work(device)
    for key in keys[1:]:
        x = draw(key, x)
    assert "copy_async" not in work.read()
    total = sum(np.asarray(jax.random.uniform(key, (4,))) for key in keys[:1] + keys)
    np.testing.assert_allclose(x, X + total, rtol=1e-6)


def test_results_of_jax_and_of_graphs_in_turn(device: CudaOnHost) -> None:
    step, x, wanted, kept = capture(advance), X, X, []
    for index in range(12):
        # Kept, see above.
        kept.append(x)
        x = step(x) if index % 3 else jnp.asarray(np.asarray(x)) * 0.5 + 1
        wanted = compute(wanted, 1)
    np.testing.assert_array_equal(x, wanted)
