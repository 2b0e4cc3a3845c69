"""The caching allocator and its slow model in step, with everything compared after each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from tests.fakes.bytes_provider import BytesProvider, ManualEvents
from tests.oracles.allocator_model import COUNTERS, AllocatorModel
from tests.oracles.model_records import METRICS, OVERSIZE, POOLS, Piece, PieceState, name_reserved
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder
from tracegraph.runtime.memory.caching.checkpoint import PoolCheckpoint
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.statistics import Statistics

# Of the figures that every allocator has, in the order in which they are read.
NAMES = (*(f"{metric}.{pool}" for pool in POOLS for metric in METRICS), *OVERSIZE)


@dataclasses.dataclass(eq=False)
class Pair:
    """One live allocation: the block, the model's piece for it, and what was written into it."""

    block: Block
    piece: Piece
    number: int


@dataclasses.dataclass(frozen=True)
class PairedCheckpoint:
    checkpoint: PoolCheckpoint
    states: list[PieceState]


class Lockstep:
    """Does everything twice. Raises AssertionError where allocator and model differ.

    Args:
        config: of both.
        capacity_bytes: of the device.
    """

    def __init__(self, config: AllocatorConfig, capacity_bytes: int) -> None:
        self.provider = BytesProvider(capacity_bytes)
        self.events = ManualEvents()
        self.allocator = CachingAllocator(self.provider, config=config, events=self.events)
        self.model = AllocatorModel(config, capacity_bytes)
        self.live: list[Pair] = []
        self.checkpoints: dict[PoolId, PairedCheckpoint] = {}
        self.captures: dict[PoolId, CaptureOrder] = {}
        self.stale: list[Block] = []
        self._numbers = 0

    # Operations ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int) -> Pair | None:
        """Allocates, compares the addresses, and writes; None where memory has run out."""
        try:
            block = self.allocator.allocate(nbytes, stream)
        except OutOfMemoryError:
            block = None
        self._expect_calls()
        return self._add(block, self.model.allocate(nbytes, stream))

    def allocate_exact(self, nbytes: int, pool: PoolId, stream: int) -> Pair | None:
        """Allocates an arena likewise."""
        try:
            block = self.allocator.allocate_exact(nbytes, pool, stream)
        except OutOfMemoryError:
            block = None
        self._expect_calls()
        return self._add(block, self.model.allocate_exact(nbytes, pool, stream))

    def free(self, pair: Pair) -> None:
        """Frees, after a look whether the bytes are still what was written."""
        self.live.remove(pair)
        self._read(pair)
        self.allocator.free(pair.block)
        self._expect_calls()
        self.model.free(pair.piece)
        self.compare()

    def record_stream(self, pair: Pair, stream: int) -> None:
        self.allocator.record_stream(pair.block, stream)
        self.model.record_stream(pair.piece, stream)
        self.compare()

    def finish_work(self, stream: int, count: int | None = None) -> None:
        """Lets the work of a stream run up to the ``count``-th next event; None for all."""
        done = self.events.finished.get(stream, 0)
        last = self.events.recorded.get(stream, 0)
        number = last if count is None else min(done + count, last)
        self.events.finish(stream, number)
        self.model.finished[stream] = max(self.model.finished.get(stream, 0), number)

    def empty_cache(self, pool: PoolId | None = None) -> None:
        self.allocator.empty_cache(pool)
        self._expect_calls()
        self.model.empty_cache(pool)
        self.compare()

    def begin_pool(self, pool: PoolId, streams: Iterable[int]) -> None:
        """Sends the requests of some streams to a pool."""
        matches = frozenset(streams).__contains__
        self.allocator.pools.begin(pool, matches)
        self.model.create_or_increment_pool(pool)
        self.model.routes[pool] = matches
        self.compare()

    def end_pool(self, pool: PoolId) -> None:
        self.allocator.pools.end(pool)
        del self.model.routes[pool]
        self.compare()

    def create_pool(self, pool: PoolId, *, no_split: bool, use_on_oom: bool) -> None:
        self.allocator.pools.create_or_increment(pool, no_split=no_split, use_on_oom=use_on_oom)
        self.model.create_or_increment_pool(pool, can_split=not no_split, is_for_oom=use_on_oom)
        self.compare()

    def release_pool(self, pool: PoolId) -> None:
        self.allocator.pools.release(pool)
        self.model.release_pool(pool)
        self.compare()

    def begin_capture(self, pool: PoolId, streams: Iterable[int]) -> None:
        """Begins a capture on the first of some streams; the others join it at once."""
        first, *others = streams
        order = CaptureOrder(first)
        order.launch(first)
        for stream in others:
            order.record((first, stream), first)
            order.wait((first, stream), stream)
            order.launch(stream)
        self.begin_pool(pool, (first, *others))
        self.captures[pool] = order
        reuses = self.allocator.config.graph_capture_record_stream_reuse
        self.allocator.pools.begin_capture(pool, order)
        self.model.captures[pool] = order if reuses else None
        self.events.captured_streams = {None}
        self.compare()

    def join(self, pool: PoolId, stream: int, into: int) -> None:
        """Lets one stream of a capture wait for another, and go on."""
        order = self.captures[pool]
        order.record((stream, into), stream)
        order.wait((stream, into), into)
        order.launch(into)

    def end_capture(self, pool: PoolId) -> None:
        self.allocator.pools.end_capture(pool)
        del self.model.captures[pool], self.captures[pool]
        if not self.captures:
            self.events.captured_streams = set()
        self.end_pool(pool)

    def take_checkpoint(self, pool: PoolId) -> None:
        checkpoint = self.allocator.get_checkpoint(pool)
        self.checkpoints[pool] = PairedCheckpoint(checkpoint, self.model.checkpoint(pool))
        self.compare()

    def restore_checkpoint(self, pool: PoolId, stale: Collection[Pair] = ()) -> None:
        """Brings back the last checkpoint of a pool; the owners of ``stale`` lose their blocks."""
        before = {one.block.address: one for one in self.live if one.piece.segment.pool == pool}
        kept = self.checkpoints[pool]
        lost = [pair.block for pair in stale]
        restored = self.allocator.set_checkpoint(pool, kept.checkpoint, lost)
        self.stale += lost
        assert restored.freed_addresses == tuple(sorted(before))
        pieces = self.model.restore(pool, kept.states)
        assert [one.address for one in restored.blocks] == [one.address for one in pieces]
        self.live = [one for one in self.live if one not in before.values()]
        for block, piece in zip(restored.blocks, pieces, strict=True):
            if block.address in before:
                old = before[block.address].block
                assert (block is old) == (old not in lost)
            assert block not in self.stale
            self._add(block, piece)

    def free_stale(self) -> None:
        """Lets the owners who lost their blocks free them, which changes nothing."""
        for block in self.stale:
            self.allocator.free_later(block)
        self.stale.clear()
        self.compare()

    def can_restore(self, pool: PoolId) -> bool:
        """Says whether the last checkpoint of a pool may be brought back now."""
        kept = self.checkpoints.get(pool)
        state = self.model.pools.get(pool)
        if kept is None or state is None or not state.use_count or self.captures:
            return False
        return all(one.segment in self.model.segments for one in kept.states)

    def close(self) -> None:
        """Ends and frees everything; then nothing may be left."""
        for pool in tuple(self.captures):
            self.end_capture(pool)
        for pool in tuple(self.model.routes):
            self.end_pool(pool)
        self.free_stale()
        for pair in tuple(self.live):
            self.free(pair)
        for pool, state in tuple(self.model.pools.items()):
            for _ in range(state.use_count):
                self.release_pool(pool)
        self.empty_cache()
        assert not self.provider.segments
        assert not self.events.live
        assert not self.model.segments
        assert not self.model.pools
        assert self.allocator.statistics.all.reserved_bytes.current == 0

    # Comparison ---------------------------------------------------------------------------------

    def compare(self) -> None:
        """Compares all statistics, and all calls of the provider since the last time."""
        assert next(self.model.calls, None) is None, "the provider was asked once too often"
        freed = [call.address or 0 for call in self.provider.calls if call.name == "free"]
        self.provider.calls.clear()
        assert sorted(freed) == sorted(self.model.released)
        self.model.released.clear()
        statistics = self.allocator.statistics
        counts = {counter: getattr(statistics, counter) for counter in COUNTERS}
        assert counts == self.model.counts
        expected = self.model.statistics.figures
        figures = _read_figures(statistics)
        assert figures == expected, _tell_difference(figures, expected)

    def _expect_calls(self) -> None:
        calls = self.provider.calls
        self.model.calls = iter([call for call in calls if call.name == "allocate"])

    def _add(self, block: Block | None, piece: Piece | None) -> Pair | None:
        assert (block is None) == (piece is None)
        if block is None or piece is None:
            self.compare()
            return None
        assert (block.address, block.nbytes) == (piece.address, piece.nbytes)
        assert (block.requested_bytes, block.is_allocated) == (piece.requested, True)
        self._numbers += 1
        pair = Pair(block, piece, self._numbers)
        self.provider.write(block.address, block.nbytes, pair.number)
        self.live.append(pair)
        self.compare()
        return pair

    def _read(self, pair: Pair) -> None:
        numbers = self.provider.read(pair.block.address, pair.block.nbytes)
        assert numbers == {pair.number}, f"another allocation wrote into {pair.block}"


def _read_figures(statistics: Statistics) -> dict[str, list[int]]:
    parts = (statistics.all, statistics.small_pool, statistics.large_pool)
    names = [*NAMES]
    stats = [stat for part in parts for stat in part.stats]
    stats += [statistics.oversize_allocations, statistics.oversize_segments]
    for pool, by_kind in statistics.private_reserved.items():
        assert tuple(by_kind) == POOLS
        names += name_reserved(pool)
        stats += by_kind.values()
    figures = [[stat.current, stat.peak, stat.allocated, stat.freed] for stat in stats]
    return dict(zip(names, figures, strict=True))


def _tell_difference(got: dict[str, list[int]], wanted: dict[str, list[int]]) -> str:
    names = sorted(got.keys() | wanted.keys())
    differing = [name for name in names if got.get(name) != wanted.get(name)]
    return "; ".join(f"{one}: got {got.get(one)}, wanted {wanted.get(one)}" for one in differing)
