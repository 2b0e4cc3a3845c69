"""Nothing is freed under a running replay: who waits for pending work, with each provider.

The driver does no work before the host waits for its stream, or the test lets a stream go on.

| Provider | Memory is freed | What keeps it from pending work |
|---|---|---|
| jax | to JAX's allocator | JAX computes behind it, on one stream; other streams wait both ways |
| cuda | to the GPU | cuMemFree waits for the whole GPU |
| cuda_vmm | to the GPU | as cuda; and the host waits before pages are unmapped |
| cuda_async | to the driver's pool | the order of the stream that it was allocated on |
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import (
    STREAM,
    CudaOnHost,
    floats,
    kernel,
    make_cuda_replay,
    make_device,
)
from tests.fakes.definitions import make_definition, make_stage
from tests.fakes.devices import PROVIDERS
from tests.fakes.fake_driver import FakeDriver
from tests.fakes.fake_memory import FakeMemory
from tests.fakes.memory_driver import MemoryDriver
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.replay import Replay

MIB = 1 << 20
# A value in the arena between two kernels.
TWO_STEPS = make_definition(
    make_stage(kernel("double", "x", "t"), kernel("increment", "t", "y"), edges=[(0, 1)])
)
STATE = make_definition(
    make_stage(kernel("increment", "s", "s")), inputs="s", outputs="s", residents=("s",)
)


@pytest.fixture(params=PROVIDERS)
def name(request: pytest.FixtureRequest) -> str:
    """Of a provider."""
    return request.param


@pytest.fixture
def late(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaOnHost]:
    monkeypatch.setenv("TRACEGRAPH_ALLOC_CONF", PROVIDERS[name])
    device = make_device(monkeypatch, is_deferred=True)
    assert device.allocator.provider.name == name
    yield device
    # While the memory is still there.
    device.driver._finish_all()


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[int]]]:
    """Which memory was freed, with the streams that had work at that moment."""
    found: list[tuple[str, set[int]]] = []

    def watch(owner: type, name: str) -> None:
        release = getattr(owner, name)

        def wrapper(self: MemoryDriver, *arguments: int) -> None:
            found.append((name, {stream for stream, queue in self._queues.items() if queue}))
            release(self, *arguments)

        monkeypatch.setattr(owner, name, wrapper)

    for method in ("free_memory", "free_async", "unmap_memory"):
        watch(FakeMemory, method)
    return found


def call(replay: Replay, value: float) -> Any:
    replay.settle()
    replay.load([(0, floats([value] * 4))])
    replay.launch()
    return replay.make_taker(0)()


def has_work(device: CudaOnHost, stream: int = STREAM) -> bool:
    return not device.driver.query_stream(stream)


def note(device: CudaOnHost, stream: int, log: list[str], word: str) -> None:
    """Enqueues work that says when it is done."""
    device.driver._enqueue(stream, functools.partial(log.append, word))


def check_releases(name: str, releases: list[tuple[str, set[int]]]) -> None:
    """Fails if memory was freed that pending work may use."""
    for method, streams in releases:
        # The driver's pool keeps the order of a stream.
        allowed = {STREAM} if method == "free_async" else set()
        assert streams <= allowed, f"{name}: {method} while work is pending"


@pytest.mark.parametrize("order", ["graph first", "result first"])
def test_everything_is_dropped_while_the_stream_holds_it(
    order: str, name: str, late: CudaOnHost, releases: list[tuple[str, set[int]]]
) -> None:
    replay = make_cuda_replay(late, TWO_STEPS)
    kept, dropped = call(replay, 3), call(replay, 4)
    arena = weakref.ref(replay.arena)
    if order == "graph first":
        del replay
    del dropped
    gc.collect()
    replay = None
    gc.collect()
    assert arena() is None
    assert late.allocator.provider.reserved_bytes == 0  # type: ignore[attr-defined]
    check_releases(name, releases)
    # Where the order of streams is enough, the host has not waited.
    assert has_work(late) == (name in ("jax", "cuda_async"))
    late.driver.finish(STREAM)
    np.testing.assert_array_equal(np.asarray(kept), [7] * 4)


def test_state_is_dropped_while_the_stream_holds_it(
    name: str, late: CudaOnHost, releases: list[tuple[str, set[int]]]
) -> None:
    replay = make_cuda_replay(late, STATE)
    state = call(replay, 3)
    copy = state.peek().copy()
    del replay, state
    gc.collect()
    check_releases(name, releases)
    late.driver.finish(STREAM)
    np.testing.assert_array_equal(np.asarray(copy.to_jax()), [4] * 4)


def test_the_memory_serves_the_next_graph_of_the_pool(name: str, late: CudaOnHost) -> None:
    pool = PrivatePool(new_pool_id(), late.allocator)
    make = functools.partial(Replay, TWO_STEPS, late, pool, ArrayState.FRESH)
    results = []
    addresses = set()
    for value in range(5):
        replay = make()
        addresses.add(replay.arena.block.address)
        results.append(call(replay, value))
        del replay
        gc.collect()
    # All in the same memory, poisoned in between, and without a wait.
    assert (len(addresses) == 1) == (name != "cuda_async")
    assert has_work(late)
    values = [float(np.asarray(each)[0]) for each in results]
    assert values == [2 * value + 1 for value in range(5)]


def test_a_block_is_not_handed_to_another_stream(late: CudaOnHost) -> None:
    side = late.number_stream(tg.Stream())
    log: list[str] = []
    block = late.allocator.allocate(MIB)
    note(late, STREAM, log, "main")
    late.allocator.free(block)
    other = late.allocator.allocate(MIB, side)
    assert other.address not in range(block.address, block.address + MIB)
    late.allocator.free(other)


def free_all(device: CudaOnHost, block: Block) -> None:
    device.allocator.free(block)
    device.allocator.empty_cache()
    assert device.allocator.statistics.all.reserved_bytes.current == 0


@pytest.mark.parametrize("forth", [True, False])
def test_memory_that_changes_streams_waits_for_its_work(
    forth: bool, name: str, late: CudaOnHost
) -> None:
    """Freed, released, and reserved again for another stream."""
    if name == "cuda_async":
        pytest.skip("the driver's pool orders this by itself")
    number = late.number_stream(tg.Stream())
    handles = {0: STREAM, number: late.context.order.find_handle(number)}
    first, second = (0, number) if forth else (number, 0)
    log: list[str] = []
    block = late.allocator.allocate(MIB, first)
    note(late, handles[first], log, "old")
    free_all(late, block)
    block = late.allocator.allocate(MIB, second)
    note(late, handles[second], log, "new")
    late.driver.finish(handles[second])
    assert log == ["old", "new"]
    free_all(late, block)


def test_pages_are_unmapped_when_all_streams_are_done(
    late: CudaOnHost, name: str, releases: list[tuple[str, set[int]]]
) -> None:
    number = late.number_stream(tg.Stream())
    log: list[str] = []
    block = late.allocator.allocate(30 * MIB)
    note(late, late.context.order.find_handle(number), log, "side")
    late.allocator.free(block)
    late.allocator.empty_cache()
    if name == "cuda_vmm":
        assert releases
        assert releases[0] == ("unmap_memory", set())
    assert (log == ["side"]) == (name in ("cuda", "cuda_vmm"))


def test_planted_a_driver_that_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, releases: list[tuple[str, set[int]]]
) -> None:
    """What cuMemFree does is what the provider relies on: without it the check above fires."""
    monkeypatch.setenv("TRACEGRAPH_ALLOC_CONF", PROVIDERS["cuda"])
    kept: list[Any] = []
    forget: Callable[..., Any] = FakeDriver._forget
    monkeypatch.setattr(
        FakeDriver, "_forget", lambda self, a: (kept.append(self._memory[a]), forget(self, a))
    )
    late = make_device(monkeypatch, is_deferred=True)
    monkeypatch.setattr(late.driver, "_finish_all", lambda: None)
    replay = make_cuda_replay(late, TWO_STEPS)
    result = call(replay, 3)
    del replay
    gc.collect()
    with pytest.raises(AssertionError, match="cuda: free_memory while work is pending"):
        check_releases("cuda", releases)
    late.driver.finish(STREAM)
    np.testing.assert_array_equal(np.asarray(result), [7] * 4)


def test_planted_streams_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tracegraph.runtime.cuda.jax_order.JaxOrder.make_wait", lambda self, *_: None
    )
    late = make_device(monkeypatch, is_deferred=True)
    with pytest.raises(AssertionError, match="new"):
        test_memory_that_changes_streams_waits_for_its_work(True, "jax", late)
