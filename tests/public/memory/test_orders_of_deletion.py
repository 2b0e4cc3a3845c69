"""Orders of deletion, failures, and the collector: bytes return to the baseline."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.devices import add_in_two_regions, ones, use_device
from tracegraph.memory import MemPool, empty_cache, memory_allocated, memory_reserved, use_mem_pool
from tracegraph.runtime.default_device import find_any_device
from tracegraph.runtime.memory.pinned.host_block import HostBlock
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.memory.providers.segment import Segment

KINDS = ("host", "jax", "cuda", "cuda_async")
N = 1000


@pytest.fixture(params=KINDS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    """Each device in turn; None for the host."""
    return use_device(monkeypatch, request.param)


@pytest.fixture(autouse=True)
def baseline(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Reserved bytes and living segments before the test, which must leave as many."""
    if "gpu" in request.fixturenames:
        request.getfixturevalue("gpu")
    gc.collect()
    empty_cache()
    before = memory_reserved(), count_segments()
    yield before
    assert count_segments() == before[1]
    assert (memory_reserved(), memory_allocated()) == (before[0], 0)


def count_segments() -> int:
    """Returns how many segments of a device anybody can still reach."""
    gc.collect()
    reachable = [each for each in gc.get_objects() if isinstance(each, Segment)]
    # Memory in which a GPU's copies are staged is kept.
    staged = [each for each in gc.get_objects() if isinstance(each, HostBlock)]
    return len(reachable) - len({id(block.segment) for block in staged})


def step(state: Any, x: Any) -> Any:
    return {"w": state["w"] + x}, state["w"] * 2


def make_all(pool: MemPool | None) -> dict[str, Any]:
    """Returns a graph with state and result, and another graph of its pool."""
    captured = tg.capture(step, donate_argnums=0, pool=pool, verify=False)
    state, y = captured({"w": ones(N)}, 1.0)
    state, y = captured(state, 1.0)
    other = tg.capture(lambda x: (x, x * 3), pool=pool or captured.pool(), verify=False)
    return {"captured": captured, "state": state, "y": y, "other": other, "z": other(ones(5))[1]}


def check(alive: dict[str, Any]) -> None:
    """Whatever is still there is whole, and what can be called still works."""
    if "y" in alive:
        np.testing.assert_array_equal(np.asarray(alive["y"]), np.full(N, 4.0))
    if "state" in alive:
        np.testing.assert_array_equal(np.asarray(alive["state"]["w"]), np.full(N, 3.0))
    if "z" in alive:
        np.testing.assert_array_equal(np.asarray(alive["z"]), np.full(5, 3.0))
    if "other" in alive:
        assert float(alive["other"](ones(5))[1][0]) == 3.0


ORDERS = list(itertools.permutations(("captured", "state", "y", "other")))


@pytest.mark.parametrize("order", ORDERS[::5], ids=" ".join)
def test_in_any_order(order: tuple[str, ...], gpu: CudaOnHost | None) -> None:
    alive = make_all(None)
    del alive["z"]
    for name in order:
        del alive[name]
        gc.collect()
        check(alive)
    # Without a MemPool nothing waits for `empty_cache`.
    assert memory_reserved() == 0


@pytest.mark.parametrize("place", range(5))
def test_a_mem_pool_in_any_place(place: int, gpu: CudaOnHost | None) -> None:
    pools = [MemPool()]
    alive = make_all(pools[0])
    order = ["other", "z", "state", "captured"]
    for name in [*order[:place], "pool", *order[place:]]:
        if name == "pool":
            pools.clear()
        else:
            del alive[name]
        gc.collect()
        check(alive)
        assert memory_reserved() > 0 or not alive.keys() & {"captured", "state"}
    # What was read is a value of its own.
    check(alive)
    empty_cache()
    assert memory_reserved() == 0


def test_an_array_alone_keeps_its_pool(gpu: CudaOnHost | None) -> None:
    pool = MemPool()
    alive = make_all(pool)
    state, pool_id = alive["state"], pool.id
    del alive, pool
    gc.collect()
    empty_cache()
    assert {each["segment_pool_id"] for each in tg.memory.memory_snapshot()} == {pool_id}
    check({"state": state})
    del state
    gc.collect()
    empty_cache()


def test_200_graphs_of_one_function(gpu: CudaOnHost | None) -> None:
    """The function keeps the memory of a graph that is dropped for its next one."""
    captured = tg.capture(add_in_two_regions(1.0), verify=False)
    lowered = captured.lower(ones(N))
    taken, segments = set(), set()
    for index in range(200 if gpu is None else 40):
        graph = lowered.instantiate()
        result = graph(ones(N))
        taken.add((memory_reserved(), memory_allocated()))
        if index % 20 == 0:
            np.testing.assert_array_equal(np.asarray(result), np.full(N, 2.0))
            segments.add(count_segments())
        del graph, result
        assert memory_allocated() == 0
    assert len(taken) == len(segments) == 1
    del captured, lowered
    assert memory_reserved() == 0


def test_captures_and_drops(baseline: tuple[int, int]) -> None:
    captured = tg.capture(lambda x: (x, x * 2), verify=False)
    most = 0
    for _ in range(8):
        captured(ones(N))
        most = max(most, memory_reserved())
        captured.reset()
        gc.collect()
        assert memory_reserved() == baseline[0]
    assert most == captured.lower(ones(N)).pool_bytes


# Failures in the middle of a capture --------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, tg.OutOfMemoryError])
@pytest.mark.parametrize("number", [1, 4])
def test_the_provider_fails_at_a_call(
    number: int,
    error: type[BaseException],
    gpu: CudaOnHost | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture with scratch, and one that shares its pool, need four segments altogether."""
    provider = find_any_device().allocator.provider
    allocate, calls = provider.allocate, itertools.count(1)

    def fail(nbytes: int, stream: int = 0) -> Segment:
        # What an allocator takes for full memory is tried once more, after it has cleaned up.
        is_meant = next(calls) >= number
        if is_meant and error is tg.OutOfMemoryError:
            raise tg.OutOfMemoryError("p", where="p", why="p", fix="p", anchor="out-of-memory")
        if is_meant:
            raise error("planted")
        return allocate(nbytes, stream)

    def capture_both() -> None:
        first = tg.capture(add_in_two_regions(1.0), verify=False)
        first(ones(N))
        second = tg.capture(add_in_two_regions(2.0), pool=first.pool(), verify=False)
        # Too large for the scratch of the first.
        np.testing.assert_array_equal(np.asarray(second(ones(2 * N))), np.full(2 * N, 3.0))

    with monkeypatch.context() as patch:
        patch.setattr(provider, "allocate", fail)
        with pytest.raises(error):
            capture_both()
    gc.collect()
    assert memory_reserved() == 0
    capture_both()


def test_the_driver_fails_at_any_call_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use_device(monkeypatch, "cuda")
    assert device is not None
    driver = device.driver
    captured = tg.capture(add_in_two_regions(1.0))
    lowered = captured.lower(ones(N))
    lowered.instantiate()
    gc.collect()
    first, reserved = len(driver.calls), memory_reserved()
    graph = lowered.instantiate()
    made = [call.name for call in driver.calls[first:]]
    del graph
    gc.collect()
    for offset, name in enumerate(made):
        # What makes a context current is how a call is made, not a part of the capture.
        if name in ("get_current", "set_current"):
            continue
        driver.fail_at = len(driver.calls) + 1 + offset
        with pytest.raises(tg.CudaError, match=f"CUDA_ERROR_UNKNOWN from {name}"):
            lowered.instantiate()
        driver.fail_at = None
        gc.collect()
        assert (memory_reserved(), memory_allocated()) == (reserved, 0), (offset, name)
    np.testing.assert_array_equal(np.asarray(lowered.instantiate()(ones(N))), np.full(N, 2.0))


def test_a_failing_verification(gpu: CudaOnHost | None, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = tg.capture(add_in_two_regions(1.0))

    def refuse(*_: Any) -> Any:
        raise tg.VerificationError("p", where="p", why="p", fix="p", anchor="verification")

    with monkeypatch.context() as patch:
        patch.setattr("tracegraph.capturing.pipeline.verify_capture", refuse)
        with pytest.raises(tg.VerificationError):
            captured(ones(N))
    gc.collect()
    # The function holds its pool, and nothing is in it.
    assert memory_allocated() == 0
    np.testing.assert_array_equal(np.asarray(captured(ones(N))), np.full(N, 2.0))


def test_a_failing_trace(gpu: CudaOnHost | None) -> None:
    def fail(x: Any) -> Any:
        raise ValueError(f"stopped at {jnp.sort(x).shape}")

    pool = MemPool()
    captured = tg.capture(fail, pool=pool)
    for _ in range(3):
        with pytest.raises(ValueError, match="stopped at"):
            captured(ones(N))
    assert memory_reserved() == 0
    assert pool.use_count() == 1


def test_a_context_that_an_exception_leaves_in_a_capture(gpu: CudaOnHost | None) -> None:
    pool = MemPool()
    addresses: list[int] = []

    def fail(x: Any) -> Any:
        with use_mem_pool(pool):
            addresses.append(tg.memory.caching_allocator_alloc(100))
            raise ValueError(f"stopped at {x.shape}")

    with pytest.raises(ValueError, match="stopped at"):
        tg.capture(fail)(ones(N))
    assert pool.use_count() == 1
    assert {tuple(each["segment_pool_id"]) for each in tg.memory.memory_snapshot()} == {pool.id}
    for address in addresses:
        tg.memory.caching_allocator_delete(address)


# The collector in the middle of the allocator -----------------------------------------------


class Cycle:
    """Holds things until the collector finds it."""

    def __init__(self, *held: object) -> None:
        self.held, self.me = held, self


def make_garbage(count: int) -> None:
    """Leaves graphs, arrays and pools behind that only the collector finds."""
    for index in range(count):
        pool = MemPool()
        captured = tg.capture(step, donate_argnums=0, pool=pool, verify=False)
        state, y = captured({"w": ones(N)}, float(index))
        Cycle(pool, captured, state, y)
        Cycle(PrivatePool(pool.id, find_any_device().allocator))


@pytest.mark.parametrize("point", ["allocate", "free"])
def test_the_collector_runs_inside_the_provider(
    point: str, gpu: CudaOnHost | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = find_any_device().allocator.provider
    inner, found = getattr(provider, point), []

    def collect(*arguments: Any) -> Any:
        before = memory_allocated()
        gc.collect()
        result = inner(*arguments)
        found.append(before)
        return result

    gc.disable()
    try:
        make_garbage(3)
        with monkeypatch.context() as patch:
            patch.setattr(provider, point, collect)
            captured = tg.capture(add_in_two_regions(1.0), verify=False)
            result = captured(ones(N))
            np.testing.assert_array_equal(np.asarray(result), np.full(N, 2.0))
            if point == "free":
                captured.reset()
            assert found
            assert found[0] > 0
        # What was found inside the allocator went as soon as the call was over.
        assert memory_allocated() <= captured.pool_bytes
    finally:
        gc.enable()
    del captured
    gc.collect()
    empty_cache()


def test_the_collector_runs_all_the_time() -> None:
    threshold = gc.get_threshold()
    wrong: list[tuple[float, Any]] = []

    def work(number: int) -> None:
        for turn in range(4):
            captured = tg.capture(step, donate_argnums=0, verify=False)
            state, y = captured({"w": ones(N)}, float(number))
            state, y = captured(state, float(turn))
            if float(y[3]) != 2.0 + 2 * number:
                wrong.append((number, y))
            Cycle(captured, state)
            with use_mem_pool(MemPool()):
                address = tg.memory.caching_allocator_alloc(1000)
            tg.memory.caching_allocator_delete(address)

    gc.set_threshold(50, 2, 2)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*threshold)
    assert wrong == []
    gc.collect()
    empty_cache()


def test_threads_drop_what_others_made(gpu: CudaOnHost | None) -> None:
    def drop(alive: list[Any]) -> None:
        while alive:
            alive.pop()

    made = [list(make_all(None).values()) for _ in range(4)]
    threads = [threading.Thread(target=drop, args=(alive,)) for alive in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert memory_reserved() == 0


def test_a_pool_goes_without_the_collector(gpu: CudaOnHost | None) -> None:
    gc.collect()
    gc.disable()
    try:
        private = PrivatePool(MemPool().id, find_any_device().allocator)
        private.free_later(private.allocate(100))
        gone = weakref.ref(private)
        del private
        assert gone() is None
        assert memory_reserved() == 0
    finally:
        gc.enable()
