"""What replays of a block load: the inputs that were written since the last one, and no others."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.raw_graphs import N, assert_value, fill, find_captured, record, use_device
from tracegraph.capturing.traced_pipeline import TracedPipeline
from tracegraph.replaying.block_replay import BlockReplay
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.arrays.live_buffers import StaticInput


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_device(request.param, monkeypatch)


@pytest.fixture
def full_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item for each replay that looks at every argument."""
    looks: list[int] = []
    look = CapturedGraph.try_call

    def look_at_all(self: CapturedGraph, *args: Any) -> Any:
        looks.append(len(args))
        return look(self, *args)

    monkeypatch.setattr(CapturedGraph, "try_call", look_at_all)
    return looks


def test_replays_load_what_was_written_and_nothing_else(full_looks):
    inputs = [tg.static_input(fill(i)) for i in range(3)]
    fixed = fill(100)
    g, y = record(lambda: fixed + inputs[0] + 10 * inputs[1] + inputs[2] * 0.5)
    values, random = [0.0, 1.0, 2.0], np.random.default_rng(0)
    g.replay()
    before = len(full_looks)
    for step in range(8):
        for i in random.choice(3, size=step % 3, replace=False):
            values[i] = float(step + i)
            inputs[i].copy_(fill(values[i]))
        g.replay()
        assert_value(y, fill(100 + values[0] + 10 * values[1] + values[2] * 0.5))
    assert len(full_looks) == before


def test_one_input_of_two_graphs_reaches_both(full_looks):
    x = tg.static_input((N,))
    g1, y = record(lambda: x + 1)
    g2, z = record(lambda: x * 2)
    for step in range(3):
        x.copy_(fill(step))
        for g in (g1, g2, g1):
            g.replay()
        assert_value(y, fill(step + 1))
        assert_value(z, fill(2 * step))
    assert len(full_looks) == 2


def test_what_a_graph_writes_is_looked_at_in_each_replay():
    w = tg.static_input((N,))
    reader, y = record(lambda: w * 10)
    reader.replay()
    writer, _ = record(lambda: w.copy_(w + 1))
    for step in range(1, 4):
        writer.replay()
        reader.replay()
        assert_value(y, fill(10 * step))
    w.copy_(fill(7))
    reader.replay()
    assert_value(y, fill(70))


def test_the_output_of_another_graph_is_looked_at_in_each_replay():
    x = tg.static_input((N,))
    first, middle = record(lambda: x + 1)
    second, end = record(lambda: middle * 10)
    for step in range(3):
        x.copy_(fill(step))
        first.replay()
        second.replay()
        assert_value(end, fill(10 * (step + 1)))


@pytest.mark.parametrize("which", ["fixed", "input"])
def test_an_array_that_is_deleted_after_a_replay_is_refused(which):
    x, fixed = tg.static_input((N,)), fill(3)
    g, y = record(lambda: x + fixed)
    g.replay()
    g.replay()
    (fixed if which == "fixed" else x.jax()).delete()
    for _ in range(2):
        with pytest.raises(tg.ReplayError, match="deleted"):
            g.replay()
    if which == "input":
        x.copy_(fill(5))
        x.jax().delete()
        with pytest.raises(tg.ReplayError, match="deleted"):
            g.replay()
        x.copy_(fill(4))
        g.replay()
        assert_value(y, fill(7))


def test_a_launch_that_fails_is_raised_and_the_next_replay_is_right(monkeypatch, full_looks):
    x = tg.static_input((N,))
    g, y = record(lambda: x + 1)
    g.replay()
    x.copy_(fill(5))
    write = StaticInput.write

    def interrupt(self: StaticInput, value: Any) -> None:
        write(self, value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StaticInput, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            x.copy_(fill(6))
    g.replay()
    assert_value(y, fill(7))

    failures = [RuntimeError("planted")]
    (replayed,) = [each for each in vars(g).values() if isinstance(each, CapturedGraph)][:1]
    launch = replayed._launch_stages

    def fail_once() -> None:
        if failures:
            raise failures.pop()
        launch()

    monkeypatch.setattr(replayed, "_launch_stages", fail_once)
    looks = len(full_looks)
    with pytest.raises(RuntimeError, match="planted"):
        g.replay()
    assert len(full_looks) == looks
    x.copy_(fill(8))
    g.replay()
    # Nothing is taken for loaded after an error.
    assert len(full_looks) == looks + 1
    assert_value(y, fill(9))


def test_threads_that_write_and_replay_leave_the_last_value():
    x = tg.static_input((N,))
    g, y = record(lambda: x + 1)
    g.replay()

    def work(first: int) -> None:
        for step in range(20):
            x.copy_(fill(first + step))
            g.replay()

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x.copy_(fill(-1))
    g.replay()
    assert_value(y, fill(0))
    g.replay()
    assert_value(y, fill(0))


# What `copy_` takes.


@pytest.mark.parametrize("kind", ["weak", "numpy"])
def test_an_input_takes_a_copy_of_a_strong_type(kind):
    source = jnp.full(N, 2.0) if kind == "weak" else np.full(N, 2, np.float32)
    x = tg.static_input((N,))
    g, y = record(lambda: x + 1)
    x.copy_(source)
    if isinstance(source, np.ndarray):
        source[:] = 9
    g.replay()
    assert_value(y, fill(3))
    assert not x.weak_type
    assert not x.jax().weak_type


def test_an_input_keeps_its_copy_of_an_array_that_is_deleted():
    x, source = tg.static_input((N,)), fill(2)
    g, y = record(lambda: x + 1)
    x.copy_(source)
    source.delete()
    g.replay()
    assert_value(y, fill(3))


@pytest.mark.parametrize("wrong", [jnp.zeros(N + 1), jnp.zeros(N, jnp.int32), 1.0, None, "text"])
def test_an_input_refuses_another_shape_or_dtype(wrong):
    x = tg.static_input(fill(1))
    with pytest.raises(tg.ReplayError):
        x.copy_(wrong)
    assert_value(x, fill(1))


def test_a_graph_holds_no_value_that_was_written_over():
    x = tg.static_input((N,))
    g, y = record(lambda: x + 1)
    x.copy_(fill(1))
    g.replay()
    value = weakref.ref(x.jax())
    g.replay()
    x.copy_(fill(2))
    g.replay()
    gc.collect()
    assert value() is None
    assert_value(y, fill(3))


# What a capture reads of its inputs.


def test_a_capture_leaves_its_inputs_to_graphs_alone(device):
    inputs = [tg.static_input(fill(i)) for i in range(3)]
    g, y = record(lambda: inputs[0] + inputs[1] + inputs[2])
    g.replay()
    buffers = [each.find_input() for each in inputs]
    assert [(each.is_shared, each.loans) for each in buffers] == [(False, 0)] * 3
    # So no replay asks whether one of them was deleted, and writes go where the graph reads.
    captured = find_captured(g)
    assert isinstance(captured, BlockReplay)
    assert captured._loaded is not None
    assert captured._loaded.watched == ()
    before = [each.data_ptr() for each in inputs]
    inputs[1].copy_(fill(7))
    assert device is None or [each.data_ptr() for each in inputs] == before
    g.replay()
    assert_value(y, fill(9))


def test_what_a_capture_compares_results_on_is_not_written(monkeypatch):
    x = tg.static_input(fill(1))
    seen: list[Any] = []
    verify = TracedPipeline.verify

    def write_and_verify(self: TracedPipeline, graph: Any) -> None:
        (value,) = self._prepared.leaves
        x.copy_(fill(5))
        seen.append(np.array(value))
        verify(self, graph)

    monkeypatch.setattr(TracedPipeline, "verify", write_and_verify)
    g, y = record(lambda: x + 1)
    np.testing.assert_array_equal(seen, [np.ones(N)])
    g.replay()
    assert_value(y, fill(6))


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("moment", ["capture_end", "post_instantiate"])
def test_a_capture_that_a_hook_ends_gives_its_inputs_back(moment, keep_graph):
    x, g = tg.static_input(fill(1)), tg.CUDAGraph(keep_graph=keep_graph)

    def end(_: Any) -> None:
        raise ValueError("planted")

    getattr(g, f"register_{moment}_hook")(end)
    kept = []
    with contextlib.suppress(ValueError), tg.graph(g):
        kept.append(x + 1)
    assert x.find_input().loans == 0
