"""Snapshots: their keys, and their file as the web viewer reads it."""

import copy
import pickle
import random

import pytest

from tests.oracles.snapshot_viewer import ViewerError, check_opcodes, view
from tracegraph.runtime.errors import InternalError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.config import AllocatorConfig, parse_alloc_conf
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.snapshots.snapshot import (
    build_snapshot,
    describe_plan,
    describe_settings,
    read_snapshot,
    write_snapshot,
)

SEGMENT_KEYS = (
    "device",
    "address",
    "total_size",
    "allocated_size",
    "active_size",
    "requested_size",
    "stream",
    "segment_type",
    "segment_pool_id",
    "is_expandable",
    "frames",
    "blocks",
)
BLOCK_KEYS = ("address", "size", "requested_size", "state", "frames")
ENTRY_KEYS = ("action", "addr", "size", "stream", "time_us", "pool_id", "frames")
SETTINGS = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "max_split_size",
    "garbage_collection_threshold",
    "expandable_segments",
    "pinned_num_register_threads",
    "release_lock_on_cudamalloc",
    "pinned_use_cuda_host_register",
    "roundup_power2_divisions",
)
PLAN = describe_plan("step", 4096, 1024, [("w", 0, 512, 0, 3), ("loss", 512, 4, 2, 3)])
MIB = 1 << 20


class Events:
    """Work of a stream ends when the test says so."""

    def __init__(self):
        self.pending = set()

    def record(self, stream):
        event = object()
        self.pending.add(event)
        return event

    def is_done(self, event):
        return event not in self.pending

    def synchronize(self, event):
        self.pending.discard(event)

    def release(self, event):
        self.pending.discard(event)


def run_at_random(allocator, rng, operations):
    """Allocates and frees on two streams and in a private pool; some blocks await a stream."""
    pool_id = PoolId(7)
    allocator.pools.create_or_increment(pool_id)
    live = []
    for _ in range(operations):
        choice = rng.random()
        if choice < 0.55 or not live:
            in_pool = rng.random() < 0.2
            if in_pool:
                allocator.pools.begin(pool_id, lambda stream: True)
            nbytes = rng.choice([100, 5000, 600_000, 3 * MIB, 12 * MIB])
            live.append(allocator.allocate(nbytes, rng.randrange(2)))
            if in_pool:
                allocator.pools.end(pool_id)
        elif choice < 0.95:
            block = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.3:
                allocator.record_stream(block, 5)
            allocator.free(block)
        else:
            allocator.empty_cache()


def make_recorded(seed=0, operations=200, **settings):
    allocator = CachingAllocator(HostProvider(), events=Events())
    allocator.history.record(**settings)
    run_at_random(allocator, random.Random(seed), operations)
    return allocator


@pytest.fixture(scope="module")
def snapshot():
    allocator = make_recorded()
    return build_snapshot([allocator], AllocatorConfig(), plans=[PLAN])


def test_every_key_of_the_format_is_there(snapshot):
    assert list(snapshot) == [
        "segments",
        "device_traces",
        "allocator_settings",
        "external_annotations",
        "tracegraph_plans",
    ]
    assert snapshot["segments"]
    for segment in snapshot["segments"]:
        assert sorted(segment) == sorted(SEGMENT_KEYS)
        assert all(sorted(block) == sorted(BLOCK_KEYS) for block in segment["blocks"])
    (trace,) = snapshot["device_traces"]
    assert all(sorted(entry) == sorted(ENTRY_KEYS) for entry in trace)
    assert {entry["pool_id"] for entry in trace} == {(0, 0), (7, 0)}
    assert {segment["segment_pool_id"] for segment in snapshot["segments"]} == {(0, 0), (7, 0)}
    states = {block["state"] for segment in snapshot["segments"] for block in segment["blocks"]}
    assert states == {"active_allocated", "active_pending_free", "inactive"}
    assert tuple(snapshot["allocator_settings"]) == SETTINGS
    assert snapshot["tracegraph_plans"] == [PLAN]


def test_settings_are_those_of_the_text():
    text = "max_split_size_mb:64,roundup_power2_divisions:[64:8,128:2,>:1]"
    settings = describe_settings(parse_alloc_conf(text))
    assert settings["PYTORCH_CUDA_ALLOC_CONF"] == text
    assert settings["max_split_size"] == 64 * MIB
    divisions = settings["roundup_power2_divisions"]
    assert list(divisions) == [str(2**power) for power in range(16)]
    assert [divisions[key] for key in ("1", "64", "128", "256")] == [8, 8, 2, 1]


def test_devices_without_an_allocator_get_an_empty_trace():
    allocator = CachingAllocator(HostProvider(), device=2)
    allocator.history.record()
    block = allocator.allocate(100)
    snapshot = build_snapshot([allocator], AllocatorConfig())
    assert [len(trace) for trace in snapshot["device_traces"]] == [0, 0, 2]
    assert view(snapshot)[2]["sizes"] == [0, 100]
    allocator.free(block)
    assert build_snapshot([], AllocatorConfig())["device_traces"] == [[]]


def test_one_pool_alone():
    snapshot = build_snapshot([make_recorded()], AllocatorConfig(), pool_id=PoolId(7))
    assert {segment["segment_pool_id"] for segment in snapshot["segments"]} == {(7, 0)}


def test_a_snapshot_is_noted_in_the_trace():
    allocator = make_recorded(operations=20)
    first = build_snapshot([allocator], AllocatorConfig())
    active = sum(segment["active_size"] for segment in first["segments"])
    last = build_snapshot([allocator], AllocatorConfig())["device_traces"][0][-1]
    assert (last["action"], last["addr"], last["size"]) == ("snapshot", 0, active)


def test_equal_stacks_are_one_list():
    allocator = CachingAllocator(HostProvider())
    allocator.history.record()
    blocks = [allocator.allocate(512) for _ in range(3)]
    trace = build_snapshot([allocator], AllocatorConfig())["device_traces"][0]
    assert len({id(entry["frames"]) for entry in trace}) == 1
    del blocks


@pytest.mark.parametrize("seed", range(6))
def test_the_viewer_reads_it(tmp_path, seed):
    allocator = make_recorded(seed, 300)
    allocator.history.record(max_entries=400 if seed % 2 else 2**63 - 1)
    run_at_random(allocator, random.Random(seed + 100), 60)
    path = tmp_path / "snapshot.pickle"
    write_snapshot(path, build_snapshot([allocator], AllocatorConfig(), plans=[PLAN]))
    check_opcodes(path.read_bytes())
    snapshot = read_snapshot(path)
    (device,) = view(snapshot)
    stats = allocator.statistics.to_dict()
    assert device["sizes"][-1] == stats["requested_bytes.all.current"]
    assert device["reserved"] == stats["reserved_bytes.all.current"]


def find_last(snapshot, action):
    trace = snapshot["device_traces"][0]
    return trace, max(i for i, entry in enumerate(trace) if entry["action"] == action)


def drop(action):
    def drop_last(snapshot):
        trace, place = find_last(snapshot, action)
        del trace[place]

    return drop_last


def repeat(action):
    def repeat_last(snapshot):
        trace, place = find_last(snapshot, action)
        trace.insert(place, dict(trace[place]))

    return repeat_last


def change_size(snapshot):
    snapshot["segments"][0]["blocks"][0]["size"] += 512


def change_state(snapshot):
    snapshot["segments"][0]["blocks"][0]["state"] = "active_awaiting_free"


def change_device(snapshot):
    snapshot["segments"][0]["device"] = 1


def forget_segment(snapshot):
    del snapshot["segments"][0]


@pytest.mark.parametrize(
    "change",
    [
        drop("segment_free"),
        drop("free_completed"),
        repeat("alloc"),
        repeat("segment_alloc"),
        repeat("free_completed"),
        change_size,
        change_state,
        change_device,
        forget_segment,
    ],
    ids=lambda change: change.__qualname__,
)
def test_the_viewer_of_these_tests_finds_a_planted_fault(snapshot, change):
    changed = copy.deepcopy(snapshot)
    view(copy.deepcopy(changed))
    change(changed)
    with pytest.raises(ViewerError):
        view(changed)


@pytest.mark.parametrize(
    "value", [{1, 2}, b"bytes", PoolId(1), 2**70, complex(1, 2)], ids=lambda v: type(v).__name__
)
def test_the_viewer_of_these_tests_knows_no_other_opcodes(value):
    with pytest.raises(ViewerError):
        check_opcodes(pickle.dumps([value], protocol=4))
    with pytest.raises(ViewerError):
        check_opcodes(pickle.dumps([1], protocol=5))


@pytest.mark.parametrize("change", [change_size, change_state, change_device])
def test_an_unreadable_snapshot_is_not_written(tmp_path, snapshot, change):
    changed = copy.deepcopy(snapshot)
    change(changed)
    with pytest.raises(InternalError, match="would be unreadable"):
        write_snapshot(tmp_path / "x", changed)
    assert not (tmp_path / "x").exists()


def test_a_snapshot_is_noted_once():
    allocator = CachingAllocator(HostProvider())
    allocator.history.record()
    build_snapshot([allocator], allocator.config)
    assert [entry["action"] for entry in allocator.history.read_entries()] == ["snapshot"]
