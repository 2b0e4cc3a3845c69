"""Providers and events that fail at every call: the books stay right, and nothing leaks."""

from __future__ import annotations

import threading

import pytest

from tests.fakes.bytes_provider import BytesProvider, ManualEvents
from tests.oracles.allocator_lockstep import Lockstep
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.config import AllocatorConfig, parse_alloc_conf
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.segment import Segment

KIB, MIB = 1 << 10, 1 << 20
MAIN, SIDE = 0, 1
CAPTURED = (10, 11)
POOL = PoolId(1)


def run_program(lockstep: Lockstep) -> None:
    """Touches all parts of an allocator: about twenty calls of the provider."""
    small = [lockstep.allocate(300 * KIB, MAIN) for _ in range(8)]
    large = [lockstep.allocate(nbytes, SIDE) for nbytes in (3 * MIB, 12 * MIB, 9 * MIB)]
    for pair in [one for one in (*small[::2], *large[1:]) if one is not None]:
        lockstep.record_stream(pair, SIDE)
        lockstep.free(pair)
    lockstep.begin_capture(POOL, CAPTURED)
    inside = [lockstep.allocate(nbytes, CAPTURED[0]) for nbytes in (512, 15 * MIB, 700 * KIB)]
    for pair in [one for one in inside[:2] if one is not None]:
        lockstep.record_stream(pair, CAPTURED[1])
        lockstep.free(pair)
    lockstep.end_capture(POOL)
    lockstep.allocate(40 * MIB, MAIN)
    lockstep.allocate_exact(3 * MIB, POOL, MAIN)
    lockstep.empty_cache()
    lockstep.allocate(2 * MIB, MAIN)


def count_provider_calls() -> int:
    lockstep = Lockstep(AllocatorConfig(), 256 * MIB)
    run_program(lockstep)
    lockstep.close()
    return lockstep.provider.call_count


@pytest.mark.parametrize("text", ["", "max_split_size_mb:20", "release_lock_on_cudamalloc:True"])
def test_memory_that_runs_out_at_any_call(text: str) -> None:
    calls = count_provider_calls()
    assert calls > 7
    for failing in range(1, calls + 1):
        for more in ((), (failing + 1,), range(failing + 1, failing + 9)):
            lockstep = Lockstep(parse_alloc_conf(text), 256 * MIB)
            lockstep.provider.failing_calls = {failing, *more}
            run_program(lockstep)
            lockstep.close()


class BrokenProvider(BytesProvider):
    """Fails with an error of the device at one call of one kind."""

    def __init__(self, method: str, failing: int) -> None:
        super().__init__(256 * MIB)
        self.left = failing
        self.method = method
        self.lost_bytes = 0

    def allocate(self, nbytes: int, stream: int = 0) -> Segment:
        self._fail_in_turn("allocate")
        return super().allocate(nbytes, stream)

    def free(self, segment: Segment) -> None:
        self.lost_bytes += segment.nbytes
        self._fail_in_turn("free")
        self.lost_bytes -= segment.nbytes
        super().free(segment)

    def _fail_in_turn(self, method: str) -> None:
        self.left -= method == self.method
        if not self.left and method == self.method:
            raise RuntimeError("the device is lost")


@pytest.mark.parametrize(
    ("method", "failing"), [*(("allocate", one) for one in range(1, 6)), ("free", 1), ("free", 2)]
)
@pytest.mark.parametrize("text", ["", "release_lock_on_cudamalloc:True"])
def test_a_provider_that_breaks_leaves_the_books_right(
    method: str, failing: int, text: str
) -> None:
    provider = BrokenProvider(method, failing)
    allocator = CachingAllocator(provider, config=parse_alloc_conf(text))
    blocks: list[Block] = []
    errors = 0
    for step, nbytes in enumerate((512, 3 * MIB, 20 * MIB, 600, 12 * MIB, 40 * MIB, 512)):
        try:
            blocks.append(allocator.allocate(nbytes, step % 3))
            if step % 2:
                allocator.free(blocks.pop())
                allocator.empty_cache()
        except RuntimeError:
            errors += 1
        held = sum(one.nbytes for one in provider.segments.values()) - provider.lost_bytes
        assert allocator.statistics.all.reserved_bytes.current == held
        assert allocator.statistics.all.allocation.current == len(blocks)
    assert errors == 1
    for block in blocks:
        allocator.free(block)
    # The lock is free, and all but the lost segment is released.
    thread = threading.Thread(target=allocator.empty_cache)
    thread.start()
    thread.join(timeout=240)
    assert not thread.is_alive()
    assert sum(one.nbytes for one in provider.segments.values()) == provider.lost_bytes


@pytest.mark.parametrize("failing", range(1, 4))
def test_an_event_that_cannot_be_recorded_leaks_nothing(failing: int) -> None:
    provider, events = BytesProvider(256 * MIB), ManualEvents()
    allocator = CachingAllocator(provider, events=events)
    events.failing_records = {failing}
    errors = 0
    for _ in range(2):
        block = allocator.allocate(512, MAIN)
        for stream in (SIDE, 2):
            allocator.record_stream(block, stream)
        try:
            allocator.free(block)
        except RuntimeError:
            errors += 1
    assert errors == 1
    assert allocator.statistics.all.allocation.current == 0
    allocator.empty_cache()
    assert not provider.segments
    assert not events.live
