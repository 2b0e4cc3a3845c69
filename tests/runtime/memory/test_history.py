"""The history of an allocator: what is noted, which call stacks are kept, what is refused."""

import gc
import json
import time
import weakref

import pytest

from tests.oracles import error_lines
from tracegraph.runtime.errors import ConfigError, OutOfMemoryError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.history import History, format_frames
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.memory.providers.host import HostProvider


def make_allocator(**settings):
    allocator = CachingAllocator(HostProvider())
    allocator.history.record(**settings)
    return allocator


def allocate_here(allocator):
    return allocator.allocate(3000)


def free_here(allocator, block):
    allocator.free(block)


def empty_here(allocator):
    allocator.empty_cache()


def list_actions(history):
    return [entry["action"] for entry in history.read_entries()]


def test_off_until_it_is_turned_on():
    history = History()
    history.note("alloc", 512, 100, 0, (0, 0))
    assert not history.is_enabled
    assert history.capture_frames() is None
    assert history.capture_free_frames() is None
    assert history.read_entries() == []


def test_an_entry_has_the_keys_of_a_snapshot_file(monkeypatch: pytest.MonkeyPatch):
    history = History()
    history.record()
    clock = iter((5_000_999, 7_000_000))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    history.note("alloc", 512, 100, 7, PoolId(3), history.capture_frames())
    history.note("oom", 0, 900, 7, PoolId(3), device_free=450)
    alloc, oom = history.read_entries()
    assert (alloc.pop("time_us"), oom.pop("time_us")) == (5_000, 7_000)
    frame = alloc.pop("frames")[0]
    assert frame["filename"] == __file__
    assert frame["name"] == "test_an_entry_has_the_keys_of_a_snapshot_file"
    assert isinstance(frame["line"], int)
    assert alloc == {"action": "alloc", "addr": 512, "size": 100, "stream": 7, "pool_id": (3, 0)}
    assert oom == {"action": "oom", "device_free": 450, "size": 900, "stream": 7, "pool_id": (3, 0)}
    assert type(alloc["pool_id"]) is tuple


@pytest.mark.parametrize("context", ["all", "alloc", "state", None])
def test_the_context_says_which_stacks_the_trace_has(context):
    allocator = make_allocator(context=context)
    free_here(allocator, allocate_here(allocator))
    empty_here(allocator)
    text = json.dumps(allocator.history.read_entries())
    assert ("allocate_here" in text) == (context in ("all", "alloc"))
    assert ("free_here" in text) == (context == "all")
    assert ("empty_here" in text) == (context == "all")
    assert list_actions(allocator.history)[-1] == "segment_free"


@pytest.mark.parametrize("context", ["all", "alloc", "state", None])
@pytest.mark.parametrize("enabled", ["all", "state"])
def test_the_context_says_whether_a_block_has_a_stack(enabled, context):
    allocator = make_allocator(enabled=enabled, context=context)
    block = allocate_here(allocator)
    frames = allocator.snapshot()[0]["blocks"][0]["frames"]
    assert bool(frames) == (context is not None)
    if context is not None:
        assert frames[0] == {
            "filename": __file__,
            "line": allocate_here.__code__.co_firstlineno + 1,
            "name": "allocate_here",
        }
    allocator.free(block)


def test_state_keeps_no_trace():
    allocator = make_allocator(enabled="state")
    allocator.free(allocate_here(allocator))
    assert allocator.history.is_enabled
    assert allocator.history.read_entries() == []


def test_the_context_can_change_while_recording():
    allocator = make_allocator(context="all", stacks="python")
    blocks = [allocate_here(allocator)]
    allocator.history.record(context=None)
    blocks.append(allocate_here(allocator))
    allocator.history.record(context="all", stacks="all")
    blocks.append(allocate_here(allocator))
    entries = [e for e in allocator.history.read_entries() if e["action"] == "alloc"]
    assert ["frames" in entry for entry in entries] == [True, False, True]


def test_skipped_actions_are_left_out():
    allocator = make_allocator(skip_actions=["free_requested", "segment_alloc"])
    allocator.free(allocate_here(allocator))
    assert list_actions(allocator.history) == ["alloc", "free_completed"]


def test_the_oldest_entries_are_dropped():
    history = History()
    history.record(max_entries=3)
    for address in range(10):
        history.note("alloc", address, 1, 0, (0, 0))
    assert [entry["addr"] for entry in history.read_entries()] == [7, 8, 9]
    history.record(max_entries=2)
    assert [entry["addr"] for entry in history.read_entries()] == [8, 9]


@pytest.mark.parametrize(("again", "kept"), [({}, 1), ({"clear_history": True}, 0)])
def test_recording_anew_goes_on_unless_it_clears(again, kept):
    history = History()
    history.record()
    history.note("alloc", 512, 1, 0, (0, 0))
    history.record(**again)
    assert len(history.read_entries()) == kept


def test_the_end_of_recording_forgets():
    allocator = make_allocator()
    block = allocate_here(allocator)
    allocator.history.record(enabled=None)
    assert not allocator.history.is_enabled
    assert allocator.history.read_entries() == []
    allocator.free(block)
    assert allocator.history.read_entries() == []


def call_in_module(name):
    """Returns a function that calls its argument, and belongs to the module of this name."""
    namespace = {"__name__": name}
    exec("def inner(function): return function()", namespace)
    return namespace["inner"]


@pytest.mark.parametrize(
    ("module", "stacks", "top"),
    [
        ("tracegraph.runtime.memory.caching.caching_allocator", "all", "call_here"),
        ("tracegraph.user_memory.allocations", "all", "call_here"),
        ("tracegraph.runtime.replay", "all", "inner"),
        ("tracegraph.runtime.replay", "python", "call_here"),
        ("tracegraphs", "python", "inner"),
    ],
)
def test_which_of_our_own_frames_are_hidden(module, stacks, top):
    history = History()
    history.record(stacks=stacks)
    inner = call_in_module(module)

    def call_here():
        return inner(history.capture_frames)

    assert format_frames(call_here())[0]["name"] == top


def test_a_stack_holds_no_variable_alive():
    class Big:
        pass

    def allocate():
        big = Big()
        return history.capture_frames(), weakref.ref(big)

    history = History()
    history.record()
    frames, big = allocate()
    gc.collect()
    assert big() is None
    assert format_frames(frames)[0]["name"] == "allocate"


def test_out_of_memory_is_noted_with_what_the_device_had_left():
    allocator = CachingAllocator(HostProvider(8 << 20))
    allocator.history.record()
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(1 << 30)
    oom = next(e for e in allocator.history.read_entries() if e["action"] == "oom")
    assert (oom["size"], oom["device_free"]) == (1 << 30, 8 << 20)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"enabled": "yes"}, "enabled"),
        ({"enabled": True}, "enabled"),
        ({"context": "free"}, "context"),
        ({"stacks": "c++"}, "stacks"),
        ({"stacks": None}, "stacks"),
        ({"max_entries": 0}, "max_entries"),
        ({"max_entries": 2.5}, "max_entries"),
        ({"skip_actions": ["malloc"]}, "skip_actions"),
        ({"skip_actions": "malloc"}, "skip_actions"),
    ],
)
def test_wrong_settings_are_refused_and_change_nothing(settings, name):
    history = History()
    with pytest.raises(ConfigError) as caught:
        history.record(**settings)
    error_lines.match(
        caught.value,
        f"`{name}` of record_memory_history is ",
        "record_memory_history(",
        "it is ",
        f"pass {name} as ",
    )
    assert not history.is_enabled
