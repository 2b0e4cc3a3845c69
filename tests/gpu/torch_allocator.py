"""Records what PyTorch's caching allocator does: ``python -m tests.gpu.torch_allocator FOLDER``.

It writes the files of tests/data/torch_allocator; set CUDA_DEVICE_MAX_CONNECTIONS=32, so that a
blocked stream holds up no other. `list_recordings` says which traces it records.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tests.gpu.stream_gates import StreamGates
from tests.oracles.allocator_operations import CAPTURABLE, Operation, make_random
from tests.oracles.allocator_traces import (
    SMALLEST,
    Entry,
    Result,
    SegmentRow,
    Step,
    Trace,
    format_segments,
    write_traces,
)
from tests.oracles.directed_operations import (
    LIFE_CYCLE_BYTES,
    make_checkpoints,
    make_life_cycle,
    make_retries,
    make_settings,
    make_user_pools,
    make_uses_in_captures,
)

MIB = 1 << 20
# About 30 ms on an H200.
SLEEP_CYCLES = 50_000_000
SEGMENTS_PERIOD = 250
# Unlike the others, these keep their values when settings are changed that do not name them.
LASTING_DEFAULTS = (
    "expandable_segments:False,graph_capture_record_stream_reuse:False,"
    "large_segment_size_mb:20,max_non_split_rounding_mb:20"
)
TEXT_LENGTH = 80
# Names of the traces that each run of the tests records anew.
LIVE = tuple(f"live_{seed}" for seed in range(20))


@dataclasses.dataclass(frozen=True)
class Recording:
    """A trace to be recorded.

    Attributes:
        name: of the trace.
        settings: of the allocator.
        make: makes the operations, which takes a while: tests are named without them.
    """

    name: str
    settings: str
    make: Callable[[], list[Operation]]

    @functools.cached_property
    def operations(self) -> list[Operation]:
        """What is done."""
        return self.make()


class Recorder:
    """Performs operations with PyTorch and keeps what its allocator did.

    Args:
        torch: the module.
        gates: block its streams.
    """

    def __init__(self, torch: Any, gates: Any) -> None:
        self._torch, self._gates = torch, gates
        self._streams = gates.streams
        self._reset()

    def _reset(self) -> None:
        self._blocks: dict[int, Any] = {}
        self._used: set[int] = set()
        self._pools: dict[int, Any] = {}
        self._pool_ids: dict[int, tuple[int, int]] = {}
        self._graphs: dict[int, Any] = {}
        self._checkpoints: dict[int, tuple[Any, dict[int, Any]]] = {}
        self._is_capturing = self._is_raw = False

    def record(self, name: str, settings: str, operations: list[Operation]) -> Trace:
        """Performs all operations, from an empty cache and with these settings.

        Args:
            name: of the trace.
            settings: as in ``PYTORCH_ALLOC_CONF``.
            operations: see tests/oracles/allocator_operations.py.
        """
        torch = self._torch
        self._reset()
        # Only addresses can be freed in a restored pool: it has no owners for its blocks.
        self._is_raw = any(operation[0] == "checkpoint_set" for operation in operations)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings(LASTING_DEFAULTS)
        torch._C._accelerator_setAllocatorSettings(settings)
        torch.cuda.memory._record_memory_history(
            "all", context=None, stacks="python", clear_history=True
        )
        torch.cuda.reset_accumulated_memory_stats()
        torch.cuda.reset_peak_memory_stats()
        try:
            return self._record(name, settings, operations)
        finally:
            self._gates.open_all()
            self._reset()
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch._C._accelerator_setAllocatorSettings(LASTING_DEFAULTS)
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _record(self, name: str, settings: str, operations: list[Operation]) -> Trace:
        torch = self._torch
        baseline = before = dict(torch.cuda.memory_stats())
        results: list[Result] = []
        changes: list[Mapping[str, int]] = []
        segments: dict[int, tuple[SegmentRow, ...]] = {}
        for index, operation in enumerate(operations):
            torch._C._cuda_setMemoryMetadata(str(index))
            with self._gates.watch(operation):
                results.append(self._perform(operation))
            now = dict(torch.cuda.memory_stats())
            changes.append({key: now[key] - before.get(key, 0) for key in now})
            before = now
            if operation[0] == "snapshot" or index % SEGMENTS_PERIOD == SEGMENTS_PERIOD - 1:
                segments[index] = tuple(format_segments(torch.cuda.memory_snapshot()))
        torch._C._cuda_setMemoryMetadata(str(len(operations)))
        segments[len(operations)] = tuple(format_segments(torch.cuda.memory_snapshot()))
        entries = self._read_entries(len(operations))
        rows = zip(operations, results, changes, entries, strict=True)
        steps = [Step(row[0], row[1], drop_zeros(row[2]), row[3]) for row in rows]
        streams = tuple(stream.cuda_stream for stream in self._streams)
        total_bytes = torch.cuda.mem_get_info()[1]
        return Trace(name, settings, streams, total_bytes, baseline, tuple(steps), segments)

    def _read_entries(self, count: int) -> list[tuple[Entry, ...]]:
        found: list[list[Entry]] = [[] for _ in range(count)]
        for entry in self._torch.cuda.memory._snapshot()["device_traces"][0]:
            tag = entry.get("user_metadata", "")
            if entry["action"] == "snapshot" or not tag.isdigit() or int(tag) >= count:
                continue
            address = entry["addr"] if "addr" in entry else entry["device_free"]
            found[int(tag)].append(Entry(entry["action"], address, entry["size"], entry["stream"]))
        return [tuple(entries) for entries in found]

    def _perform(self, operation: Operation) -> Result:
        name, *arguments = operation
        try:
            return getattr(self, f"_do_{name}")(*arguments)
        except self._torch.cuda.OutOfMemoryError as error:
            return ("oom", str(error)[:TEXT_LENGTH])
        except KeyError as error:
            # A block whose allocation has failed.
            return ("skipped", repr(error))
        except (RuntimeError, ValueError) as error:
            return ("error", str(error)[:TEXT_LENGTH])

    def _do_alloc(self, block: int, nbytes: int, stream: int) -> int:
        torch = self._torch
        # Some are allocated without a tensor, as other libraries do.
        is_bare = block % 7 == 3 and not self._is_capturing and not self._gates.blocked
        if is_bare or self._is_raw:
            address = torch.cuda.caching_allocator_alloc(nbytes, 0, self._streams[stream])
            self._blocks[block] = address
            return address
        with torch.cuda.stream(self._streams[stream]):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self._blocks[block] = tensor
        return tensor.data_ptr()

    def _do_free(self, block: int) -> None:
        held = self._blocks.pop(block)
        if isinstance(held, int):
            self._torch.cuda.caching_allocator_delete(held)
        del held
        if block in self._used:
            self._used.remove(block)
            self._settle()

    def _do_record(self, block: int, stream: int) -> str:
        tensor = self._blocks[block]
        if isinstance(tensor, int):
            return "raw"
        tensor.record_stream(self._streams[stream])
        self._used.add(block)
        return "recorded"

    def _settle(self) -> None:
        """Waits for all streams that are not blocked: their events are done from now on."""
        for index, stream in enumerate(self._streams):
            is_captured = self._is_capturing and index in CAPTURABLE
            if index not in self._gates.blocked and not is_captured:
                stream.synchronize()

    def _do_block(self, stream: int) -> None:
        self._gates.block(stream)

    def _do_unblock(self, stream: int) -> None:
        self._gates.open(stream)
        self._streams[stream].synchronize()

    def _do_sleep(self, stream: int) -> None:
        with self._torch.cuda.stream(self._streams[stream]):
            self._torch.cuda._sleep(SLEEP_CYCLES)
        self._gates.blocked.add(stream)

    def _do_wake(self, stream: int) -> None:
        self._gates.blocked.discard(stream)
        self._streams[stream].synchronize()

    def _do_empty(self) -> None:
        self._torch.cuda.empty_cache()

    def _do_snapshot(self) -> None:
        """Its segments are kept, as after any operation of this name."""

    def _do_reset_peak(self) -> None:
        self._torch.cuda.reset_peak_memory_stats()

    def _do_reset_accumulated(self) -> None:
        self._torch.cuda.reset_accumulated_memory_stats()

    def _do_fraction(self, fraction: float) -> None:
        self._torch.cuda.set_per_process_memory_fraction(fraction)

    def _do_settings(self, text: str) -> None:
        self._torch._C._accelerator_setAllocatorSettings(text)

    def _do_pool_new(self, pool: int) -> tuple[int, int]:
        self._pool_ids[pool] = tuple(self._torch.cuda.graph_pool_handle())
        return self._pool_ids[pool]

    def _do_mempool_new(self, pool: int, use_on_oom: bool, no_split: bool) -> tuple[int, int]:
        options = {"use_on_oom": use_on_oom, "no_split": no_split}
        self._pools[pool] = self._torch.cuda.MemPool(**options)
        self._pool_ids[pool] = tuple(self._pools[pool].id)
        return self._pool_ids[pool]

    def _do_mempool_delete(self, pool: int) -> None:
        del self._pools[pool]

    def _do_pool_count(self, pool: int) -> int:
        return self._pools[pool].use_count()

    def _do_pool_begin(self, pool: int) -> None:
        self._torch._C._cuda_beginAllocateCurrentThreadToPool(0, self._pool_ids[pool])

    def _do_pool_end(self, pool: int) -> None:
        self._torch._C._cuda_endAllocateToPool(0, self._pool_ids[pool])

    def _do_pool_release(self, pool: int) -> None:
        self._torch._C._cuda_releasePool(0, self._pool_ids[pool])

    def _do_capture_begin(self, number: int, shared: int | None, stream: int) -> None:
        graph = self._torch.cuda.CUDAGraph(keep_graph=True)
        other = None if shared is None else self._graphs.get(shared)
        pool = () if other is None else (other.pool(),)
        with self._torch.cuda.stream(self._streams[stream]):
            graph.capture_begin(*pool, capture_error_mode="relaxed")
        self._graphs[number] = graph
        self._is_capturing = True

    def _do_capture_end(self, number: int) -> None:
        self._is_capturing = False
        with self._torch.cuda.stream(self._streams[CAPTURABLE[0]]):
            self._graphs[number].capture_end()

    def _do_graph_reset(self, number: int) -> None:
        self._graphs.pop(number).reset()

    def _do_fork(self, source: int, target: int) -> None:
        self._streams[target].wait_stream(self._streams[source])

    def _do_launch(self, block: int, stream: int) -> str:
        tensor = self._blocks[block]
        if isinstance(tensor, int):
            return "raw"
        with self._torch.cuda.stream(self._streams[stream]):
            tensor.zero_()
        return "launched"

    def _do_checkpoint_get(self, number: int, pool: int) -> None:
        state = self._torch._C._cuda_getCheckpointState(0, self._pool_ids[pool])
        self._checkpoints[number] = state, dict(self._blocks)

    def _do_checkpoint_set(self, number: int, pool: int) -> None:
        del pool
        state, blocks = self._checkpoints.pop(number)
        self._torch._C._cuda_setCheckpointPoolState(0, state, [], [])
        self._blocks = blocks


def drop_zeros(changes: Mapping[str, int]) -> dict[str, int]:
    """Returns the changes that are some."""
    return {key: change for key, change in changes.items() if change}


def list_recordings() -> dict[str, list[Recording]]:
    """Returns the traces of tests/data/torch_allocator, by the name of their file."""
    two, all_kinds = (0, 1), ("record", "block", "pools")
    pools = functools.partial(make_random, 13, 2000, streams=two, kinds=all_kinds)
    files = {"pools": [Recording("pools_13", "", pools)]}
    captured = functools.partial(
        make_random,
        222,
        2000,
        streams=(0, 1, 3, 4),
        kinds=("record", "block", "captures"),
        limit_bytes=1500 * MIB,
    )
    reuses = "graph_capture_record_stream_reuse:True"
    files["captures"] = [Recording("captures_reuse_2", reuses, captured)]
    collects = "garbage_collection_threshold:0.6"
    splits = f"max_split_size_mb:40,max_non_split_rounding_mb:64,{collects}"
    files["pressure"] = [
        Recording("max_split_rounding_gc", splits, functools.partial(_make_pressed, 330, 0.004)),
        Recording("gc_low", collects, functools.partial(_make_pressed, 344, 0.002)),
    ]
    grows = "expandable_segments:True"
    growing = functools.partial(make_random, 362, 2000, streams=two, kinds=all_kinds)
    files["expandable"] = [Recording("expandable_pools", grows, growing)]
    cycles = {
        name: functools.partial(make_life_cycle, nbytes)
        for name, nbytes in LIFE_CYCLE_BYTES.items()
    }
    files["directed"] = [
        *(Recording(f"lifecycle_{name}", "", each) for name, each in cycles.items()),
        *(Recording(f"expandable_lifecycle_{name}", grows, each) for name, each in cycles.items()),
        Recording("capture_record", "", make_uses_in_captures),
        Recording("capture_record_reuse", reuses, make_uses_in_captures),
        Recording("mempool", "", make_user_pools),
        Recording("mempool_no_split", "", functools.partial(make_user_pools, no_split=True)),
        Recording("mempool_use_on_oom", "", functools.partial(make_user_pools, use_on_oom=True)),
        Recording("checkpoint_0", "", functools.partial(make_checkpoints, 900)),
        Recording("expandable_checkpoint", grows, functools.partial(make_checkpoints, 910)),
        Recording("oom_retry", "", make_retries),
        Recording("settings", "", make_settings),
    ]
    return files


def list_live_recordings() -> list[Recording]:
    """Returns 20 random traces: two streams, uses of either, blocked streams and private pools."""
    kinds = ("record", "block", "pools")
    return [
        Recording(
            name, "", functools.partial(make_random, 1000 + seed, 2000, streams=(0, 1), kinds=kinds)
        )
        for seed, name in enumerate(LIVE)
    ]


def _make_pressed(seed: int, fraction: float) -> list[Operation]:
    return make_random(
        seed,
        2000,
        kinds=("record",),
        fraction=fraction,
        limit_bytes=540 * MIB,
        biggest_bytes=96 * MIB,
    )


def record_files(folder: pathlib.Path, files: Mapping[str, list[Recording]], preset: int) -> None:
    """Records traces and writes them.

    Args:
        folder: for the files.
        files: the traces of each, by its name.
        preset: of their compression.
    """
    torch = importlib.import_module("torch")
    recorder = Recorder(torch, StreamGates(torch))
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    for name, recordings in files.items():
        traces = [recorder.record(each.name, each.settings, each.operations) for each in recordings]
        write_traces(folder / f"{name}.json.xz", traces, device, preset=preset)
        print(f"{name}: {len(traces)} traces")


if __name__ == "__main__":
    record_files(pathlib.Path(sys.argv[1]), list_recordings(), SMALLEST)
