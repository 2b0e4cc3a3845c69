"""`tg.capture(..., warm=False)`: calls run as `jax.jit` until a thread beside has captured them."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.processes import run_program
from tracegraph.capturing.lazy_call import LazyPipeline
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.arrays.array import Array


class Gate:
    """Holds the thread of captures where a capture begins to compile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.order: list[Any] = []
        run = LazyPipeline.run_to_lowered

        def wait(pipeline: LazyPipeline) -> Any:
            self.order.append([leaf.shape for leaf in pipeline._prepared.signature.leaves])
            self.entered.release()
            assert self._open.wait(240)
            return run(pipeline)

        monkeypatch.setattr(LazyPipeline, "run_to_lowered", wait)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def step(state: Any, x: Any) -> Any:
    return {"w": state["w"] + jnp.sin(x)}, (state["w"] * x).sum()


def test_calls_run_as_jit_and_switch_over(gate: Gate) -> None:
    captured = tg.capture(step, donate_argnums=0, warm=False)
    jitted = jax.jit(step)
    state, wanted = {"w": jnp.arange(4.0)}, {"w": jnp.arange(4.0)}
    for turn in range(4):
        before = state
        x = jnp.full(4, turn, jnp.float32)
        state, total = captured(state, x)
        wanted, wanted_total = jitted(wanted, x)
        assert before["w"].is_deleted()
        np.testing.assert_array_equal(state["w"], wanted["w"])
        assert float(total) == float(wanted_total)
        if turn < 2:
            assert type(state["w"]) is not Array
            assert not captured.wait_until_captured(0)
            assert captured.cache_info() == (0, 0, 64, 0)
            assert "a thread beside" in captured.explain(state, x)
        if turn == 1:
            gate.open()
            assert captured.wait_until_captured()
            assert "a thread beside" not in captured.explain(state, x)
    assert type(state["w"]) is Array
    assert captured.cache_info() == (2, 1, 64, 1)
    assert list(captured.timings())[:2] == ["trace", "check"]
    assert "verify" in captured.timings()
    assert captured.wait_until_captured(0)


def test_signatures_are_captured_in_the_order_of_their_first_calls(gate: Gate) -> None:
    captured = tg.capture(lambda x: x * 2, warm=False, verify=False)
    for size in (3, 1, 2, 1, 3):
        assert captured(jnp.ones(size)).tolist() == [2.0] * size
    gate.open()
    assert captured.wait_until_captured()
    assert gate.order == [[(3,)], [(1,)], [(2,)]]
    assert captured.cache_info() == (0, 3, 64, 3)


def test_a_capture_that_fails_is_seen_and_calls_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replay = CapturedGraph.replay_once

    def replay_wrongly(*args: Any, **options: Any) -> Any:
        return [result + 1 for result in replay(*args, **options)]

    captured, x = tg.capture(lambda x: x * 2, name="double", warm=False), jnp.ones(3)
    with monkeypatch.context() as patch:
        patch.setattr(CapturedGraph, "replay_once", replay_wrongly)
        assert captured(x).tolist() == [2.0] * 3
        for _ in range(2):
            with pytest.raises(tg.VerificationError, match="double"):
                captured.wait_until_captured()
    (record,) = caplog.records
    assert "the capture of `double` failed, its calls go on as jax.jit: " in record.getMessage()
    assert "\n" not in record.getMessage()
    assert captured(x).tolist() == [2.0] * 3
    assert "calls run: as jax.jit, the capture failed: " in captured.explain(x)
    assert captured.cache_info().misses == 0
    captured.reset()
    assert captured(x).tolist() == [2.0] * 3
    assert captured.wait_until_captured()


def test_what_the_function_does_wrong_is_raised_by_the_call() -> None:
    @tg.capture(warm=False)
    def show(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    turns: list[int] = []

    @tg.capture(warm=False)
    def change(x: Any) -> Any:
        turns.append(1)
        return x + len(turns)

    for captured in (show, change):
        for _ in range(2):
            with pytest.raises(tg.CaptureError):
                captured(jnp.ones(2))
        assert captured.wait_until_captured()
    with pytest.raises(ZeroDivisionError):
        tg.capture(lambda x: 1 / 0, warm=False)(jnp.ones(2))


def test_settings_of_the_caller_are_those_of_the_capture() -> None:
    side = tg.Stream()

    def compute(x: Any) -> Any:
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            y = x @ x
        tg.current_stream().wait_stream(side)
        return y * jnp.arange(2) / 3

    captured = tg.capture(compute, warm=False)
    x = np.full((2, 2), 1 / 3)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        wanted = jax.jit(compute)(x)
        for _ in range(2):
            result = captured(x)
            assert result.dtype == np.float64
            np.testing.assert_array_equal(result, wanted)
            assert captured.wait_until_captured()
        assert "precision=" in str(captured.trace(x))
    assert captured.cache_info() == (1, 1, 64, 1)
    assert captured(x).dtype == np.float32
    assert captured.wait_until_captured()
    assert captured.cache_info() == (1, 2, 64, 2)


def test_what_jax_traces_is_traced() -> None:
    captured = tg.capture(lambda x: (x**2).sum(), warm=False)
    x = jnp.arange(3.0)
    assert jax.jit(captured)(x) == 5
    assert jax.vmap(captured)(x[:, None]).tolist() == [0, 1, 4]
    assert jax.grad(captured)(x).tolist() == [0, 2, 4]
    assert captured.wait_until_captured(0)


def test_generators_and_objects() -> None:
    nnx = pytest.importorskip("flax.nnx")
    generators = [tg.random.Generator(7) for _ in range(2)]
    draw = tg.capture(lambda x: x + jax.random.normal(generators[0].next_key()), warm=False)
    wanted = [1 + jax.random.normal(generators[1].next_key()) for _ in range(4)]
    found = [draw(1.0), draw(1.0)]
    assert draw.wait_until_captured()
    found += [draw(1.0), draw(1.0)]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert draw.cache_info() == (2, 1, 64, 1)

    @tg.capture(warm=False)
    def count(counter: Any) -> Any:
        counter[...] = counter[...] + 1
        return counter[...] * 2

    counter = nnx.Variable(jnp.zeros(2))
    assert count(counter).tolist() == [2.0] * 2
    assert count.wait_until_captured()
    assert count(counter).tolist() == [4.0] * 2
    assert count.cache_info().hits == 1


def test_partial_mode() -> None:
    seen: list[float] = []

    @tg.capture(mode="partial", prefer="graph", warm=False)
    def show(x: Any) -> Any:
        jax.debug.callback(lambda value: seen.append(float(value)), x)
        return x * 2

    assert [float(show(1.0)), show.wait_until_captured(), float(show(2.0))] == [2.0, True, 4.0]
    jax.effects_barrier()
    assert set(seen) == {1.0, 2.0}

    @tg.capture(mode="partial", warm=False)
    def branch(x: Any) -> Any:
        return x * 2 if x > 0 else x

    assert [float(branch(1.0)), float(branch(-1.0)), float(branch(3.0))] == [2.0, -1.0, 6.0]
    assert branch.cache_info() == (2, 1, 64, 1)


def test_reset_gives_up_what_is_under_way(gate: Gate) -> None:
    captured = tg.capture(lambda x: x * 2, warm=False)
    captured(jnp.ones(3))
    assert gate.entered.acquire(timeout=240)
    captured(jnp.ones(2))
    captured.reset()
    gate.open()
    assert captured.wait_until_captured()
    assert captured.cache_info() == (0, 0, 64, 0)
    assert gate.order == [[(3,)]]
    assert captured(jnp.ones(3)).tolist() == [2.0] * 3
    assert captured.wait_until_captured()
    assert captured.cache_info() == (0, 1, 64, 1)


def test_memory_goes_with_the_last_name(gate: Gate) -> None:
    class Held:
        pass

    held = Held()

    def double(x: Any, held: Any = held) -> Any:
        return x * 2

    captured: Callable[..., Any] | None = tg.capture(double, warm=False, donate_argnums=0)
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        assert captured is not None
        captured(jnp.ones(3))
        thread: Any = captured._queue._thread  # pyright: ignore
        assert gate.entered.acquire(timeout=240)
        ends = [weakref.ref(each) for each in (held, captured, captured._queue)]  # pyright: ignore
        del held, double
        captured = None
        assert ends[1]() is None
        assert ends[2]() is None
        gate.open()
        thread.join(240)
        assert not thread.is_alive()
    finally:
        if was_enabled:
            gc.enable()
    gc.collect()
    assert ends[0]() is None


def test_arguments_that_others_delete_are_taken_from_the_next_call(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    captured, x = tg.capture(lambda x: x * 2, warm=False), jnp.arange(3.0)
    captured(x)
    x.delete()
    gate.open()
    with pytest.raises(tg.ReplayError, match="were deleted"):
        captured.wait_until_captured()
    x = jnp.arange(3.0)
    assert captured(x).tolist() == [0.0, 2.0, 4.0]
    # This time copies were made.
    x.delete()
    assert captured.wait_until_captured()
    assert captured.cache_info().misses == 1
    assert len(caplog.records) == 1


def test_threads_share_one_program(gate: Gate) -> None:
    traces: list[int] = []

    def double(x: Any) -> Any:
        traces.append(1)
        return x * 2

    captured = tg.capture(double, warm=False)
    barrier, results = threading.Barrier(4), []

    def call() -> None:
        barrier.wait(240)
        results.append(captured(jnp.ones(3)).tolist())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    gate.open()
    assert captured.wait_until_captured()
    assert results == [[2.0] * 3] * 4
    assert len(traces) == 2
    assert len(gate.order) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"warm": "no"}, "warm='no' is unknown"),
        ({"warm": False, "outputs": "static"}, "outputs='static' is given with warm=False"),
        ({"warm": False, "debug_nans": True}, "debug_nans=True is given with warm=False"),
        ({"warm": False, "buckets": {"x": {0: (2,)}}}, "buckets= is given with warm=False"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(options: Any, text: str) -> None:
    with pytest.raises(tg.ConfigError, match=text):
        tg.capture(lambda x: x, **options)


EXIT = """
    import os, threading, time, warnings
    import jax.numpy as jnp, tracegraph as tg
    from tracegraph.capturing.lazy_call import LazyPipeline

    inside, run = threading.Event(), LazyPipeline.run_to_lowered

    def wait(pipeline):
        inside.set()
        while threading.main_thread().is_alive() and "GO" not in os.environ:
            time.sleep(0.01)
        return run(pipeline)

    LazyPipeline.run_to_lowered = wait
    double = tg.capture(lambda x: x * 2, warm=False)
    print(double(jnp.ones(2)), double(jnp.ones(3)))
    inside.wait()
"""


def test_a_process_ends_while_it_captures() -> None:
    assert run_program(EXIT) == "[2. 2.] [2. 2. 2.]\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_begins_anew_what_its_parent_had_begun() -> None:
    program = """
    # JAX warns of each fork.
    warnings.simplefilter("ignore")
    child = os.fork()
    if not child:
        # Here the parent's thread is no more.
        assert not double.wait_until_captured(0)
        assert double._queue._thread.is_alive()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os.environ["GO"] = "1"
    assert double.wait_until_captured()
    print(double.cache_info().misses)
    """
    assert run_program(EXIT + program).endswith("\n2\n")


@pytest.mark.parametrize("timeout", ["x", True, float("nan"), 1e300])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: Any) -> None:
    double = tg.capture(lambda x: x * 2, warm=False)
    with pytest.raises(tg.ConfigError) as raised:
        double.wait_until_captured(timeout)
    assert raised.value.what == f"timeout={timeout!r} is unknown"
    assert "test_lazy_capture.py" in raised.value.where
    assert double.wait_until_captured(-1)
