"""Pinned arrays: what they hold, how long, and what a captured function makes of them."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import STREAM, CudaOnHost, kernel, make_cuda_replay, make_device
from tests.fakes.definitions import SIZE, make_definition, make_stage
from tests.fakes.memory_driver import MemoryDriver
from tracegraph.user_memory import pinned_memory
from tracegraph.user_memory.pinned_memory import (
    empty_host_cache,
    find_host_allocator,
    is_pinned,
    pin_memory,
    synchronize_copies,
)

DOUBLE = make_definition(make_stage(kernel("double", "x", "y")))
DTYPES = (
    *("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex128"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4),
)


@pytest.fixture
def driver(gpu: CudaOnHost) -> MemoryDriver:
    return gpu.driver


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    """A GPU whose copies wait for `finish`; pinned memory is its own."""
    device = make_device(monkeypatch, is_deferred=True)
    monkeypatch.setattr(pinned_memory, "find_device", lambda *, is_checking: device)
    return device


def count_active() -> int:
    find_host_allocator().poll()
    return find_host_allocator().statistics.active_requests.current


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_shape_dtype_and_values_stay(shape: tuple[int, ...], dtype: Any) -> None:
    source = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    pinned = pin_memory(source)
    assert type(pinned) is np.ndarray
    assert (pinned.shape, pinned.dtype) == (source.shape, source.dtype)
    assert pinned.tobytes() == source.tobytes()
    assert is_pinned(pinned)
    assert pinned.flags.writeable
    assert pinned.flags.c_contiguous


def test_jax_arrays_and_arrays_of_a_graph() -> None:
    captured = tg.capture(lambda s: s + 1, donate_argnums=0)
    for array in (jnp.arange(4, dtype=jnp.bfloat16), captured(jnp.arange(4.0))):
        pinned = pin_memory(array)
        assert is_pinned(pinned)
        assert not is_pinned(array)
        np.testing.assert_array_equal(pinned, np.asarray(array), strict=True)
        pinned[:] = 0
        assert float(array.sum()) != 0


def test_strided_and_read_only_arrays() -> None:
    source = np.arange(24.0).reshape(4, 6)[::2, ::-3].T
    source.flags.writeable = False
    pinned = pin_memory(source)
    np.testing.assert_array_equal(pinned, source)
    assert pinned.flags.writeable
    assert pinned.flags.c_contiguous


def test_trees_keep_what_is_no_array() -> None:
    tree = {"x": np.ones(2), "name": "n", "pair": (1.5, None, [np.float32(2), jnp.ones(1)])}
    pinned = pin_memory(tree)
    assert is_pinned(pinned["x"])
    assert pinned["name"] == "n"
    number, nothing, (scalar, array) = pinned["pair"]
    assert (number, nothing, scalar) == (1.5, None, 2)
    assert is_pinned(array)


def test_what_is_pinned_stays_itself() -> None:
    pinned = pin_memory(np.ones((4, 4)))
    assert pin_memory(pinned) is pinned
    for other in (pin_memory(pinned, non_blocking=True), pin_memory(pinned[:, 1:])):
        assert is_pinned(other)
        assert not np.shares_memory(other, pinned)


def test_views_are_pinned_and_copies_are_not() -> None:
    pinned = pin_memory(np.arange(16.0).reshape(4, 4))
    for view in (pinned[2:], pinned.T, pinned[::-1], pinned.reshape(-1), pinned.view("u8")):
        assert is_pinned(view)
    copies = (pinned.copy(), pinned + 1, copy.deepcopy(pinned), pickle.loads(pickle.dumps(pinned)))
    for other in copies:
        assert not is_pinned(other)
        assert other.shape == pinned.shape
    for stranger in (3.0, "x", None, np.ones(3), jnp.ones(3)):
        assert not is_pinned(stranger)


@pytest.mark.parametrize(
    "array",
    [
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.array([object()]),
        jax.random.key(0),
    ],
    ids=["mask", "objects", "key"],
)
def test_what_is_more_than_bytes_is_refused(array: Any) -> None:
    before = count_active()
    with pytest.raises(tg.TracegraphError, match="cannot be pinned") as raised:
        pin_memory({"x": array})
    assert raised.value.anchor == "pinned"
    assert count_active() == before


def test_memory_lives_as_long_as_a_view() -> None:
    before = count_active()
    pinned = pin_memory(np.arange(10_000.0))
    view = pinned[5000:5002]
    del pinned
    gc.collect()
    assert count_active() == before + 1
    filler = [pin_memory(np.zeros(10_000)) for _ in range(3)]
    assert view.tolist() == [5000.0, 5001.0]
    del view, filler
    assert count_active() == before


def test_memory_is_used_again() -> None:
    pinned = pin_memory(np.zeros(10_000))
    address = pinned.ctypes.data
    del pinned
    assert pin_memory(np.zeros(9_000)).ctypes.data == address


def test_memory_goes_back_when_the_cache_is_emptied() -> None:
    allocator = find_host_allocator()
    kept = pin_memory(np.ones(1 << 18))
    before = allocator.reserved_bytes
    dropped = pin_memory(np.ones(1 << 18))
    del dropped
    empty_host_cache()
    assert allocator.reserved_bytes <= before
    assert kept.all()


def test_in_cycles_and_in_the_middle_of_an_allocation() -> None:
    before = count_active()
    for _ in range(200):
        cycle: list[Any] = [pin_memory(np.ones(100))]
        cycle.append(cycle)
    gc.collect()
    assert count_active() <= before + 1


def test_a_captured_function_takes_it_as_any_other_array() -> None:
    captured = tg.capture(lambda x, y: x * 2 + y["b"])
    tree = pin_memory({"b": np.full(3, 10, np.float32)}, non_blocking=True)
    x = pin_memory(np.arange(3, dtype=np.float32))
    first = captured(x, tree)
    x[:] = 5
    second = captured(x, tree)
    synchronize_copies((x, tree))
    tree["b"][:] = 0
    assert first.tolist() == [10.0, 12.0, 14.0]
    assert second.tolist() == [20.0] * 3
    assert captured(x, tree).tolist() == [10.0] * 3


def test_jax_takes_it_as_any_other_array() -> None:
    pinned = pin_memory(np.arange(3, dtype=np.float32))
    assert jax.jit(lambda x: x + 1)(pinned).tolist() == [1.0, 2.0, 3.0]
    array = jnp.array(pinned)
    pinned[:] = 0
    assert array.tolist() == [0.0, 1.0, 2.0]
    assert jax.grad(lambda x: (x * x).sum())(pinned).tolist() == [0.0] * 3


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def test_on_a_gpu_the_caller_may_change_it_at_once(gpu: CudaOnHost) -> None:
    replay = make_cuda_replay(gpu, DOUBLE)
    pinned = pin_memory(floats(*range(SIZE)))
    replay.load([(0, pinned)])
    pinned[:] = -1
    replay.launch()
    assert np.asarray(replay.make_taker(0)()).tolist() == [2.0 * i for i in range(SIZE)]


def test_on_a_gpu_nothing_is_staged_with_the_promise(gpu: CudaOnHost, driver: MemoryDriver) -> None:
    replay = make_cuda_replay(gpu, DOUBLE)
    pinned = pin_memory(floats(*range(SIZE)), non_blocking=True)
    allocated = driver.count_calls("allocate_host")
    replay.load([(0, pinned)])
    assert driver.count_calls("allocate_host") == allocated
    synchronize_copies({"x": pinned, "other": 3})
    pinned[:] = -1
    replay.launch()
    assert np.asarray(replay.make_taker(0)()).tolist() == [2.0 * i for i in range(SIZE)]


def test_on_a_gpu_a_dropped_array_keeps_its_memory_until_the_copy_is_over(
    gpu: CudaOnHost, driver: MemoryDriver
) -> None:
    replay = make_cuda_replay(gpu, DOUBLE)
    pinned = pin_memory(floats(*range(SIZE)), non_blocking=True)
    address = pinned.ctypes.data
    replay.load([(0, pinned)])
    del pinned
    other = pin_memory(floats(*[-1] * SIZE))
    assert other.ctypes.data != address
    driver.finish(STREAM)
    assert pin_memory(floats(*[-1] * SIZE)).ctypes.data == address
    replay.launch()
    assert np.asarray(replay.make_taker(0)()).tolist() == [2.0 * i for i in range(SIZE)]


def test_on_a_gpu_the_finaliser_does_not_call_the_driver(
    gpu: CudaOnHost, driver: MemoryDriver
) -> None:
    pinned = pin_memory(floats(1), non_blocking=True)
    gpu.context.stage(pinned, np.zeros(1, np.float32).ctypes.data)
    count = len(driver.calls)
    del pinned
    assert len(driver.calls) == count


def test_the_finaliser_does_not_wait_for_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    allocator = find_host_allocator()
    monkeypatch.setattr(allocator, "free", waited.append)
    gc.collect()
    before = count_active()
    pinned = pin_memory(np.ones(3))
    with allocator._lock:
        del pinned
        gc.collect()
    assert count_active() == before
    assert not waited


def test_on_a_gpu_pinned_arrays_and_staging_are_counted_once(
    gpu: CudaOnHost, driver: MemoryDriver
) -> None:
    pinned = pin_memory(np.zeros(1 << 14, np.float32))
    target = np.zeros(1 << 14, np.float32)
    gpu.context.stage(pinned, target.ctypes.data)
    assert gpu.context.staging.reserved_bytes == 2 << 16
    driver.finish(STREAM)
    del pinned
    gpu.context.stage(target, target.ctypes.data)
    assert find_host_allocator().statistics.num_host_alloc == 2
    driver.finish(STREAM)
    empty_host_cache()
    assert find_host_allocator().reserved_bytes == 0
