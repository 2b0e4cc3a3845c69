"""The recorder of PyTorch's allocator, run on a stand-in; and the operations that it performs."""

import collections

import pytest

from tests.fakes.recorded_events import RecordedEvents
from tests.fakes.torch_stand_in import StandIn, StandInGates, read_statistics
from tests.gpu.torch_allocator import Recorder, list_recordings
from tests.oracles.allocator_operations import MIB, make_random
from tests.oracles.allocator_player import Player
from tests.oracles.allocator_traces import read_traces, write_traces

RECORDINGS = {
    recording.name: recording for file in list_recordings().values() for recording in file
}
# The stand-in has no segments that grow, and sleeps until it is woken.
RECORDABLE = [
    name for name, recording in RECORDINGS.items() if "expandable" not in recording.settings
]


@pytest.fixture
def recorder():
    torch = StandIn()
    return Recorder(torch, StandInGates(torch))


def record(recorder, name):
    each = RECORDINGS[name]
    return recorder.record(each.name, each.settings, each.operations)


def play(trace):
    return [str(difference) for difference in Player(trace).play()]


@pytest.mark.parametrize("name", RECORDABLE)
def test_what_was_recorded_plays_without_a_difference(recorder, name):
    trace = record(recorder, name)
    assert len(trace.steps) == len(RECORDINGS[name].operations)
    assert play(trace) == []
    statistics = recorder._torch.allocator.statistics
    assert read_statistics(statistics) == statistics.to_dict()


def test_the_recorder_leaves_no_memory_behind(recorder):
    trace = recorder.record("pools", "", RECORDINGS["pools_13"].operations)
    assert trace.segments[len(trace.steps)] == ()
    again = recorder.record("again", "", RECORDINGS["mempool"].operations)
    assert not any(again.baseline[key] for key in again.baseline if key.endswith(".current"))


@pytest.mark.parametrize(
    ("before", "name"),
    [
        ("graph_capture_record_stream_reuse:True", "capture_record"),
        ("large_segment_size_mb:64", "lifecycle_10mib_less"),
        ("max_non_split_rounding_mb:4000", "max_split_rounding_gc"),
    ],
)
def test_settings_end_with_their_trace(recorder, before, name):
    recorder.record("before", before, [])
    assert play(record(recorder, name)) == []
    recorder.record("before", "", [("settings", before)])
    assert play(record(recorder, name)) == []


def test_the_stand_in_keeps_settings_as_pytorch_does():
    torch = StandIn()
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:64,max_split_size_mb:80")
    torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:[64:8,>:1]")
    config = torch.allocator.config
    assert (config.large_segment_bytes, config.max_split_bytes) == (64 * MIB, None)
    assert config.find_divisions(32 * MIB) == 8
    torch._C._accelerator_setAllocatorSettings("")
    config = torch.allocator.config
    assert (config.large_segment_bytes, config.find_divisions(32 * MIB)) == (64 * MIB, 0)


# What depends on chance in PyTorch.


def forget_uses(uses, monkeypatch):
    """Drops the uses of every block that is freed during a capture, as if noted long before."""
    defer = uses.defer

    def defer_forgetful(block):
        if uses.is_capturing:
            uses._uses_in_captures[block] = set(block.stream_uses)
        defer(block)

    monkeypatch.setattr(uses, "defer", defer_forgetful)


# Blocks 0 to 5 lie side by side. When 6 is allocated, 1 and 4 are put back. With 1 first, which
# joins 0 and 2, there are never more pieces than before; with 4 first there is one more.
ORDER_SHOWS = [
    *(("alloc", block, 512, 0) for block in range(6)),
    *(("record", 1, 1), ("record", 4, 1), ("free", 0), ("free", 2), ("free", 4)),
    *(("pool_new", 0), ("pool_begin", 0), ("free", 1), ("pool_end", 0), ("pool_release", 0)),
    *(("reset_peak",), ("alloc", 6, 512, 0), ("free", 3), ("free", 5), ("free", 6), ("empty",)),
]
PEAK = "inactive_split.all.peak"


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_what_pytorch_forgot_shows_in_the_order(is_forgotten, monkeypatch):
    torch = StandIn()
    if is_forgotten:
        forget_uses(torch.allocator._uses, monkeypatch)
    trace = Recorder(torch, StandInGates(torch)).record("order", "", ORDER_SHOWS)
    player = Player(trace)
    assert [str(difference) for difference in player.play()] == []
    assert player.events.forgotten_uses == is_forgotten
    changes = [step.changes.get(PEAK, 0) for step in trace.steps]
    assert changes[ORDER_SHOWS.index(("alloc", 6, 512, 0))] == (not is_forgotten)


def test_an_order_that_is_not_followed_shows(monkeypatch):
    torch = StandIn()
    forget_uses(torch.allocator._uses, monkeypatch)
    trace = Recorder(torch, StandInGates(torch)).record("order", "", ORDER_SHOWS)
    monkeypatch.setattr(RecordedEvents, "_arrange_queues", lambda *_: None)
    assert {difference.what for difference in Player(trace).play()} == {
        "inactive_split.all.peak",
        "inactive_split.small_pool.peak",
    }


@pytest.mark.parametrize("seed", range(2))
def test_uses_that_pytorch_forgot_make_no_difference(seed, monkeypatch):
    torch = StandIn()
    forget_uses(torch.allocator._uses, monkeypatch)
    kinds = ("record", "block", "pools")
    operations = make_random(1000 + seed, 2000, streams=(0, 1), kinds=kinds)
    trace = Recorder(torch, StandInGates(torch)).record("forgetful", "", operations)
    player = Player(trace)
    assert [str(difference) for difference in player.play()] == []
    assert player.events.forgotten_uses


def test_a_recording_survives_its_file(recorder, tmp_path):
    trace = record(recorder, "captures_reuse_2")
    write_traces(tmp_path / "one.json.xz", [trace], "stand-in")
    assert read_traces(tmp_path / "one.json.xz") == (trace,)


def test_an_operation_that_fails_is_recorded_as_such(recorder):
    operations = [("alloc", 0, 1 << 50, 0), ("free", 0), ("settings", "foo:1"), ("alloc", 1, 1, 0)]
    trace = recorder.record("failures", "", [*operations, ("free", 1)])
    assert [step.result[0] for step in trace.steps[:3]] == ["oom", "skipped", "error"]
    assert isinstance(trace.steps[3].result, int)
    assert play(trace) == []


# The operations.

KINDS = ("record", "block", "pools", "captures")


@pytest.mark.parametrize("seed", range(4))
def test_equal_seeds_give_equal_operations(seed):
    assert make_random(seed, 300, kinds=KINDS) == make_random(seed, 300, kinds=KINDS)
    assert make_random(seed, 300, kinds=KINDS) != make_random(seed + 1, 300, kinds=KINDS)


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_are_well_formed(seed):
    limit_bytes = 300 * MIB
    streams = (0, 1, 3, 4)
    operations = make_random(seed, 2000, streams=streams, kinds=KINDS, limit_bytes=limit_bytes)
    live, blocked, uses, open_pools = {}, set(), collections.Counter(), []
    for name, *arguments in operations:
        if name == "alloc":
            block, nbytes, stream = arguments
            assert block not in live
            assert stream in streams
            live[block] = nbytes
            assert sum(live.values()) <= limit_bytes
        elif name in ("free", "record", "launch"):
            assert arguments[0] in live
            live.pop(arguments[0] if name == "free" else None, None)
        elif name in ("block", "unblock"):
            assert (arguments[0] in blocked) == (name == "unblock")
            blocked ^= {arguments[0]}
        elif name == "pool_begin":
            uses[arguments[0]] += 1
            open_pools.append(arguments[0])
        elif name == "pool_end":
            assert open_pools.pop() == arguments[0]
        elif name == "pool_release":
            uses[arguments[0]] -= 1
            assert uses[arguments[0]] >= 0
        elif name == "empty":
            # Emptying the cache waits for all streams.
            assert not blocked
    assert (live, blocked, open_pools, +uses) == ({}, set(), [], collections.Counter())


def test_only_the_kinds_that_are_asked_for_occur():
    names = {operation[0] for operation in make_random(1, 2000)}
    assert names == {"alloc", "free", "empty", "reset_peak", "reset_accumulated"}
    names = {operation[0] for operation in make_random(1, 2000, kinds=("pools",), fraction=0.5)}
    assert names >= {"fraction", "pool_new", "pool_begin", "pool_end", "pool_release"}
    assert not names & {"record", "block", "capture_begin", "launch"}
