"""What may follow a read is loaded while the device computes it: a CudaDevice over host memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.breaks import branching_graph
from tracegraph.replaying.loaded_ahead import LoadedAhead
from tracegraph.replaying.replayable_graph import ReplayableGraph
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.cuda import buffer
from tracegraph.runtime.streams.stream_capture import thread_state

UP, DOWN = (
    np.linspace(1.0, 2.0, 64, dtype=np.float32),
    np.linspace(-2.0, -1.0, 64, dtype=np.float32),
)


def branch(state: Any, x: Any) -> Any:
    hidden = x * 3
    if hidden.sum() > 0:
        return state + hidden * x, state.sum()
    return state - 2 * hidden, (hidden * x).sum()


class Trained:
    """A captured function of which both ways are known, with its state."""

    def __init__(self) -> None:
        self.captured: Any = tg.capture(branch, mode="partial", donate_argnums=0)
        self.state: Any = jnp.zeros(64)
        for x in (UP, UP, DOWN, UP):
            self.call(x)

    def call(self, values: Any) -> None:
        """Makes a call, and holds it against plain Python."""
        state, x = np.array(self.state), jnp.array(values)
        wanted = branch(jnp.asarray(state), x)
        self.state, result = self.captured(self.state, x)
        np.testing.assert_allclose(self.state, wanted[0], rtol=1e-5)
        np.testing.assert_allclose(result, wanted[1], rtol=1e-4)

    def list_graphs(self) -> list[Any]:
        nodes = self.captured._latest.list_nodes()
        return [node.part.find() for _, node in nodes]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.setattr(thread_state, "streams", [])
    # Memory of the host is less aligned than that of a GPU.
    monkeypatch.setattr(buffer, "ALIGNMENT", 1)
    # The work of this device is done when a call returns; here it seems to take a while.
    monkeypatch.setattr(Array, "is_ready", lambda _: False)
    capture_for_gpu(monkeypatch)
    return Trained()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each part that is loaded ahead: whether it could be."""
    found: list[bool] = []
    load = ReplayableGraph.load_ahead

    def note(graph: ReplayableGraph, args: Any) -> bool:
        found.append(load(graph, args))
        return found[-1]

    monkeypatch.setattr(ReplayableGraph, "load_ahead", note)
    return found


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of a loaded part: whether there was nothing left to load."""
    found: list[bool] = []
    take = LoadedAhead.take

    def note(ahead: LoadedAhead, args: Any, generation: int) -> bool:
        found.append(take(ahead, args, generation))
        return found[-1]

    monkeypatch.setattr(LoadedAhead, "take", note)
    return found


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is called in turn while the host waits for a value."""
    actions: list[Any] = []
    fetch = branching_graph.fetch

    def wait(*args: Any) -> Any:
        if actions:
            actions.pop(0)()
        return fetch(*args)

    monkeypatch.setattr(branching_graph, "fetch", wait)
    yield actions
    assert actions == []


def test_the_way_that_follows_is_only_launched(
    trained: Trained, loads: list[bool], takes: list[bool]
) -> None:
    for x in (UP, DOWN, DOWN, UP):
        trained.call(x)
    assert loads == [True] * 8
    # The other way of the call before is not loaded any more: nothing is taken for it.
    assert takes == [True] * 4


def test_the_most_frequent_way_is_loaded_first(
    trained: Trained, loads: list[bool], monkeypatch: pytest.MonkeyPatch, takes: list[bool]
) -> None:
    ready = iter([False, True])
    monkeypatch.setattr(Array, "is_ready", lambda _: next(ready))
    trained.call(UP)
    assert (loads, takes) == ([True], [True])


def test_nothing_is_loaded_for_a_value_that_is_there(
    trained: Trained, loads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Array, "is_ready", lambda _: True)
    trained.call(DOWN)
    assert loads == []


def test_a_call_in_between_takes_what_was_loaded(
    trained: Trained, waits: list[Any], takes: list[bool]
) -> None:
    def call_other() -> None:
        # Of another state, which is copied in: the leaf of this one gets a value of its own.
        other, _ = trained.captured(jnp.ones(64), jnp.array(DOWN))
        np.testing.assert_allclose(other, branch(jnp.ones(64), DOWN)[0])

    waits.append(call_other)
    trained.call(UP)
    assert takes[-1] is False
    trained.call(UP)
    assert takes[-1] is True


def test_what_was_deleted_in_between_is_an_error(trained: Trained, waits: list[Any]) -> None:
    state, x = trained.state, jnp.array(UP)
    kept = np.array(state)
    waits.append(x.delete)
    with pytest.raises(tg.InternalError, match="the arguments changed while they were checked"):
        trained.captured(state, x)
    np.testing.assert_array_equal(state, kept)
    trained.call(UP)
    trained.call(DOWN)


def test_an_interrupt_in_between_leaves_nothing_loaded(trained: Trained, waits: list[Any]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    waits.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trained.call(UP)
    assert [graph.ahead.args for graph in trained.list_graphs()] == [None] * 3
    trained.call(DOWN)


def test_ways_that_are_not_taken_hold_no_argument(trained: Trained, loads: list[bool]) -> None:
    x = jnp.array(DOWN)
    held = weakref.ref(x)
    trained.state, _ = trained.captured(trained.state, x)
    assert loads == [True, True]
    del x
    gc.collect()
    assert held() is None


def test_a_graph_that_was_released_in_between_is_made_again(
    trained: Trained, waits: list[Any], takes: list[bool]
) -> None:
    waits.append(trained.captured.release)
    trained.call(UP)
    assert takes == []
    for x in (DOWN, UP, UP):
        trained.call(x)
    assert takes[-1]


def test_ways_that_were_released_are_not_made_again_for_nothing(trained: Trained) -> None:
    trained.captured.release()
    trained.call(UP)
    parts = [node.part for _, node in trained.captured._latest.list_nodes()]
    assert sorted(part.kept.peek() is None for part in parts) == [False, False, True]
    trained.call(DOWN)
    assert all(part.kept.peek() is not None for part in parts)


def test_arguments_that_cannot_be_loaded_are_left_to_the_call(trained: Trained) -> None:
    *_, last = trained.list_graphs()
    x = jnp.array(UP)
    args = (x, jnp.array(UP), trained.state)[-last._arity :]
    assert last.load_ahead(args)
    x.delete()
    assert not last.load_ahead((x,) * last._arity)
    assert not last.load_ahead(args[1:])
    trained.call(UP)
    trained.call(DOWN)


def test_a_value_that_is_no_read_of_one_number_is_not_begun(trained: Trained) -> None:
    def scale(x: Any) -> Any:
        return x * np.asarray(x * 2)[0]

    captured: Any = tg.capture(scale, mode="partial")
    for _ in range(3):
        np.testing.assert_allclose(captured(jnp.array(UP)), UP * 2 * UP[0], rtol=1e-6)


def test_jax_decides_the_same(trained: Trained) -> None:
    """Python takes the same ways in 40 steps, of which each depends on those before."""
    state, x = jnp.array(np.array(trained.state)), jnp.array(UP)
    theirs = x
    for _ in range(40):
        trained.state, total = trained.captured(trained.state, x)
        x = jnp.sin(total + x)
        state, total = branch(state, theirs)
        theirs = jnp.sin(total + theirs)
    np.testing.assert_allclose(trained.state, state, rtol=1e-3, atol=1e-3)
    assert jax.device_get(x) == pytest.approx(jax.device_get(theirs), rel=1e-2, abs=1e-2)
