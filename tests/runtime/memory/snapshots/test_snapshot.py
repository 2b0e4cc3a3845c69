"""Snapshots: their keys, their file as the web viewer reads it, and a reader that runs nothing.

Longer than 400 lines: its planted faults are one table over one small snapshot.
"""

import collections
import copy
import enum
import os
import pickle
import random

import pytest

from tests.oracles import error_lines
from tests.oracles.snapshot_viewer import ViewerError, check_opcodes, view
from tracegraph.runtime.errors import InternalError, TracegraphError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.config import AllocatorConfig, parse_alloc_conf
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.snapshots.plain_values import NotPlainError, to_plain
from tracegraph.runtime.memory.snapshots.snapshot import (
    build_snapshot,
    describe_plan,
    describe_settings,
    read_snapshot,
    write_snapshot,
)
from tracegraph.runtime.memory.snapshots.snapshot_check import find_problem

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


class Size(enum.IntEnum):
    SMALL = 512


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (PoolId(3), (3, 0)),
        (Size.SMALL, 512),
        (collections.OrderedDict(a=[True, None, 1.5, "x"]), {"a": [True, None, 1.5, "x"]}),
        ((1, [2, (3,)]), (1, [2, (3,)])),
    ],
)
def test_values_become_plain(value, plain):
    got = to_plain([value])[0]
    assert got == plain
    assert type(got) is type(plain)


@pytest.mark.parametrize("value", [{1}, b"x", object(), 1j, print])
def test_other_values_do_not(value):
    with pytest.raises(NotPlainError, match=type(value).__name__):
        to_plain({"key": [value]})


class RunsSystem:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def write_evil(kind, path):
    """Pickles that would touch a file when loaded in the ordinary way."""
    touch = f"touch {path}"
    return {
        "reduce": pickle.dumps({"segments": [RunsSystem(path)], "device_traces": []}),
        "old_reduce": pickle.dumps(RunsSystem(path), protocol=0),
        "inst": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'" + touch.encode() + b"'\no.",
        "stack_global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c"
        + bytes([len(touch)])
        + touch.encode()
        + b"\x85R.",
        "eval": b'cbuiltins\neval\n(S\'__import__("os").system("' + touch.encode() + b"\")'\ntR.",
        "build": b"\x80\x04cbuiltins\nobject\n)\x81}\x8c\x01ab.",
        "persistent": b"\x80\x04\x8c\x01xQ.",
        "set": pickle.dumps({"segments": [{1}], "device_traces": []}),
        "bytes": pickle.dumps({"segments": b"x", "device_traces": []}),
        "bytearray": pickle.dumps({"segments": bytearray(b"x")}, protocol=5),
        "complex": pickle.dumps({"segments": 1j}),
    }[kind]


EVIL = {
    "reduce": "posix.system",
    "old_reduce": "posix.system",
    "inst": "pickle opcode STRING",
    "obj": "os.system",
    "stack_global": "posix.system",
    "eval": "builtins.eval",
    "build": "builtins.object",
    "persistent": "pickle opcode BINPERSID",
    "set": "pickle opcode EMPTY_SET",
    "bytes": "pickle opcode SHORT_BINBYTES",
    "bytearray": "pickle opcode BYTEARRAY8",
    "complex": "builtins.complex",
}


@pytest.mark.parametrize("kind", EVIL)
def test_the_reader_runs_nothing_and_names_what_it_found(tmp_path, kind):
    touched = tmp_path / "touched"
    path = tmp_path / "evil.pickle"
    path.write_bytes(write_evil(kind, touched))
    with pytest.raises(TracegraphError) as caught:
        read_snapshot(path)
    assert not touched.exists()
    error_lines.match(
        caught.value,
        f"snapshot file {path} holds `{EVIL[kind]}`",
        f"reading {path}",
        "only plain values are read",
        "write it with tg.memory.dump_snapshot(path)",
    )


@pytest.mark.parametrize("kind", ["reduce", "inst", "stack_global"])
def test_an_ordinary_reader_would_have_run_it(tmp_path, kind):
    touched = tmp_path / "touched"
    pickle.loads(write_evil(kind, touched))
    assert touched.exists()


def nest(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def loop():
    value = {"segments": [], "device_traces": []}
    value["segments"].append(value)
    return value


GOOD_SEGMENT = {
    "device": 0,
    "address": 0,
    "total_size": 512,
    "stream": 0,
    "blocks": [{"size": 512, "state": "inactive"}],
}


def wrap(segment=None, entry=None, plan=None, **changes):
    """A snapshot with one segment, one entry and one plan, changed."""
    segment = GOOD_SEGMENT | (segment or {})
    entry = {"action": "alloc", "addr": 0, "size": 1, "stream": 0} | (entry or {})
    plans = [PLAN | (plan or {})]
    return {
        "segments": [segment],
        "device_traces": [[entry]],
        "tracegraph_plans": plans,
        **changes,
    }


WRONG = {
    "a list": ([], "it holds a list, not a dict"),
    "no keys": ({}, "segments is missing"),
    "no traces": ({"segments": []}, "device_traces is missing"),
    "text for segments": (wrap(segments="x"), "segments is a str, not a list"),
    "number for trace": (wrap(device_traces=[5]), "device_traces[0][0]: a int, not a dict"),
    "segment of no device": (wrap({"device": 1}), "segments[0]: device_traces has no entry 1"),
    "address of text": (wrap({"address": "0"}), "segments[0]: address is a str, not a int"),
    "gap": (wrap({"total_size": 1024}), "segments[0]: its blocks have 512 bytes together"),
    "state": (
        wrap({"blocks": [{"size": 512, "state": "free"}]}),
        "segments[0]: blocks[0]: state 'free' is none of",
    ),
    "no addr": (
        wrap(device_traces=[[{"action": "alloc", "size": 1, "stream": 0}]]),
        "device_traces[0][0]: addr is missing",
    ),
    "plan": (wrap(plan={"arena_bytes": None}), "tracegraph_plans[0]: arena_bytes is a NoneType"),
    "buffer": (wrap(plan={"buffers": [{}]}), "tracegraph_plans[0]: name is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plain_value_that_is_no_snapshot_is_refused(tmp_path, name):
    value, problem = WRONG[name]
    path = tmp_path / "file.pickle"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(TracegraphError) as caught:
        read_snapshot(path)
    assert caught.value.what == f"snapshot file {path} is not a snapshot"
    assert caught.value.why.startswith(problem)
    assert caught.value.anchor == "snapshot"


def test_the_smallest_snapshot_is_read(tmp_path):
    assert find_problem(wrap()) == ""
    path = tmp_path / "file.pickle"
    oom = {"action": "oom", "device_free": 5, "size": 1, "stream": 0}
    path.write_bytes(pickle.dumps({"segments": [GOOD_SEGMENT], "device_traces": [[oom]]}))
    assert read_snapshot(path)["segments"] == [GOOD_SEGMENT]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "is empty"),
        (pickle.dumps(wrap())[:-1], "is truncated"),
        (pickle.dumps(wrap())[: len(pickle.dumps(wrap())) // 2], "is truncated"),
        (b"<html>not found</html>", "is not a pickle (ValueError"),
        (b"\x80\x09.", "is not a pickle (ValueError"),
        (b"\x80\x04h\x05.", "is not a pickle (UnpicklingError"),
        (b"\x80\x04]r\xff\xff\xff\x07.", "is not a pickle (ValueError: value 3 is stored as"),
        (pickle.dumps(nest(200)), "holds `a value that holds itself or nests too deep`"),
        (pickle.dumps(loop()), "holds `a value that holds itself or nests too deep`"),
    ],
)
def test_broken_files_are_refused(tmp_path, data, what):
    path = tmp_path / "file.pickle"
    path.write_bytes(data)
    with pytest.raises(TracegraphError) as caught:
        read_snapshot(path)
    assert caught.value.what.startswith(f"snapshot file {path} {what}")


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "nowhere.pickle"
    with pytest.raises(TracegraphError) as caught:
        read_snapshot(path)
    assert caught.value.what == f"snapshot file {path} cannot be read"
    assert caught.value.why == "FileNotFoundError: No such file or directory"


def test_damaged_bytes_end_in_our_error_or_in_a_snapshot(tmp_path, snapshot):
    rng = random.Random(1)
    small = wrap()
    path = tmp_path / "file.pickle"
    refused = 0
    for _ in range(2000):
        data = bytearray(pickle.dumps(small, protocol=rng.randrange(6)))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            read_snapshot(path)
        except TracegraphError:
            refused += 1
    assert refused > 1000


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
