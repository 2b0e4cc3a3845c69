"""Random operations against the slow model: addresses, provider calls, bytes and all statistics.

100 000 operations in all, from fixed seeds; each seed runs under one of the settings, on a device
so small that memory runs out now and then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.fakes.bytes_provider import BytesProvider
from tests.oracles.allocator_lockstep import Lockstep, Pair
from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.memory.caching import block_store, checkpoint
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.free_list import FreeList
from tracegraph.runtime.memory.caching.stream_uses import StreamUses
from tracegraph.runtime.memory.config import parse_alloc_conf
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.statistics import BlockStatistics

MIB = 1 << 20
CAPACITY_BYTES = 240 * MIB
STREAMS = (0, 1, 2)
CAPTURE_STREAMS = (10, 11)
POOL_STREAMS = (20,)
MOST_LIVE = 30
SETTINGS = (
    "",
    "max_split_size_mb:20",
    "roundup_power2_divisions:4",
    "graph_capture_record_stream_reuse:True",
    "garbage_collection_threshold:0.4,per_process_memory_fraction:0.8",
)
SEEDS = range(20)
OPERATIONS_PER_SEED = 5000


class RandomProgram:
    """Chooses operations that are allowed in the current state.

    Args:
        seed: of all choices.
        settings: of the allocator.
    """

    def __init__(self, seed: int, settings: str) -> None:
        self.random = random.Random(seed)
        self.lockstep = Lockstep(parse_alloc_conf(settings), CAPACITY_BYTES)
        self.pools = 0
        # (how often, what): more is freed than allocated only when much is live.
        self.table: list[tuple[int, Callable[[], object]]] = [
            (40, self.allocate),
            (32, self.free),
            (10, self.record_stream),
            (10, self.finish_work),
            (1, self.empty_cache),
            (1, self.allocate_exact),
            (2, self.begin_or_end_capture),
            (8, self.join),
            (1, self.begin_or_end_pool),
            (1, self.create_or_release_pool),
            (1, self.take_checkpoint),
            (1, self.restore_checkpoint),
            (1, self.lockstep.free_stale),
        ]

    def run(self, operations: int) -> None:
        """Runs so many operations, then frees everything."""
        weights = [weight for weight, _ in self.table]
        calls = [call for _, call in self.table]
        for call in self.random.choices(calls, weights, k=operations):
            call()
        self.lockstep.close()

    def allocate(self) -> None:
        if len(self.lockstep.live) >= MOST_LIVE:
            return self.free()
        stream = self.random.choice(self.streams())
        kind = self.random.random()
        most = 3000 if kind < 0.4 else MIB if kind < 0.7 else 11 * MIB if kind < 0.95 else 40 * MIB
        self.lockstep.allocate(self.random.randrange(most), stream)
        return None

    def allocate_exact(self) -> None:
        pools = self.used_pools()
        if pools and len(self.lockstep.live) < MOST_LIVE:
            nbytes = self.random.randrange(self.random.choice((2000, 30 * MIB)))
            self.lockstep.allocate_exact(nbytes, self.random.choice(pools), 10)

    def free(self) -> None:
        if self.lockstep.live:
            self.lockstep.free(self.random.choice(self.lockstep.live))

    def record_stream(self) -> None:
        captured = [one for one in self.lockstep.live if one.block.stream in CAPTURE_STREAMS]
        if captured and self.lockstep.captures and self.random.random() < 0.7:
            self.lockstep.record_stream(
                self.random.choice(captured), self.random.choice(CAPTURE_STREAMS)
            )
        elif self.lockstep.live:
            pair = self.random.choice(self.lockstep.live)
            self.lockstep.record_stream(pair, self.random.choice(self.streams()))

    def finish_work(self) -> None:
        stream = self.random.choice((*STREAMS, *CAPTURE_STREAMS, *POOL_STREAMS))
        self.lockstep.finish_work(stream, self.random.choice((1, 2, None)))

    def empty_cache(self) -> None:
        pools = [None, *self.lockstep.model.pools]
        self.lockstep.empty_cache(self.random.choice(pools))

    def begin_or_end_capture(self) -> None:
        captures = self.lockstep.captures
        if captures:
            self.lockstep.end_capture(next(iter(captures)))
        else:
            self.lockstep.begin_capture(self.choose_pool(), CAPTURE_STREAMS)

    def join(self) -> None:
        for pool in self.lockstep.captures:
            stream, into = self.random.sample(CAPTURE_STREAMS, 2)
            self.lockstep.join(pool, stream, into)

    def begin_or_end_pool(self) -> None:
        routes = [one for one in self.lockstep.model.routes if one not in self.lockstep.captures]
        if routes:
            self.lockstep.end_pool(routes[0])
        else:
            self.lockstep.begin_pool(self.choose_pool(), POOL_STREAMS)

    def create_or_release_pool(self) -> None:
        routes = self.lockstep.model.routes
        pools = [pool for pool in self.used_pools() if pool not in routes]
        if len(pools) > 3 or (pools and self.random.random() < 0.7):
            pool = self.random.choice(pools)
            users = self.lockstep.model.pools[pool].use_count
            for _ in range(self.random.choice((1, users))):
                self.lockstep.release_pool(pool)
        else:
            no_split, use_on_oom = (self.random.random() < 0.4 for _ in range(2))
            self.lockstep.create_pool(self.make_pool(), no_split=no_split, use_on_oom=use_on_oom)

    def take_checkpoint(self) -> None:
        pools = self.used_pools()
        if pools:
            self.lockstep.take_checkpoint(self.random.choice(pools))

    def restore_checkpoint(self) -> None:
        pools = [one for one in self.lockstep.checkpoints if self.lockstep.can_restore(one)]
        if pools:
            pool = self.random.choice(pools)
            mine = [one for one in self.lockstep.live if one.piece.segment.pool == pool]
            stale = self.random.sample(mine, self.random.randint(0, len(mine)))
            self.lockstep.restore_checkpoint(pool, stale)

    def streams(self) -> tuple[int, ...]:
        captured = 2 * CAPTURE_STREAMS if self.lockstep.captures else ()
        return (*STREAMS, *captured, *POOL_STREAMS)

    def used_pools(self) -> list[PoolId]:
        return [pool for pool, state in self.lockstep.model.pools.items() if state.use_count]

    def choose_pool(self) -> PoolId:
        pools = [one for one in self.used_pools() if one not in self.lockstep.model.routes]
        return self.random.choice([*pools, self.make_pool()])

    def make_pool(self) -> PoolId:
        self.pools += 1
        return PoolId(self.pools)


def run_seeds(seeds: Iterable[int]) -> None:
    """Runs the random programs of some seeds, each under its settings."""
    for seed in seeds:
        RandomProgram(seed, SETTINGS[seed % len(SETTINGS)]).run(OPERATIONS_PER_SEED)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_operations_agree_with_the_model(seed: int) -> None:
    run_seeds([seed])


# Planted faults: each must be found -----------------------------------------------------------


def plant_merge_with_pending(patch: pytest.MonkeyPatch) -> None:
    """A block merges with a neighbour that another stream may still use."""
    patch.setattr(block_store, "can_merge", lambda block, other: not other.is_allocated)


def plant_no_merge(patch: pytest.MonkeyPatch) -> None:
    """Free neighbours stay apart."""
    patch.setattr(block_store, "can_merge", lambda block, other: False)


def plant_worst_fit(patch: pytest.MonkeyPatch) -> None:
    """The largest fitting block is taken."""
    patch.setattr(
        FreeList, "find", lambda self, *wanted: next(reversed(self.list_from(*wanted)), None)
    )


def plant_other_streams(patch: pytest.MonkeyPatch) -> None:
    """Free blocks of another stream are served if the own one has none."""
    find = FreeList.find

    def find_anywhere(self: FreeList[Block], nbytes: int, stream: int) -> Block | None:
        return find(self, nbytes, stream) or find(self, nbytes, (stream + 1) % len(STREAMS))

    patch.setattr(FreeList, "find", find_anywhere)


def plant_forgotten_event(patch: pytest.MonkeyPatch) -> None:
    """Of several streams that use a block only the first is waited for."""
    record_all = StreamUses._record_all

    def record_first(self: StreamUses, streams: list[int]) -> list[Any]:
        del streams[1:]
        return record_all(self, streams)

    patch.setattr(StreamUses, "_record_all", record_first)


def plant_no_deferral(patch: pytest.MonkeyPatch) -> None:
    """A freed block is served again at once, even if a stream uses it."""

    def put_back(self: StreamUses, block: Block) -> None:
        block.stream_uses = None
        self._put_back(block)

    patch.setattr(StreamUses, "defer", put_back)


def plant_poll_in_capture(patch: pytest.MonkeyPatch) -> None:
    """Events are recorded and queried although a capture is under way."""
    patch.setattr(StreamUses, "begin_capture", lambda self, pool_id, order=None: None)
    patch.setattr(StreamUses, "end_capture", lambda self, pool_id: None)


def plant_reuse_before_join(patch: pytest.MonkeyPatch) -> None:
    """Inside of a capture a block is reused although a stream has not joined."""

    def put_all_back(self: StreamUses, stream: int) -> None:
        for block in [one for one in self._deferred if one.stream == stream]:
            del self._deferred[block]
            block.stream_uses = None
            self._put_back(block)

    patch.setattr(StreamUses, "find_reusable", put_all_back)


def plant_small_remainder(patch: pytest.MonkeyPatch) -> None:
    """Large blocks are split also where little remains."""
    patch.setattr(block_store, "SMALL_BYTES", 0)


def plant_forgotten_statistic(patch: pytest.MonkeyPatch) -> None:
    """Requested bytes are not taken off."""
    count = BlockStatistics.count_inactive
    patch.setattr(
        BlockStatistics, "count_inactive", lambda self, nbytes, requested: count(self, nbytes, 0)
    )


def plant_leaked_segment(patch: pytest.MonkeyPatch) -> None:
    """A segment that is released does not reach the provider."""
    patch.setattr(BytesProvider, "free", lambda self, segment: None)


def plant_forgotten_block(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint leaves out the last live block."""
    list_live = checkpoint._list_live
    patch.setattr(checkpoint, "_list_live", lambda store, pool: list_live(store, pool)[:-1])


FAULTS = (
    plant_merge_with_pending,
    plant_no_merge,
    plant_worst_fit,
    plant_other_streams,
    plant_forgotten_event,
    plant_no_deferral,
    plant_poll_in_capture,
    plant_reuse_before_join,
    plant_small_remainder,
    plant_forgotten_statistic,
    plant_leaked_segment,
    plant_forgotten_block,
)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, TracegraphError)):
        run_seeds(SEEDS)


# The state machine ----------------------------------------------------------------------------


class AllocatorMachine(RuleBasedStateMachine):
    """The same operations, chosen and made smaller by hypothesis."""

    @initialize(settings=st.sampled_from(SETTINGS))
    def start(self, settings: str) -> None:
        self.lockstep = Lockstep(parse_alloc_conf(settings), 64 * MIB)

    @rule(
        nbytes=st.one_of(st.integers(0, 4096), st.integers(0, 30 * MIB)),
        stream=st.sampled_from((*STREAMS, *CAPTURE_STREAMS)),
    )
    def allocate(self, nbytes: int, stream: int) -> None:
        self.lockstep.allocate(nbytes, stream)

    @precondition(lambda self: self.lockstep.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.lockstep.free(self.draw_pair(data))

    @precondition(lambda self: self.lockstep.live)
    @rule(data=st.data(), stream=st.sampled_from((*STREAMS, *CAPTURE_STREAMS)))
    def record_stream(self, data: st.DataObject, stream: int) -> None:
        self.lockstep.record_stream(self.draw_pair(data), stream)

    @rule(stream=st.sampled_from(STREAMS), count=st.integers(1, 3))
    def finish_work(self, stream: int, count: int) -> None:
        self.lockstep.finish_work(stream, count)

    @rule()
    def empty_cache(self) -> None:
        self.lockstep.empty_cache()

    @precondition(lambda self: not self.lockstep.captures)
    @rule(number=st.integers(1, 2))
    def begin_capture(self, number: int) -> None:
        pool = self.lockstep.model.pools.get(PoolId(number))
        if pool is None or pool.use_count:
            self.lockstep.begin_capture(PoolId(number), CAPTURE_STREAMS)

    @precondition(lambda self: self.lockstep.captures)
    @rule(streams=st.sampled_from([(10, 11), (11, 10)]))
    def join(self, streams: tuple[int, int]) -> None:
        self.lockstep.join(next(iter(self.lockstep.captures)), *streams)

    @precondition(lambda self: self.lockstep.captures)
    @rule()
    def end_capture(self) -> None:
        self.lockstep.end_capture(next(iter(self.lockstep.captures)))

    @precondition(lambda self: self.find_idle_pools())
    @rule(data=st.data())
    def release_pool(self, data: st.DataObject) -> None:
        self.lockstep.release_pool(data.draw(st.sampled_from(self.find_idle_pools())))

    @precondition(lambda self: self.find_idle_pools())
    @rule(data=st.data())
    def take_checkpoint(self, data: st.DataObject) -> None:
        self.lockstep.take_checkpoint(data.draw(st.sampled_from(self.find_idle_pools())))

    @rule(number=st.integers(1, 2))
    def restore_checkpoint(self, number: int) -> None:
        if self.lockstep.can_restore(PoolId(number)):
            self.lockstep.restore_checkpoint(PoolId(number))

    def teardown(self) -> None:
        if hasattr(self, "lockstep"):
            self.lockstep.close()

    def draw_pair(self, data: st.DataObject) -> Pair:
        return self.lockstep.live[data.draw(st.integers(0, len(self.lockstep.live) - 1))]

    def find_idle_pools(self) -> list[PoolId]:
        model = self.lockstep.model
        pools = (pool for pool, state in model.pools.items() if state.use_count)
        return [pool for pool in pools if pool not in model.routes]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
