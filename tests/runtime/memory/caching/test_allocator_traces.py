"""Recordings of PyTorch's caching allocator, played against ours.

tests/gpu/test_allocator_vs_torch.py does the same live, with other traces.
"""

import dataclasses
import functools

import pytest

from tests.oracles.allocator_player import Player
from tests.oracles.allocator_traces import read_traces, write_traces
from tests.paths import DATA

FOLDER = DATA / "torch_allocator"
NAMES = {
    "pools": ["pools_13"],
    "captures": ["captures_reuse_2"],
    "pressure": ["max_split_rounding_gc", "gc_low"],
    "expandable": ["expandable_pools"],
    "directed": [
        *["lifecycle_512", "lifecycle_1mib", "lifecycle_1mib_512"],
        *["lifecycle_10mib_less", "lifecycle_10mib_more"],
        *["expandable_lifecycle_512", "expandable_lifecycle_1mib"],
        *["expandable_lifecycle_1mib_512", "expandable_lifecycle_10mib_less"],
        *["expandable_lifecycle_10mib_more", "capture_record", "capture_record_reuse"],
        *["mempool", "mempool_no_split", "mempool_use_on_oom"],
        *["checkpoint_0", "expandable_checkpoint", "oom_retry", "settings"],
    ],
}
# See Note [Forgotten uses] in tests/fakes/recorded_events.py.
FORGOTTEN_USES = {"pools_13": 1}
ALL = [(file, name) for file, names in NAMES.items() for name in names]


@functools.cache
def read_file(file):
    return {trace.name: trace for trace in read_traces(FOLDER / f"{file}.json.xz")}


def read_trace(name):
    (file,) = (file for file, names in NAMES.items() if name in names)
    return read_file(file)[name]


def play(trace):
    return [str(difference) for difference in Player(trace).play()]


def test_every_trace_is_listed():
    assert {path.name.partition(".")[0] for path in FOLDER.glob("*.xz")} == set(NAMES)
    assert {file: list(read_file(file)) for file in NAMES} == NAMES


@pytest.mark.parametrize("name", [name for _, name in ALL])
def test_ours_does_what_torch_did(name):
    trace = read_trace(name)
    player = Player(trace)
    assert [str(difference) for difference in player.play()] == []
    assert player.events.forgotten_uses == FORGOTTEN_USES.get(name, 0)


def test_the_random_traces_have_2000_operations_of_every_kind():
    long = [read_trace(name) for file, name in ALL if file != "directed"]
    assert all(len(trace.steps) >= 2000 for trace in long)
    kinds = {step.operation[0] for trace in long for step in trace.steps}
    wanted = {"alloc", "free", "record", "block", "unblock", "empty", "pool_begin", "pool_end"}
    wanted |= {"pool_release", "capture_begin", "capture_end", "fork", "launch", "graph_reset"}
    assert wanted <= kinds


# Each planted fault: the trace, and what changes in which step; then what must be reported there.


def find_step(trace, is_wanted):
    return next(index for index, step in enumerate(trace.steps) if is_wanted(step))


def change_step(trace, index, **changes):
    steps = list(trace.steps)
    steps[index] = steps[index]._replace(**changes)
    return dataclasses.replace(trace, steps=tuple(steps))


def is_reuse(step):
    return step.operation[0] == "alloc" and [entry.action for entry in step.entries] == ["alloc"]


def move_address(trace):
    index = find_step(trace, is_reuse)
    return change_step(trace, index, result=trace.steps[index].result + 512), index


def forget_segment(trace):
    index = find_step(trace, lambda step: "segment_alloc" in {e.action for e in step.entries})
    entries = trace.steps[index].entries[1:]
    return change_step(trace, index, entries=entries), index


def add_segment(trace):
    index = find_step(trace, is_reuse)
    entry = trace.steps[index].entries[0]._replace(action="segment_alloc", nbytes=2 << 20)
    return change_step(trace, index, entries=(entry, *trace.steps[index].entries)), index


def raise_peak(trace):
    index = find_step(trace, is_reuse)
    changes = {**trace.steps[index].changes, "active_bytes.all.peak": 1 << 40}
    return change_step(trace, index, changes=changes), index


def swap_history(trace):
    index = find_step(trace, lambda step: len(step.entries) == 2)
    return change_step(trace, index, entries=trace.steps[index].entries[::-1]), index


def run_out(trace):
    index = find_step(trace, is_reuse)
    return change_step(trace, index, result=("oom", "")), index


def lose_block(trace):
    index = min(trace.segments)
    first, *rest = trace.segments[index]
    segments = {**trace.segments, index: ((*first[:9], first[9][1:]), *rest)}
    return dataclasses.replace(trace, segments=segments), index


def lose_segment(trace):
    index = min(trace.segments)
    segments = {**trace.segments, index: trace.segments[index][1:]}
    return dataclasses.replace(trace, segments=segments), index


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (move_address, "result"),
        (forget_segment, "provider"),
        (add_segment, "provider"),
        (raise_peak, "active_bytes.all.peak"),
        (swap_history, "history"),
        (run_out, "result"),
        (lose_block, "segments"),
        (lose_segment, "segments"),
    ],
)
def test_a_planted_fault_is_reported_where_it_is(plant, what):
    trace, index = plant(read_trace("max_split_rounding_gc"))
    differences = Player(trace).play()
    assert differences[0].number == index
    assert what in [difference.what for difference in differences if difference.number == index]


# An allocator with one rule of another kind cannot pass.
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("pools_13", "max_split_size_mb:20"),
        ("pools_13", "roundup_power2_divisions:4"),
        ("pools_13", "large_segment_size_mb:64"),
        ("max_split_rounding_gc", "max_split_size_mb:40,garbage_collection_threshold:0.6"),
        ("max_split_rounding_gc", "max_split_size_mb:40,max_non_split_rounding_mb:64"),
        ("gc_low", "garbage_collection_threshold:0.7"),
        ("capture_record_reuse", ""),
    ],
)
def test_other_settings_are_noticed(name, settings):
    assert play(dataclasses.replace(read_trace(name), settings=settings)) != []


def test_a_block_that_is_served_too_early_is_noticed(monkeypatch):
    monkeypatch.setattr(Player, "_play_record", lambda *_: "recorded")
    assert play(read_trace("pools_13")) != []


def test_a_file_holds_what_was_written(tmp_path):
    traces = [read_trace(name) for name in ("settings", "mempool", "oom_retry")]
    write_traces(tmp_path / "some.json.xz", traces, "no device")
    assert list(read_traces(tmp_path / "some.json.xz")) == traces


def test_statistics_that_do_not_add_up_are_kept(tmp_path):
    trace = read_trace("lifecycle_512")
    odd = {"active.all.current": 7, "active.small_pool.freed": 3, "segment.all.peak": 2, "x": -1}
    trace = change_step(trace, 0, changes=odd)
    write_traces(tmp_path / "odd.json.xz", [trace], "no device")
    assert read_traces(tmp_path / "odd.json.xz") == (trace,)
    assert [line for line in play(trace) if "operation 0" in line and ": x" in line]


def test_a_file_of_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.oracles.allocator_traces.FORMAT", 2)
    write_traces(tmp_path / "next.json.xz", [], "no device")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has format 2, wanted 1"):
        read_traces(tmp_path / "next.json.xz")
