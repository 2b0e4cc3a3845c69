"""Replay: filling inputs, launching, and what becomes of results and leaves."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.definitions import (
    make_call,
    make_definition,
    make_replay,
    make_stage,
    replay_once,
    take_results,
)
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.definition.nodes import CallNode
from tracegraph.runtime.errors import OutOfMemoryError, StaleOutputError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.replay import Replay

jax.config.update("jax_platforms", "cpu")
X = np.arange(1, 5, dtype=np.float32)
MODES = pytest.mark.parametrize("is_checking", [False, True])


def make_step(**options: Any) -> Replay:
    """Returns a replay of ``s, x -> s + x (in place of s), s * x``."""
    node = make_call("a", lambda s, x: (s + x, s * x), "s x", "s y")
    definition = make_definition(make_stage(node), inputs="s x", outputs="s y", residents=["s"])
    return make_replay(definition, **options)


def load(replay: Replay, *updates: tuple[int, Any]) -> None:
    replay.settle()
    replay.load(updates)


def launch(replay: Replay) -> tuple[Any, Any]:
    """Launches as the captured function does, and returns leaf and result."""
    replay.settle()
    replay.launch()
    leaf, result = take_results(replay)
    return leaf, result


@MODES
def test_loaded_values_are_computed_with(is_checking: bool):
    replay = make_step(is_checking=is_checking)
    load(replay, (0, X), (1, X * 10))
    leaf, result = launch(replay)
    np.testing.assert_array_equal(leaf, X * 11)
    np.testing.assert_array_equal(result, X * X * 10)


@pytest.mark.parametrize(
    "value", [X, jnp.asarray(X), 3.0, True, np.float32(2)], ids=lambda value: type(value).__name__
)
def test_what_can_be_loaded(value: Any):
    replay = make_step()
    load(replay, (0, value), (1, np.zeros(4, np.float32)))
    leaf, _ = launch(replay)
    np.testing.assert_array_equal(leaf, np.broadcast_to(np.asarray(value, np.float32), 4))


def test_static_inputs_keep_their_address():
    replay = make_step()
    addresses = [buffer.address for buffer in replay.inputs]
    for value in (X, X + 1, X + 2):
        load(replay, (0, value), (1, value))
        launch(replay)
    assert [buffer.address for buffer in replay.inputs] == addresses


@MODES
def test_a_fresh_result_keeps_its_value(is_checking: bool):
    replay = make_step(is_checking=is_checking)
    load(replay, (0, X), (1, X))
    kept = [launch(replay)[1] for _ in range(4)]
    for count, result in enumerate(kept, start=1):
        np.testing.assert_array_equal(result, X * count * X)


def test_a_static_result_becomes_stale():
    replay = make_step(state=ArrayState.STATIC)
    load(replay, (0, X), (1, X))
    _, result = launch(replay)
    np.testing.assert_array_equal(result, X * X)
    launch(replay)
    with pytest.raises(StaleOutputError):
        np.asarray(result)


@MODES
def test_each_replay_has_leaves_of_its_own_and_deletes_the_last_ones(is_checking: bool):
    replay = make_step(is_checking=is_checking)
    load(replay, (0, X), (1, X))
    first, _ = launch(replay)
    assert replay.is_leaf_of(first, 0)
    assert not replay.is_leaf_of(first, 1)
    second, _ = launch(replay)
    assert second is not first
    assert second.data_ptr() == replay.inputs[0].address
    assert first.is_deleted()
    assert not replay.is_leaf_of(first, 0)
    assert replay.is_leaf_of(second, 0)
    np.testing.assert_array_equal(second, X * 3)


@MODES
def test_leaves_that_are_shown_again_show_the_new_state(is_checking: bool):
    replay = make_step(is_checking=is_checking)
    load(replay, (0, X), (1, X))
    replay.launch()
    sets = [replay.make_leaves({}) for _ in range(2)]
    for count in range(2, 6):
        replay.show(sets[count % 2])
        leaf = sets[count % 2].leaves["s"]
        np.testing.assert_array_equal(leaf, X * count)
        replay.launch()
        assert sets[1 - count % 2].leaves["s"].is_deleted()
        assert leaf.is_deleted()


def test_values_that_leaves_keep_are_dropped():
    replay = make_step()
    load(replay, (0, X), (1, X))
    leaf, _ = launch(replay)
    shown = replay.shown
    assert shown is not None
    value = weakref.ref(leaf.jax())
    assert value() is not None
    shown.drop_values()
    assert value() is None
    np.testing.assert_array_equal(leaf, X * 2)


@MODES
def test_a_leaf_is_detached_when_its_input_gets_another_value(is_checking: bool):
    replay = make_step(is_checking=is_checking)
    load(replay, (0, X), (1, X))
    old, _ = launch(replay)
    load(replay, (0, X * 100))
    new, _ = launch(replay)
    assert new is not old
    assert not replay.is_leaf_of(old, 0)
    np.testing.assert_array_equal(old, X * 2)
    np.testing.assert_array_equal(new, X * 101)


def test_a_deleted_leaf_is_replaced_by_a_new_one():
    replay = make_step()
    load(replay, (0, X), (1, X))
    old, _ = launch(replay)
    old.delete()
    assert not replay.is_leaf_of(old, 0)
    new, _ = launch(replay)
    assert new is not old
    np.testing.assert_array_equal(new, X * 3)


@MODES
def test_values_of_the_same_arena_are_read_before_any_is_written(is_checking: bool):
    swap = make_call("a", lambda s, r: (s + 0, r + 0), "s r", "s r")
    definition = make_definition(
        make_stage(swap), inputs="s r", outputs="s r", residents=["s", "r"]
    )
    replay = make_replay(definition, is_checking=is_checking)
    load(replay, (0, X), (1, X * 10))
    one, other = launch(replay)
    load(replay, (0, other), (1, one))
    new_one, new_other = launch(replay)
    np.testing.assert_array_equal(new_one, X * 10)
    np.testing.assert_array_equal(new_other, X)


def test_a_result_that_is_not_held_is_not_copied():
    replay = make_step(is_checking=True)
    load(replay, (0, X), (1, X))
    snapshots = 0
    snapshot = type(replay.buffers["y"]).snapshot

    def count(buffer: Any) -> Any:
        nonlocal snapshots
        snapshots += 1
        return snapshot(buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(replay.buffers["y"]), "snapshot", count)
        launch(replay)
        launch(replay)
        assert snapshots == 0
        _, kept = launch(replay)
        launch(replay)
        assert snapshots == 1
    np.testing.assert_array_equal(kept, X * 3 * X)


def test_generations_count_launches():
    replay = make_step()
    load(replay, (0, X), (1, X))
    for count in (1, 2, 3):
        launch(replay)
        assert replay.clock.generation == count


def test_copies_of_results_are_private():
    node = make_call("a", lambda x: x + 1, "x", "y")
    replay = make_replay(make_definition(make_stage(node)))
    (first,) = replay_once(replay, X)
    (second,) = replay_once(replay, X * 2)
    np.testing.assert_array_equal(first, X + 1)
    np.testing.assert_array_equal(second, X * 2 + 1)


def test_stages_run_in_order():
    order: list[str] = []

    def note(word: str) -> CallNode:
        return CallNode(word, lambda x: order.append(word) or (), ("x",), ())

    stages = [make_stage(note(word), is_captured=False) for word in ("one", "two", "three")]
    replay_once(make_replay(make_definition(*stages, outputs="x")), X)
    assert order == ["one", "two", "three"]


def test_a_definition_without_stages_hands_its_input_out():
    replay = make_replay(make_definition(outputs="x"))
    (first,) = replay_once(replay, X)
    kept = replay.make_taker(0)()
    (second,) = replay_once(replay, X * 2)
    np.testing.assert_array_equal([first, second], [X, X * 2])
    np.testing.assert_array_equal(kept, X)


def test_arrays_outlive_the_replay():
    replay = make_step(is_checking=True)
    load(replay, (0, X), (1, X))
    leaf, result = launch(replay)
    assert isinstance(leaf, Array)
    gone = weakref.ref(replay)
    del replay
    gc.collect()
    assert gone() is None
    np.testing.assert_array_equal(leaf, X * 2)
    np.testing.assert_array_equal(result, X * X)


def test_the_arena_goes_back_when_replay_and_arrays_are_gone():
    pool = PrivatePool(new_pool_id(), CachingAllocator(HostProvider()))
    replay = make_step(pool=pool)
    load(replay, (0, X), (1, X))
    leaf, _ = launch(replay)
    assert pool.allocated_bytes > 0
    del replay
    gc.collect()
    assert pool.allocated_bytes > 0
    del leaf, _
    gc.collect()
    assert pool.allocated_bytes == 0


def make_double(**options: Any) -> Replay:
    return make_replay(
        make_definition(make_stage(make_call("a", lambda x: x * 2, "x", "y"))), **options
    )


def test_a_result_that_the_user_deleted_does_not_stop_the_next_replay():
    replay = make_double()
    load(replay, (0, X))
    replay.launch()
    replay.make_taker(0)().delete()
    np.testing.assert_array_equal(replay_once(replay, X + 1), [(X + 1) * 2])


def test_two_results_with_one_value_are_two_arrays():
    call = make_call("a", lambda x: x * 2, "x", "y")
    replay = make_replay(make_definition(make_stage(call), outputs="y y"))
    load(replay, (0, X))
    replay.launch()
    first, second = (replay.make_taker(index)() for index in range(2))
    jax.jit(lambda y: y + 1, donate_argnums=0)(first)
    np.testing.assert_array_equal(second, X * 2)


def test_a_failed_replay_makes_static_results_stale():
    fails: list[bool] = []

    def work(x: Any) -> tuple[()]:
        if fails:
            raise ZeroDivisionError("in eager code")
        return ()

    call = make_call("a", lambda x: x * 2, "x", "y")
    eager = make_stage(CallNode("e", work, ("x",), ()), is_captured=False)
    replay = make_replay(make_definition(make_stage(call), eager), ArrayState.STATIC)
    load(replay, (0, X))
    replay.launch()
    result = replay.make_taker(0)()
    load(replay, (0, X * 10))
    fails.append(True)
    with pytest.raises(ZeroDivisionError):
        replay.launch()
    with pytest.raises(StaleOutputError):
        np.asarray(result)


def test_no_room_for_the_arena():
    pool = PrivatePool(new_pool_id(), CachingAllocator(HostProvider(limit_bytes=1024)))
    with pytest.raises(OutOfMemoryError, match="out of memory: tried"):
        make_step(pool=pool)
    assert pool.reserved_bytes == 0
