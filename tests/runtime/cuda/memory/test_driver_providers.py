"""Segments from the CUDA driver: order of frees, full memory, and every failing call."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.memory_driver import MemoryDriver
from tests.oracles.error_lines import match
from tracegraph.runtime.cuda.memory.driver_providers import (
    KEEP_EVERYTHING,
    CudaAsyncProvider,
    CudaProvider,
)
from tracegraph.runtime.cuda.memory.virtual_provider import CudaVirtualProvider
from tracegraph.runtime.errors import CudaError, OutOfMemoryError, TracegraphError

MIB = 1 << 20
STREAM, SIDE = 0x5555, 0x6666
KINDS = ("cuda", "cuda_async", "cuda_vmm")


def make(kind: str, **options: Any) -> tuple[Any, MemoryDriver]:
    """Returns a provider, in a thread that has no current context."""
    driver = MemoryDriver(is_deferred=True, **options)
    context = driver.retain_primary_context(0)
    makers: dict[str, Callable[[], Any]] = {
        "cuda": lambda: CudaProvider(driver, context),
        "cuda_async": lambda: CudaAsyncProvider(
            driver, context, 0, {0: STREAM, 1: SIDE}.__getitem__
        ),
        "cuda_vmm": lambda: CudaVirtualProvider(driver, context, 0),
    }
    return makers[kind](), driver


def list_memory(driver: MemoryDriver) -> list[str]:
    return [kind for kind in driver.live_handles().values() if "memory" in kind]


@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_counted_and_taken_back_once(kind: str) -> None:
    provider, driver = make(kind, memory_bytes=8 * MIB)
    assert (provider.name, provider.available_bytes(), provider.total_bytes()) == (
        kind,
        8 * MIB,
        8 * MIB,
    )
    one, other = provider.allocate(2 * MIB), provider.allocate(MIB, stream=1)
    assert one.address % 256 == other.address % 256 == 0
    assert (provider.reserved_bytes, provider.available_bytes()) == (3 * MIB, 5 * MIB)
    provider.free(one)
    assert (provider.reserved_bytes, provider.available_bytes()) == (MIB, 7 * MIB)
    with pytest.raises(TracegraphError, match=f"(?s)it is not in use.*{kind} provider"):
        provider.free(one)
    provider.free(other)
    assert list_memory(driver) == []
    # No thread keeps a context that it did not have.
    assert driver.get_current() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_memory_goes_with_its_last_holder(kind: str) -> None:
    provider, driver = make(kind)
    kept = [provider.allocate(512), provider.allocate(512)]
    del provider
    gc.collect()
    assert len(list_memory(driver)) == 2
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert list_memory(driver) == []


@pytest.mark.parametrize("kind", KINDS)
def test_full_memory(kind: str) -> None:
    provider, _ = make(kind, memory_bytes=4 * MIB)
    kept = provider.allocate(3 * MIB)
    with pytest.raises(OutOfMemoryError) as raised:
        provider.allocate(2 * MIB)
    match(
        raised.value,
        "cannot reserve 2,097,152 bytes of GPU memory",
        f"{kind} provider: wanted 2,097,152 bytes, free 1,048,576 of 4.00 MiB",
        "this provider serves from what JAX",
        "lower XLA_PYTHON_CLIENT_MEM_FRACTION",
    )
    assert provider.reserved_bytes == 3 * MIB
    provider.free(kept)
    assert provider.allocate(2 * MIB).nbytes == 2 * MIB


@pytest.mark.parametrize("kind", KINDS)
def test_other_failures_are_not_taken_for_full_memory(kind: str) -> None:
    provider, driver = make(kind)
    driver.fail_on = "allocate_async" if kind == "cuda_async" else "allocate_memory"
    with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN from allocate"):
        provider.allocate(512)
    assert (provider.reserved_bytes, list_memory(driver)) == (0, [])
    assert driver.get_current() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_free_is_told_once(kind: str) -> None:
    provider, driver = make(kind)
    segment = provider.allocate(512)
    driver.fail_on = "free_async" if kind == "cuda_async" else "free_memory"
    with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN from free"):
        provider.free(segment)
    assert segment.storage.is_closed
    del segment
    gc.collect()
    assert (provider.reserved_bytes, list_memory(driver)) == (0, [])


def test_plain_memory_is_freed_after_the_work_of_the_gpu() -> None:
    provider, driver = make("cuda")
    one, other = provider.allocate(64), provider.allocate(64)
    with driver.use_context(driver.retain_primary_context(0)):
        driver.fill_async(one.address, 7, 1, 64, STREAM)
        driver.copy_async(other.address, one.address, 64, STREAM)
    provider.free(one)
    assert driver.read_bytes(other.address, 64) == bytes([7]) * 64


def test_pool_memory_belongs_to_a_stream() -> None:
    provider, driver = make("cuda_async")
    default, side = provider.allocate(64), provider.allocate(64, stream=1)
    with driver.use_context(driver.retain_primary_context(0)):
        driver.fill_async(side.address, 7, 1, 64, SIDE)
    provider.free(side)
    provider.free(default)
    calls = [call.arguments for call in driver.calls if call.name.endswith("_async")]
    assert calls == [
        (64, STREAM),
        (64, SIDE),
        (side.address, 7, 1, 64, SIDE),
        # The fake refuses another stream than that of the allocation.
        (side.address,),
        (default.address,),
    ]
    driver.finish(SIDE)


def test_the_pool_of_the_driver_keeps_all_until_it_is_trimmed() -> None:
    provider, driver = make("cuda_async")
    assert list(driver.kept_bytes.values()) == [KEEP_EVERYTHING]
    (pool,) = driver.kept_bytes
    provider.trim()
    assert driver.calls[-2].name == "trim_memory_pool"
    assert driver.calls[-2].arguments == (pool, 0)
