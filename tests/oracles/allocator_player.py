"""Plays a recorded trace against our caching allocator and says where it differs from PyTorch's.

Our allocator is given the addresses of the segments that PyTorch obtained. After every operation
its answer, its statistics and its history must equal PyTorch's, and its segments wherever the
recording has them.
"""

from __future__ import annotations

from tests.fakes.recorded_events import RecordedEvents
from tests.fakes.recorded_provider import RecordedProvider
from tests.oracles.allocator_comparison import Comparison, Difference, is_failure
from tests.oracles.allocator_traces import Result, Step, Trace
from tracegraph.runtime.errors import OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder
from tracegraph.runtime.memory.caching.checkpoint import PoolCheckpoint
from tracegraph.runtime.memory.config import parse_alloc_conf
from tracegraph.runtime.memory.pool_id import PoolId

# A trace that has gone astray differs everywhere from then on.
MOST_DIFFERENCES = 40
# Ids that PyTorch gives to no pool.
FIRST_GRAPH_POOL = 1_000_000


class Player:
    """One trace and an allocator that plays it.

    Args:
        trace: to be played.

    Attributes:
        allocator: ours.
        events: of its streams.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._provider = RecordedProvider(trace.total_bytes)
        self.events = RecordedEvents(trace.steps)
        self.allocator = CachingAllocator(
            self._provider, config=parse_alloc_conf(trace.settings), events=self.events
        )
        self._comparison = Comparison(trace, self.allocator)
        self._addresses: dict[int, int] = {}
        self._pool_ids: dict[int, PoolId] = {}
        self._graph_pools: dict[int, PoolId] = {}
        self._orders: dict[int, CaptureOrder] = {}
        self._fork_count = 0
        self._checkpoints: dict[int, tuple[PoolCheckpoint, dict[int, int]]] = {}

    def play(self) -> list[Difference]:
        """Returns all differences; where memory went astray, or there are many, it ends."""
        differences = self._comparison.differences
        for index, step in enumerate(self._trace.steps):
            self._play_step(index, step)
            is_astray = any(each.what in ("result", "provider") for each in differences)
            if is_astray or len(differences) > MOST_DIFFERENCES:
                return differences
        self._comparison.compare_segments(len(self._trace.steps))
        return differences

    def _play_step(self, index: int, step: Step) -> None:
        self.allocator.history.record("all", context=None, clear_history=True)
        self._provider.follow(step.entries)
        polls = not step.changes.get("num_sync_all_streams")
        self.events.follow(self.allocator._uses, index, polls=polls)
        result = self._perform(step)
        self.events.settle()
        complaints = self._provider.settle()
        if complaints:
            self._comparison.note(index, "provider", [], complaints)
        self._comparison.compare(index, result)

    def _perform(self, step: Step) -> Result:
        name, *arguments = step.operation
        if is_failure(step.result, "skipped") or step.result == "raw":
            return step.result
        try:
            return getattr(self, f"_play_{name}")(step, *arguments)
        except OutOfMemoryError as error:
            return ("oom", str(error))
        except TracegraphError as error:
            return ("error", str(error))

    # Operations. Each gets its step, and returns what the recorder returned.

    def _play_alloc(self, _: Step, number: int, nbytes: int, stream: int) -> int:
        block = self.allocator.allocate(nbytes, self._trace.streams[stream])
        self._addresses[number] = block.address
        return block.address

    def _play_free(self, _: Step, number: int) -> None:
        self.allocator.free(self.allocator.find_block(self._addresses.pop(number)))

    def _play_record(self, _: Step, number: int, stream: int) -> str:
        block = self.allocator.find_block(self._addresses[number])
        self.allocator.record_stream(block, self._trace.streams[stream])
        return "recorded"

    def _play_block(self, _: Step, stream: int) -> None:
        self.events.busy.add(self._trace.streams[stream])

    def _play_unblock(self, _: Step, stream: int) -> None:
        self.events.finish(self._trace.streams[stream])

    def _play_sleep(self, _: Step, stream: int) -> None:
        self.events.sleep(self._trace.streams[stream])

    def _play_wake(self, _: Step, stream: int) -> None:
        self.events.finish(self._trace.streams[stream])

    def _play_empty(self, _: Step) -> None:
        self.allocator.empty_cache()

    def _play_snapshot(self, _: Step) -> None:
        """Its segments are compared after the operation."""

    def _play_reset_peak(self, _: Step) -> None:
        self.allocator.statistics.reset_peak()

    def _play_reset_accumulated(self, _: Step) -> None:
        self.allocator.statistics.reset_accumulated()

    def _play_fraction(self, _: Step, fraction: float) -> None:
        self.allocator.set_memory_fraction(fraction)

    def _play_settings(self, _: Step, text: str) -> None:
        self.allocator.configure(parse_alloc_conf(text))

    def _play_pool_new(self, step: Step, pool: int) -> Result:
        self._pool_ids[pool] = PoolId(*step.result)
        return step.result

    def _play_mempool_new(self, step: Step, pool: int, use_on_oom: bool, no_split: bool) -> Result:
        self._pool_ids[pool] = pool_id = PoolId(*step.result)
        self.allocator.pools.create_or_increment(pool_id, no_split=no_split, use_on_oom=use_on_oom)
        return step.result

    def _play_mempool_delete(self, _: Step, pool: int) -> None:
        self.allocator.pools.release(self._pool_ids[pool])
        self.allocator.empty_cache(self._pool_ids[pool])

    def _play_pool_count(self, _: Step, pool: int) -> int:
        return self.allocator.pools.use_count(self._pool_ids[pool])

    def _play_pool_begin(self, _: Step, pool: int) -> None:
        self._begin(self._pool_ids[pool], None)

    def _play_pool_end(self, _: Step, pool: int) -> None:
        self._end(self._pool_ids[pool])

    def _play_pool_release(self, _: Step, pool: int) -> None:
        self.allocator.pools.release(self._pool_ids[pool])

    def _begin(self, pool_id: PoolId, order: CaptureOrder | None) -> None:
        # For PyTorch 2.11 a capture is under way wherever requests go to a private pool.
        self.allocator.pools.begin(pool_id, order.has_stream if order else lambda _: True)
        self.allocator.pools.begin_capture(pool_id, order)

    def _end(self, pool_id: PoolId) -> None:
        self.allocator.pools.end(pool_id)
        self.allocator.pools.end_capture(pool_id)

    def _play_capture_begin(
        self, step: Step, graph: int, shared: int | None, stream: int
    ) -> Result:
        self._follow_entries(step)
        own = PoolId(FIRST_GRAPH_POOL + graph)
        self._graph_pools[graph] = own if shared is None else self._graph_pools.get(shared, own)
        self._orders[graph] = CaptureOrder(self._trace.streams[stream])
        self._begin(self._graph_pools[graph], self._orders[graph])
        return step.result

    def _play_capture_end(self, _: Step, graph: int) -> None:
        del self._orders[graph]
        self._end(self._graph_pools[graph])

    def _play_graph_reset(self, step: Step, graph: int) -> None:
        self.allocator.pools.release(self._graph_pools.pop(graph))
        self._follow_entries(step)

    def _play_fork(self, _: Step, source: int, target: int) -> None:
        self._fork_count += 1
        for order in self._orders.values():
            if order.has_stream(self._trace.streams[source]):
                order.record(self._fork_count, self._trace.streams[source])
                order.wait(self._fork_count, self._trace.streams[target])

    def _play_launch(self, _: Step, number: int, stream: int) -> str:
        del number
        for order in self._orders.values():
            if order.has_stream(self._trace.streams[stream]):
                order.launch(self._trace.streams[stream])
        return "launched"

    def _follow_entries(self, step: Step) -> None:
        """Does what PyTorch did by itself: blocks for the state of its random generator."""
        for entry in step.entries:
            if entry.action == "alloc":
                self.allocator.allocate(entry.nbytes, entry.stream)
            elif entry.action == "free_requested":
                self.allocator.free(self.allocator.find_block(entry.address))

    def _play_checkpoint_get(self, _: Step, number: int, pool: int) -> None:
        state = self.allocator.get_checkpoint(self._pool_ids[pool])
        self._checkpoints[number] = state, dict(self._addresses)

    def _play_checkpoint_set(self, step: Step, number: int, pool: int) -> Result:
        state, addresses = self._checkpoints.pop(number)
        restored = self.allocator.set_checkpoint(self._pool_ids[pool], state)
        self._comparison.has_restored = True
        if not is_failure(step.result, "error"):
            self._addresses = addresses
            return step.result
        # PyTorch notices too late that it has no owners for the blocks, and frees them.
        for block in restored.blocks:
            self.allocator.free(block)
        return step.result
