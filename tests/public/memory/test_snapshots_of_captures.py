"""Snapshots and history by the public names: plans of graphs, the user's lines, pictures."""

from __future__ import annotations

import gc
import json
import pathlib
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.oracles.error_lines import line
from tests.processes import run_copy
from tracegraph.runtime.memory.snapshots.snapshot import read_snapshot
from tracegraph.user_memory.live_plans import describe_live_plans

X = jnp.arange(1000.0)


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    gc.collect()
    tg.memory.empty_cache()
    yield
    tg.memory.record_memory_history(None)


def capture_two_regions() -> Any:
    """Returns a graph whose arena holds inputs, state, and a value between two regions."""

    def two_regions(state: Any, x: Any) -> Any:
        main, side = tg.current_stream(), tg.Stream()
        half = x / 2
        side.wait_stream(main)
        with tg.stream(side):
            rest = half + state
        main.wait_stream(side)
        return state + 1, rest * 2

    return tg.capture(two_regions, donate_argnums=0)


def read_entries(**options: Any) -> list[dict[str, Any]]:
    """Returns the trace of the first device as a snapshot file has it."""
    path = options["folder"] / "entries.pickle"
    tg.memory.dump_snapshot(path)
    return read_snapshot(path)["device_traces"][0]


def test_a_snapshot_has_the_plans_of_living_graphs(tmp_path: pathlib.Path) -> None:
    captured = capture_two_regions()
    captured(X * 1, X)
    tg.memory.dump_snapshot(tmp_path / "snapshot.pickle")
    snapshot = read_snapshot(tmp_path / "snapshot.pickle")
    arena = captured._latest.replay.arena
    (plan,) = (p for p in snapshot["tracegraph_plans"] if p["arena_address"] == arena.block.address)
    lowered = captured._latest.lowered.plan
    assert (plan["name"], plan["arena_bytes"]) == ("two_regions", lowered.arena_bytes)
    assert {each["name"] for each in plan["buffers"]} >= {"state", "x"}
    assert all(each["offset"] + each["bytes"] <= plan["arena_bytes"] for each in plan["buffers"])
    address = arena.block.address
    (segment,) = (each for each in snapshot["segments"] if each["address"] == address)
    assert tuple(segment["segment_pool_id"]) == captured.pool()


def test_the_file_is_what_the_viewer_of_pytorch_reads(tmp_path: pathlib.Path) -> None:
    tg.memory.record_memory_history()
    captured = capture_two_regions()
    captured(X * 1, X)
    path = tmp_path / "snapshot.pickle"
    tg.memory.dump_snapshot(str(path))
    # The library's own reader, as another program would use it.
    snapshot = pickle.loads(path.read_bytes())
    assert json.loads(json.dumps(snapshot)).keys() == snapshot.keys()
    for segment in snapshot["segments"]:
        assert {"device", "address", "total_size", "stream", "blocks"} <= segment.keys()
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    for entry in snapshot["device_traces"][0]:
        assert {"action", "size", "stream"} <= entry.keys()
        for frame in entry.get("frames", ()):
            assert {"filename", "line", "name"} <= frame.keys()


def test_plans_of_dropped_graphs_are_gone() -> None:
    captured = capture_two_regions()
    captured(X * 1, X)
    before = len(describe_live_plans())
    captured.reset()
    gc.collect()
    assert len(describe_live_plans()) == before - 1


def test_plans_may_be_listed_while_others_capture() -> None:
    wrong: list[RuntimeError] = []
    done = threading.Event()

    def list_plans() -> None:
        while not done.is_set():
            try:
                describe_live_plans()
            except RuntimeError as error:
                wrong.append(error)
                return

    thread = threading.Thread(target=list_plans)
    thread.start()
    kept = []
    for index in range(10):
        captured = tg.capture(lambda x, n=index: x + n, verify=False)
        captured(X)
        kept.append(captured)
    done.set()
    thread.join()
    assert wrong == []


def test_the_command_line_draws_the_snapshot_of_a_graph(tmp_path: pathlib.Path) -> None:
    tg.memory.record_memory_history()
    captured = capture_two_regions()
    captured(X * 1, X)
    path = tmp_path / "snapshot.pickle"
    tg.memory.dump_snapshot(path)
    done = run_copy(["-m", "tracegraph", "memory", path])
    assert (done.returncode, done.stderr) == (0, "")
    page = path.with_suffix(".html").read_text()
    assert f"wrote {path.with_suffix('.html')}" in done.stdout
    assert "two_regions" in page
    assert page.startswith("<!")


@pytest.mark.parametrize("stacks", ["all", "python"])
def test_the_history_of_a_capture_names_the_users_line(stacks: str, tmp_path: pathlib.Path) -> None:
    tg.memory.record_memory_history(stacks=stacks, clear_history=True)
    captured = tg.capture(lambda x: x * 2)
    wanted = line() + 1
    captured(X)
    entries = read_entries(folder=tmp_path)
    allocs = [each for each in entries if each["action"] in ("alloc", "segment_alloc")]
    assert [each["size"] for each in allocs] == [captured.pool_bytes] * 2
    for entry in allocs:
        assert tuple(entry["pool_id"]) == captured.pool()
        found = [(f["filename"], f["line"]) for f in entry["frames"]]
        assert (__file__, wanted) in found
        assert (found[0] == (__file__, wanted)) == (stacks == "python")


def test_what_finalisers_free_is_in_the_history(tmp_path: pathlib.Path) -> None:
    tg.memory.record_memory_history(clear_history=True)
    captured = tg.capture(lambda x: x * 2)
    captured(X)
    del captured
    gc.collect()
    actions = [each["action"] for each in read_entries(folder=tmp_path)]
    wanted = ["segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"]
    assert actions == wanted


@pytest.mark.parametrize(
    ("context", "alloc_has", "free_has"),
    [("all", True, True), ("alloc", True, False), ("state", False, False), (None, False, False)],
)
def test_which_stacks_are_kept(
    context: str | None, alloc_has: bool, free_has: bool, tmp_path: pathlib.Path
) -> None:
    tg.memory.record_memory_history(context=context, clear_history=True)
    allocated_at = line() + 1
    address = tg.memory.caching_allocator_alloc(5000)
    freed_at = line() + 1
    tg.memory.caching_allocator_delete(address)
    entries = {each["action"]: each for each in read_entries(folder=tmp_path)}

    def has(action: str, number: int) -> bool:
        return any(
            (f["filename"], f["line"]) == (__file__, number)
            for f in entries[action].get("frames", ())
        )

    assert has("alloc", allocated_at) == alloc_has
    assert has("free_requested", freed_at) == free_has
    # As in PyTorch: a free without a stack of its own shows that of the allocation.
    assert has("free_requested", allocated_at) == (alloc_has and not free_has)


def test_settings_of_the_history(tmp_path: pathlib.Path) -> None:
    tg.memory.record_memory_history(
        max_entries=3, clear_history=True, skip_actions=["segment_alloc"], device=0
    )
    for size in (100, 200, 300):
        tg.memory.caching_allocator_delete(tg.memory.caching_allocator_alloc(size))
    entries = read_entries(folder=tmp_path)
    assert [(each["action"], each["size"]) for each in entries] == [
        ("alloc", 300),
        ("free_requested", 300),
        ("free_completed", 300),
    ]
    tg.memory.record_memory_history("state", clear_history=True)
    address = tg.memory.caching_allocator_alloc(7)
    assert read_entries(folder=tmp_path) == []
    frames = [
        frame["filename"]
        for segment in tg.memory.memory_snapshot()
        for block in segment["blocks"]
        if block["address"] == address
        for frame in block["frames"]
    ]
    tg.memory.caching_allocator_delete(address)
    assert __file__ in frames


def test_the_error_of_full_memory_is_in_the_history(tmp_path: pathlib.Path) -> None:
    tg.memory.record_memory_history(clear_history=True)
    # The provider does not get to see it: it would have to ask the machine.
    free = tg.memory.mem_get_info()[0]
    with pytest.raises(tg.OutOfMemoryError):
        tg.memory.caching_allocator_alloc(free + (1 << 40))
    (entry,) = (each for each in read_entries(folder=tmp_path) if each["action"] == "oom")
    assert entry["size"] >= free
    assert entry["device_free"] > 0
    assert "addr" not in entry


def test_a_snapshot_cannot_be_written_into_nothing(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "none" / "snapshot.pickle", tmp_path):
        with pytest.raises(OSError, match=str(tmp_path)):
            tg.memory.dump_snapshot(path)
