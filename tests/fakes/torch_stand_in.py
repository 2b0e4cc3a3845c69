"""A stand-in for the part of PyTorch that is recorded: our own allocator behind PyTorch's names.

With it the recorder runs without a GPU. What it records must play without a difference, since
both sides are the same allocator then.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

from tests.fakes.scripted_provider import ScriptedEvents, ScriptedProvider
from tests.oracles.allocator_operations import STREAM_COUNT
from tests.oracles.model_records import METRICS, OVERSIZE, POOLS, name_reserved
from tracegraph.runtime.errors import OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.capture_order import CaptureOrder
from tracegraph.runtime.memory.config import parse_alloc_conf
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.statistics import COUNTERS, Statistics

TOTAL_BYTES = 150_109_880_320
# Options that every settings call sets, to their defaults where it does not name them. All others
# keep their values until they are named again.
RENEWED_OPTIONS = frozenset(
    ("max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold")
)
# The state of PyTorch's random generator: two blocks while there is a graph.
STATE_BYTES = 8
# The statistics that are one number.
PLAIN = (*COUNTERS, "max_split_size")


def read_statistics(statistics: Statistics) -> dict[str, int]:
    """Returns what `Statistics.to_dict` does, without forming every name anew at each step."""
    stats = [statistics.oversize_allocations, statistics.oversize_segments]
    for part in (statistics.all, statistics.small_pool, statistics.large_pool):
        stats += part.stats
    for by_kind in statistics.private_reserved.values():
        stats += by_kind.values()
    values = [getattr(statistics, name) for name in PLAIN]
    for stat in stats:
        values += (stat.current, stat.peak, stat.allocated, stat.freed)
    return dict(zip(_list_names(tuple(statistics.private_reserved)), values, strict=True))


@functools.cache
def _list_names(pools: tuple[PoolId, ...]) -> list[str]:
    names = [*OVERSIZE, *(f"{metric}.{pool}" for pool in POOLS for metric in METRICS)]
    names += [name for pool in pools for name in name_reserved(pool)]
    fields = ("current", "peak", "allocated", "freed")
    return [*PLAIN, *(f"{name}.{field}" for name in names for field in fields)]


class StandIn:
    """PyTorch's names, as far as `tests.gpu.torch_allocator` uses them."""

    uint8 = "uint8"

    def __init__(self) -> None:
        self.events = ScriptedEvents()
        provider = ScriptedProvider(TOTAL_BYTES)
        self.allocator = CachingAllocator(provider, events=self.events)
        self.streams = [_Stream(self, 1000 * index) for index in range(STREAM_COUNT)]
        self.orders: dict[PoolId, CaptureOrder] = {}
        self.graph_count = 0
        self.state: list[Block] = []
        self._current = self.streams[0]
        self._tag = ""
        self._lasting: dict[str, str] = {}
        self._entries: list[dict[str, Any]] = []
        self._joins = itertools.count()
        self._pool_numbers = itertools.count(1)
        allocator, statistics = self.allocator, self.allocator.statistics
        self.cuda = types.SimpleNamespace(
            CUDAGraph=lambda keep_graph: _Graph(self),
            MemPool=lambda **options: _MemPool(self, **options),
            OutOfMemoryError=OutOfMemoryError,
            _sleep=lambda _: self.events.busy.add(self._current.cuda_stream),
            caching_allocator_alloc=self._allocate_bare,
            caching_allocator_delete=self._delete_bare,
            empty_cache=allocator.empty_cache,
            graph_pool_handle=self.make_pool_id,
            mem_get_info=lambda: (provider.available_bytes(), TOTAL_BYTES),
            memory=types.SimpleNamespace(
                _record_memory_history=self._record_history, _snapshot=self._snapshot
            ),
            memory_snapshot=allocator.snapshot,
            memory_stats=lambda: read_statistics(statistics),
            reset_accumulated_memory_stats=statistics.reset_accumulated,
            reset_peak_memory_stats=statistics.reset_peak,
            set_per_process_memory_fraction=allocator.set_memory_fraction,
            stream=self._use_stream,
            synchronize=lambda: None,
        )
        self._C = types.SimpleNamespace(
            _accelerator_setAllocatorSettings=self._configure,
            _cuda_beginAllocateCurrentThreadToPool=lambda _, pool_id: self.begin(pool_id, None),
            _cuda_endAllocateToPool=lambda _, pool_id: self.end(pool_id),
            _cuda_getCheckpointState=lambda _, pool_id: (
                pool_id,
                allocator.get_checkpoint(PoolId(*pool_id)),
            ),
            _cuda_releasePool=lambda _, pool_id: allocator.pools.release(PoolId(*pool_id)),
            _cuda_setCheckpointPoolState=self._restore,
            _cuda_setMemoryMetadata=self._set_tag,
        )

    def empty(self, nbytes: int, *, dtype: str, device: str) -> _Tensor:
        del dtype, device
        return _Tensor(self, self.allocator.allocate(nbytes, self._current.cuda_stream))

    def make_pool_id(self) -> tuple[int, int]:
        return (0, next(self._pool_numbers))

    def begin(self, pool_id: tuple[int, int], order: CaptureOrder | None) -> None:
        matches = order.has_stream if order else lambda _: True
        self.allocator.pools.begin(PoolId(*pool_id), matches)
        self.allocator.pools.begin_capture(PoolId(*pool_id), order)

    def end(self, pool_id: tuple[int, int]) -> None:
        self.allocator.pools.end(PoolId(*pool_id))
        self.allocator.pools.end_capture(PoolId(*pool_id))

    def join(self, source: int, target: int) -> None:
        """Lets one stream wait for another."""
        event = next(self._joins)
        for order in self.orders.values():
            if order.has_stream(source):
                order.record(event, source)
                order.wait(event, target)

    def launch(self) -> None:
        """Launches a kernel on the current stream."""
        for order in self.orders.values():
            if order.has_stream(self._current.cuda_stream):
                order.launch(self._current.cuda_stream)

    @property
    def current_stream(self) -> int:
        return self._current.cuda_stream

    @contextlib.contextmanager
    def _use_stream(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def _allocate_bare(self, nbytes: int, device: int, stream: _Stream) -> int:
        assert device == 0
        return self.allocator.allocate(nbytes, stream.cuda_stream).address

    def _delete_bare(self, address: int) -> None:
        with _as_torch():
            self.allocator.free(self.allocator.find_block(address))

    def _configure(self, text: str) -> None:
        options = split_settings(text)
        everything = ",".join(f"{key}:{each}" for key, each in (self._lasting | options).items())
        with _as_torch():
            self.allocator.configure(parse_alloc_conf(everything))
        lasting = {key: each for key, each in options.items() if key not in RENEWED_OPTIONS}
        self._lasting.update(lasting)

    def _restore(self, device: int, state: Any, stale: list[int], owners: list[int]) -> None:
        assert (device, stale, owners) == (0, [], [])
        pool_id, checkpoint = state
        restored = self.allocator.set_checkpoint(PoolId(*pool_id), checkpoint)
        kept = {block.address for block in restored.blocks}
        if kept.issuperset(restored.freed_addresses):
            return
        for block in restored.blocks:
            self.allocator.free(block)
        raise RuntimeError("Any stale tensors must be passed to set checkpoint")

    def _record_history(self, enabled: str | None, **options: Any) -> None:
        self._entries.clear()
        self.allocator.history.record(enabled, **options)

    def _set_tag(self, tag: str) -> None:
        for entry in self.allocator.history.read_entries():
            self._entries.append({**entry, "user_metadata": self._tag})
        self.allocator.history.record("all", context=None, clear_history=True)
        self._tag = tag

    def _snapshot(self) -> Mapping[str, Any]:
        return {"device_traces": [self._entries]}


class StandInGates:
    """Gates of the stand-in's streams, see `tests.gpu.stream_gates.StreamGates`."""

    def __init__(self, torch: StandIn) -> None:
        self.streams, self._events = torch.streams, torch.events
        self.blocked: set[int] = set()

    def block(self, index: int) -> None:
        self._events.busy.add(self.streams[index].cuda_stream)
        self.blocked.add(index)

    def open(self, index: int) -> None:
        self._events.finish(self.streams[index].cuda_stream)
        self.blocked.discard(index)

    def open_all(self) -> None:
        for index in range(len(self.streams)):
            self.open(index)

    @contextlib.contextmanager
    def watch(self, _: object) -> Iterator[None]:
        yield


class _Stream:
    def __init__(self, torch: StandIn, handle: int) -> None:
        self._torch, self.cuda_stream = torch, handle

    def synchronize(self) -> None:
        self._torch.events.finish(self.cuda_stream)

    def wait_stream(self, other: _Stream) -> None:
        self._torch.join(other.cuda_stream, self.cuda_stream)


class _Tensor:
    def __init__(self, torch: StandIn, block: Block) -> None:
        self._torch, self._block = torch, block

    def __del__(self) -> None:
        self._torch.allocator.free(self._block)

    def data_ptr(self) -> int:
        return self._block.address

    def record_stream(self, stream: _Stream) -> None:
        self._torch.allocator.record_stream(self._block, stream.cuda_stream)

    def zero_(self) -> None:
        self._torch.launch()


class _MemPool:
    def __init__(self, torch: StandIn, **options: Any) -> None:
        self.id, self._allocator = torch.make_pool_id(), torch.allocator
        self._allocator.pools.create_or_increment(PoolId(*self.id), **options)

    def __del__(self) -> None:
        self._allocator.pools.release(PoolId(*self.id))
        self._allocator.empty_cache(PoolId(*self.id))

    def use_count(self) -> int:
        return self._allocator.pools.use_count(PoolId(*self.id))


class _Graph:
    def __init__(self, torch: StandIn) -> None:
        self._torch = torch
        self._pool_id = (0, 0)

    def capture_begin(self, pool: tuple[int, int] | None = None, **_: str) -> None:
        torch = self._torch
        stream = torch.current_stream
        if not torch.graph_count:
            torch.state = [torch.allocator.allocate(STATE_BYTES, stream) for _ in range(2)]
        torch.graph_count += 1
        self._pool_id = pool or torch.make_pool_id()
        torch.orders[PoolId(*self._pool_id)] = order = CaptureOrder(stream)
        torch.begin(self._pool_id, order)

    def capture_end(self) -> None:
        del self._torch.orders[PoolId(*self._pool_id)]
        self._torch.end(self._pool_id)

    def pool(self) -> tuple[int, int]:
        return self._pool_id

    def reset(self) -> None:
        torch = self._torch
        torch.allocator.pools.release(PoolId(*self._pool_id))
        torch.graph_count -= 1
        if not torch.graph_count:
            for block in torch.state:
                torch.allocator.free(block)


def split_settings(text: str) -> dict[str, str]:
    """Returns the options of a settings text and their values, as they are written."""
    # A comma within brackets ends no option.
    options = re.findall(r"([^:,]+):?(\[[^\]]*\]|[^,]*)", text)
    return dict(options)


@contextlib.contextmanager
def _as_torch() -> Iterator[None]:
    """Turns our errors into those of PyTorch."""
    try:
        yield
    except TracegraphError as error:
        raise RuntimeError(str(error)) from None
