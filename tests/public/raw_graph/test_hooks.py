"""Hooks of `tg.CUDAGraph`, of one graph and of all.

The names of cases (G42) are those of PyTorch's own tests of graphs. Hooks for all graphs may be
called with graphs of other tests: what is counted is of this test's graph.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.raw_graphs import N, assert_value, fill, record, use_device

MOMENTS = ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end")


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


@pytest.fixture
def everywhere() -> Iterator[Callable[[str, Any], Any]]:
    """Registers hooks for all graphs, and removes them at the end of the test."""
    handles = []

    def register(moment: str, hook: Any) -> Any:
        handles.append(getattr(tg, f"register_graph_{moment}_hook")(hook))
        return handles[-1]

    yield register
    for handle in handles:
        handle.remove()


def register_here(g: tg.CUDAGraph, moment: str, hook: Any) -> Any:
    name = "post_instantiate" if moment == "instantiate" else moment
    return getattr(g, f"register_{name}_hook")(hook)


def fail_with(error: Exception) -> Callable[[Any], None]:
    def fail(_: Any) -> None:
        raise error

    return fail


def capture_into(g: tg.CUDAGraph) -> Any:
    x = tg.static_input((N,))
    with tg.graph(g):
        return x + 1


@pytest.mark.parametrize("keep_graph", [False, True])
def test_g42_hooks_are_called_in_order_those_for_all_graphs_first(everywhere, keep_graph):
    seen = []
    g = tg.CUDAGraph(keep_graph=keep_graph)
    for moment in MOMENTS:
        register_here(g, moment, lambda graph, m=moment: seen.append((m, "own", graph is g)))
        everywhere(moment, lambda graph, m=moment: graph is g and seen.append((m, "all", True)))

    def expect(*moments: str) -> None:
        assert seen == [(m, whose, True) for m in moments for whose in ("all", "own")]
        seen.clear()

    y = capture_into(g)
    expect(*(MOMENTS[:2] if keep_graph else MOMENTS[:3]))
    g.replay()
    expect(*(MOMENTS[2:] if keep_graph else MOMENTS[3:]))
    g.replay()
    expect(*MOMENTS[3:])
    if keep_graph:
        g.instantiate()
        expect("instantiate")
        g.replay()
        expect(*MOMENTS[3:])
    assert_value(y, fill(1))


@pytest.mark.parametrize("whose", ["own", "all"])
def test_g42_the_end_hook_is_called_when_the_launch_raises(everywhere, whose, device):
    seen = []
    w = jnp.ones(N)
    g, y = record(lambda: w * 2)
    for moment in ("replay_start", "replay_end"):
        hook = lambda graph, m=moment: graph is g and seen.append(m)  # noqa: E731
        everywhere(moment, hook) if whose == "all" else register_here(g, moment, hook)
    g.replay()
    w.delete()
    with pytest.raises(tg.ReplayError, match="was deleted"):
        g.replay()
    assert seen == ["replay_start", "replay_end"] * 2
    assert_value(y, fill(2))


def test_a_replay_without_hooks_takes_the_short_way(everywhere):
    g, y = record(lambda: jnp.ones(N) + 1)
    g.replay()
    assert g._ready is not None
    handle = everywhere("replay_end", lambda graph: None)
    assert g._ready is None
    g.replay()
    assert g._ready is None
    handle.remove()
    g.replay()
    assert g._ready is not None
    own = g.register_replay_start_hook(lambda graph: None)
    g.replay()
    assert g._ready is None
    own.remove()
    g.replay()
    assert g._ready is not None
    assert_value(y, fill(2))


def test_errors_of_hooks_for_all_graphs_are_logged_and_break_nothing(everywhere, caplog):
    for moment in MOMENTS:
        everywhere(moment, fail_with(ValueError(f"mine at {moment}")))
    seen = []
    everywhere("replay_end", seen.append)
    with caplog.at_level(logging.WARNING, "tracegraph"):
        g = tg.CUDAGraph()
        y = capture_into(g)
        g.replay()
    for moment in MOMENTS:
        assert f"a hook of all graphs for {moment} failed" in caplog.text
        assert f"mine at {moment}" in caplog.text
    assert seen.count(g) == 1
    assert_value(y, fill(1))


@pytest.mark.parametrize("moment", ["capture_start", "capture_end"])
def test_errors_of_own_hooks_end_the_capture_and_pass(moment):
    g = tg.CUDAGraph()
    handle = register_here(g, moment, fail_with(KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        capture_into(g)
    assert not tg.is_current_stream_capturing()
    with pytest.raises(tg.ReplayError, match="holds no graph"):
        g.replay()
    with pytest.raises(tg.ReplayError, match="holds no graph"):
        g.get_graph_data()
    handle.remove()
    y = capture_into(g)
    g.replay()
    assert_value(y, fill(1))


def test_errors_of_own_hooks_of_a_replay_pass():
    g = tg.CUDAGraph()
    seen = []
    failing = g.register_post_instantiate_hook(fail_with(KeyError("made")))
    with pytest.raises(KeyError, match="made"):
        capture_into(g)
    failing.remove()
    g.replay()
    g.register_replay_end_hook(lambda graph: seen.append("end"))
    with (
        g.register_replay_start_hook(fail_with(KeyError("start"))),
        pytest.raises(KeyError, match="start"),
    ):
        g.replay()
    assert not seen
    with (
        g.register_replay_end_hook(fail_with(KeyError("end"))),
        pytest.raises(KeyError, match="end"),
    ):
        g.replay()
    g.replay()
    assert seen == ["end", "end"]


def test_what_a_start_hook_computes_is_recorded():
    x, g = tg.static_input((N,)), tg.CUDAGraph()
    made = []

    def compute(graph: Any) -> None:
        assert tg.is_current_stream_capturing()
        made.append(x * 10)

    g.register_capture_start_hook(compute)
    with tg.graph(g):
        y = x + 1
    x.copy_(fill(2))
    g.replay()
    assert_value(made[0], fill(20))
    assert_value(y, fill(3))


def test_a_graph_is_not_replayed_or_captured_by_the_hook_of_its_capture():
    errors = []
    g = tg.CUDAGraph()

    def use(graph: Any) -> None:
        for call in (graph.replay, graph.capture_begin, graph.reset):
            with pytest.raises(tg.CaptureError) as caught:
                call()
            errors.append(caught.value)

    g.register_capture_start_hook(use)
    g.register_capture_end_hook(use)
    y = capture_into(g)
    assert len(errors) == 6
    g.replay()
    assert_value(y, fill(1))


def test_hooks_stay_over_a_reset_and_hold_no_graph(everywhere):
    seen = []
    everywhere("replay_start", lambda graph: None)
    g = tg.CUDAGraph()
    handle = g.register_replay_end_hook(lambda graph: seen.append(1))
    capture_into(g)
    g.reset()
    capture_into(g)
    g.replay()
    assert seen == [1]
    reference = weakref.ref(g)
    del g
    assert reference() is None
    handle.remove()


def test_hooks_that_come_and_go_while_others_replay(everywhere):
    x = tg.static_input((N,))
    graphs = [record(lambda: x + 1) for _ in range(2)]
    counts: dict[int, int] = {}

    def count(graph: Any) -> None:
        counts[id(graph)] = counts.get(id(graph), 0) + 1

    def run(pair: Any) -> Any:
        g, y = pair
        for _ in range(50):
            g.replay()
        return np.asarray(y)

    with ThreadPoolExecutor(2) as pool:
        results = pool.map(run, graphs)
        for _ in range(50):
            everywhere("replay_start", count).remove()
        for result in results:
            assert_value(result, fill(1))
    everywhere("replay_start", count)
    before = {id(g): counts.get(id(g), 0) for g, _ in graphs}
    for g, _ in graphs:
        g.replay()
        assert counts[id(g)] == before[id(g)] + 1


def test_what_cannot_be_called_is_refused():
    g = tg.CUDAGraph()
    calls = [(getattr(tg, f"register_graph_{m}_hook"), f"register_graph_{m}_hook") for m in MOMENTS]
    calls += [
        (g.register_capture_start_hook, "register_capture_start_hook"),
        (g.register_post_instantiate_hook, "register_post_instantiate_hook"),
        (g.register_replay_end_hook, "register_replay_end_hook"),
    ]
    for register, name in calls:
        with pytest.raises(tg.ConfigError, match=f"{name} is given int") as caught:
            register(3)
        assert "raw_graph/test_hooks.py:" in caught.value.where
