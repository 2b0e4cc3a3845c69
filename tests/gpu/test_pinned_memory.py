"""Pinned arrays on a GPU: page-locked for the driver, copied from directly, safe to drop."""

import ctypes
import gc
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.subprocesses import run_python
from tracegraph.user_memory.pinned_memory import (
    empty_host_cache,
    find_host_allocator,
    is_pinned,
    pin_memory,
    synchronize_copies,
)

pytestmark = pytest.mark.usefixtures("gpu")
SIZE = 1 << 22
# cudaMemoryTypeHost: page-locked memory that the driver knows.
IS_HOST = 1


def draw(seed):
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


def read_memory_type(address):
    """Asks the driver itself what kind of memory an address is; 0 for memory unknown to it."""
    kind = ctypes.c_uint(0)
    library = ctypes.CDLL("libcuda.so.1")
    library.cuPointerGetAttribute(ctypes.byref(kind), 2, ctypes.c_uint64(address))
    return kind.value


def test_the_driver_knows_the_memory():
    pinned = pin_memory(draw(0))
    assert read_memory_type(pinned.ctypes.data) == IS_HOST
    assert read_memory_type(draw(0).ctypes.data) != IS_HOST


@pytest.mark.parametrize("non_blocking", [False, True])
def test_values_arrive(non_blocking):
    captured = tg.capture(lambda x: x * 2 + 1)
    pinned = pin_memory(draw(0), non_blocking=non_blocking)
    for seed in range(20):
        synchronize_copies(pinned)
        pinned[:] = draw(seed)
        y = captured(pinned)
        if not non_blocking:
            pinned[:] = -1
        np.testing.assert_array_equal(np.asarray(y), draw(seed) * 2 + 1)


def test_a_dropped_array_is_not_overwritten_under_its_copy():
    captured = tg.capture(lambda x: x + 0, verify=False)
    captured(draw(0))
    slow = tg.capture(lambda x: (x @ x) / 4096, verify=False)
    work = jnp.ones((4096, 4096))
    results = []
    for seed in range(8):
        # The copy waits behind this, and the array is gone long before it begins.
        work = slow(work)
        results.append(captured(pin_memory(draw(seed), non_blocking=True)))
        gc.collect()
    for seed, result in enumerate(results):
        np.testing.assert_array_equal(np.asarray(result), draw(seed))


def test_memory_goes_back():
    gc.collect()
    empty_host_cache()
    allocator = find_host_allocator()
    before = allocator.reserved_bytes
    pinned = [pin_memory(draw(seed), non_blocking=True) for seed in range(3)]
    assert allocator.reserved_bytes == before + 3 * SIZE * 4
    captured = tg.capture(lambda x: x.sum(), verify=False)
    totals = [captured(each) for each in pinned]
    del pinned
    tg.synchronize()
    empty_host_cache()
    assert allocator.reserved_bytes <= before
    assert np.isfinite(np.asarray(totals)).all()


def test_from_a_thread_that_never_used_the_gpu():
    found = []
    captured = tg.capture(lambda x: x + 1, verify=False)
    captured(draw(0))

    def work():
        pinned = pin_memory(draw(1), non_blocking=True)
        found.append(captured(pinned))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(np.asarray(found[0]), draw(1) + 1)


@pytest.mark.parametrize(
    "options",
    [
        "pinned_use_cuda_host_register:True,pinned_num_register_threads:4",
        "pinned_use_background_threads:True",
        "pinned_reserve_segment_size_mb:32",
        "pinned_max_cached_size_mb:1,pinned_max_round_threshold_mb:1",
    ],
)
def test_options(options):
    """In a process of its own, because the settings are read when the first memory is pinned."""
    program = f"""
import os
os.environ["TRACEGRAPH_ALLOC_CONF"] = "{options}"
import numpy as np, tracegraph as tg
from tests.gpu.test_pinned_memory import IS_HOST, draw, read_memory_type
from tracegraph.user_memory.pinned_memory import pin_memory, empty_host_cache, find_host_allocator
captured = tg.capture(lambda x: x * 2)
for seed in range(6):
    pinned = pin_memory(draw(seed), non_blocking=bool(seed % 2))
    assert read_memory_type(pinned.ctypes.data) == IS_HOST
    assert np.array_equal(np.asarray(captured(pinned)), draw(seed) * 2)
del pinned
empty_host_cache()
print(find_host_allocator().statistics.to_dict())
"""
    done = run_python(["-c", program])
    assert done.returncode == 0, done.stderr
    assert "num_host_alloc" in done.stdout


def test_pinned_arrays_and_bfloat16():
    pinned = pin_memory(jnp.arange(1000, dtype=jnp.bfloat16), non_blocking=True)
    assert is_pinned(pinned)
    assert tg.capture(lambda x: x + 1)(pinned).dtype == jnp.bfloat16
