"""Homes: which graphs join one, what of their arena is absent, and what a home gives up."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, floats, kernel, make_device, place
from tests.fakes.definitions import make_definition, make_stage, take_results
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.arrays.state_home import StateHome, StateHomes
from tracegraph.runtime.definition.graph import ArenaSize, GraphDefinition
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.replay import Replay


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    return make_device(monkeypatch)


def define(offsets: dict[str, int], kept_bytes: int = 4096) -> GraphDefinition:
    """Returns a graph that doubles its state ``s``, and adds x to it for a result ``y``."""
    stage = make_stage(kernel("double", "s", "s"), kernel("add", "s x", "y"), edges=[(0, 1)])
    definition = make_definition(
        stage, inputs="s x", outputs="s y", residents=["s"], offsets=offsets
    )
    return dataclasses.replace(definition, arena_size=ArenaSize(kept_bytes))


FIRST = define({"s": 0, "x": 256, "y": 512})
BEHIND = define({"x": 0, "s": 256, "y": 512})
LAST = define({"x": 0, "y": 256, "s": 512}, kept_bytes=768)


def call(replay: Replay, x: Any, state: Any = None) -> list[Any]:
    """Replays on x, and on the state that is there if no other is given."""
    replay.settle()
    replay.load([(1, x)] if state is None else [(0, state), (1, x)])
    replay.launch()
    return take_results(replay)


def join(device: CudaOnHost, *definitions: GraphDefinition) -> list[Replay]:
    pool = PrivatePool(new_pool_id(), device.allocator)
    first = Replay(definitions[0], device, pool, ArrayState.FRESH)
    rest = [Replay(each, device, pool, ArrayState.FRESH, first.home) for each in definitions[1:]]
    return [first, *rest]


@pytest.mark.parametrize("other", [FIRST, BEHIND, LAST], ids=["first", "behind", "last"])
def test_graphs_double_one_state_in_turns(device: CudaOnHost, other: GraphDefinition) -> None:
    one, two = join(device, FIRST, other)
    assert two.home is one.home
    assert two.buffers["s"] is one.buffers["s"]
    assert two.arena.absent_bytes == 256
    assert all(start != one.buffers["s"].address for start, _ in two.arena.ranges)
    call(one, place([5] * 4), place([1] * 4))
    for count, replay in enumerate((two, one, two, two), start=2):
        state, y = call(replay, place([5] * 4))
        np.testing.assert_array_equal(state, [2**count] * 4)
        np.testing.assert_array_equal(y, [2**count + 5] * 4)


def test_state_in_two_pieces_is_not_cut_out(device: CudaOnHost) -> None:
    stage = make_stage(kernel("add", "s x", "s"), kernel("add", "t x", "t"))
    between = make_definition(
        stage,
        inputs="s t x",
        outputs="s t",
        residents=["s", "t"],
        offsets={"s": 0, "x": 256, "t": 512},
    )
    one, two = join(device, between, between)
    assert two.home is one.home
    assert two.arena.absent_bytes == 0


def test_a_graph_of_another_pool_has_a_home_of_its_own(device: CudaOnHost) -> None:
    one, _ = join(device, FIRST, FIRST)
    pool = PrivatePool(new_pool_id(), device.allocator)
    other = Replay(FIRST, device, pool, ArrayState.FRESH, one.home)
    assert other.home is not one.home
    assert other.buffers["s"] is not one.buffers["s"]


def test_what_is_held_keeps_its_value_when_the_home_is_vacated(device: CudaOnHost) -> None:
    one, two = join(device, FIRST, FIRST)
    state, y = call(one, place([5] * 4), place([1] * 4))
    one.home.vacate()
    assert two.shown is None
    call(two, place([5] * 4), place([7] * 4))
    np.testing.assert_array_equal(state, [2] * 4)
    np.testing.assert_array_equal(y, [7] * 4)


def test_values_at_home_are_copied_before_a_graph_writes_there(device: CudaOnHost) -> None:
    one, two = join(device, FIRST, FIRST)
    state, _ = call(one, place([5] * 4), place([1] * 4))
    assert one.holds(state)
    assert two.holds(state)
    # As x it would change while the graph runs.
    _, y = call(two, state, place([10] * 4))
    np.testing.assert_array_equal(y, [22] * 4)


def test_homes_are_found_as_long_as_a_graph_lives(device: CudaOnHost) -> None:
    homes = StateHomes()
    one, two = join(device, FIRST, FIRST)
    homes.keep("key", one.home)
    del one
    gc.collect()
    assert isinstance(homes.find("key"), StateHome)
    assert homes.find("other") is None
    del two
    gc.collect()
    assert homes.find("key") is None


def test_the_memory_of_a_home_goes_with_its_last_graph(device: CudaOnHost) -> None:
    reserved = device.allocator.statistics.all.reserved_bytes
    before = reserved.current
    one, two = join(device, FIRST, BEHIND)
    del one
    gc.collect()
    state, _ = call(two, floats([1] * 4), floats([3] * 4))
    np.testing.assert_array_equal(state, [6] * 4)
    del two, state, _
    gc.collect()
    assert reserved.current == before
