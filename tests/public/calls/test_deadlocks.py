"""Callbacks of eager parts may read, call and wait for anything: no lock is held while they run.

The scenarios run in one process of their own, which a watchdog ends when one of them hangs.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tests.processes import run_python
from tracegraph.capturing.capture_underway import CaptureUnderway
from tracegraph.replaying.partial_graph import PartialGraph

PROGRAM = """
import faulthandler
faulthandler.dump_traceback_later(300, exit=True)
import threading
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def run_together(*functions):
    results = [None] * len(functions)
    def run(index):
        results[index] = functions[index]()
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def first_line(action):
    try:
        return str(action())
    except tg.ReplayError as error:
        return str(error).splitlines()[0]


def reading_state():
    last, seen = {}, []
    triple = tg.capture(lambda w: w * 3, verify=False)
    def look(total):
        if last:
            seen.append(first_line(lambda: np.asarray(last["state"]["w"])))
            seen.append(first_line(lambda: triple(last["state"]["w"])))
            seen.append(first_line(lambda: step(last["state"], 1.0)))
            seen.append(str(float(last["loss"])))
    @tg.capture(donate_argnums=0, mode="partial", prefer="graph")
    def step(state, x):
        w = state["w"] + x
        jax.debug.callback(look, w.sum())
        return {"w": w * 1.0}, w.sum()
    state, loss = step({"w": jnp.zeros(2)}, 1.0)
    last.update(state=state, loss=loss)
    state, loss = step(state, 1.0)
    jax.effects_barrier()
    return [*seen, str(float(loss)), str(float(state["w"][0]))]


def calling_each_other(verify):
    barrier = threading.Barrier(2) if not verify else None
    def make(find_other):
        def call(v):
            if barrier is not None:
                barrier.wait(240)
            return np.asarray(find_other()(jnp.float32(0)))
        def function(x):
            branches = (lambda v: jax.pure_callback(call, SCALAR, v)), (lambda v: v * 0)
            return jax.lax.cond(x > 0, *branches, x) + 1
        return tg.capture(function, mode="partial", prefer="graph", verify=verify)
    first, second = make(lambda: second), make(lambda: first)
    def run(captured):
        return [float(captured(jnp.float32(1))) for _ in range(3)]
    return run_together(lambda: run(first), lambda: run(second))


def calling_itself():
    def call(v):
        return np.asarray(count(jnp.float32(float(v) - 1)))
    @tg.capture(mode="partial", prefer="graph", verify=False)
    def count(x):
        branches = (lambda v: jax.pure_callback(call, SCALAR, v)), (lambda v: v * 0)
        return jax.lax.cond(x > 0, *branches, x) + 1
    # JAX refuses a computation that calls itself before it is compiled.
    results = [float(count(jnp.float32(x))) for x in (1, 2, 2)]
    others = [len(capture.graph._others) for capture in count._cache.list_latest()]
    return [results, sum(others), tuple(count.cache_info())]


print(reading_state())
print(calling_each_other(True))
print(calling_each_other(False))
print(calling_itself())
"""
TAKEN = "has been deleted: it was donated to `step`"


@pytest.fixture(scope="module")
def printed() -> list[str]:
    done = run_python(["-c", PROGRAM], variables={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_callback_that_reads_the_state_of_an_earlier_call_raises_at_once(printed: list[str]):
    read, passed, called, loss, new_loss, new_state = eval(printed[0])
    assert read == passed == called == f"this float32[2] {TAKEN}"
    assert (loss, new_loss, new_state) == ("2.0", "4.0", "2.0")


def test_functions_whose_callbacks_call_each_other_from_the_first_call_on(printed: list[str]):
    assert eval(printed[1]) == [[2.0] * 3] * 2


def test_functions_whose_callbacks_call_each_other_at_once(printed: list[str]):
    assert eval(printed[2]) == [[2.0] * 3] * 2


def test_a_function_whose_callback_calls_it_has_two_instances(printed: list[str]):
    results, others, counts = eval(printed[3])
    assert results == [2.0, 3.0, 3.0]
    # JAX's settings inside of a callback are others, so that there are two signatures.
    assert others == 1
    assert counts == (6, 2, 64, 2)


def find_held_locks(captured: Any) -> list[str]:
    """Returns which locks another thread cannot get now."""
    held = []

    def look() -> None:
        locks = {"function": captured._lock}
        if captured._latest is not None:
            locks["graph"] = captured._latest.lock
        for name, lock in locks.items():
            if lock.acquire(blocking=False):
                lock.release()
            else:
                held.append(name)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(timeout=240)
    return held


def make_watched() -> tuple[Any, list[list[str]]]:
    seen: list[list[str]] = []

    def look(v: Any) -> Any:
        seen.append(find_held_locks(captured))
        return np.asarray(v)

    def function(s: Any) -> Any:
        return jax.pure_callback(look, jax.typeof(s), s) + 1

    captured = tg.capture(function, mode="partial", prefer="graph", donate_argnums=0)
    return captured, seen


def test_no_lock_is_held_while_an_eager_part_runs():
    captured, seen = make_watched()
    state = captured(jnp.zeros(2))
    during_capture = len(seen)
    assert during_capture > 1
    for _ in range(3):
        state = captured(state)
    assert len(seen) == during_capture + 3
    assert not any(seen)
    assert_same(state, jnp.full(2, 4.0, jnp.float32))


def test_a_lock_that_is_held_is_noticed(monkeypatch: pytest.MonkeyPatch):
    captured, seen = make_watched()
    state = captured(jnp.zeros(2))
    seen.clear()
    graph = captured._latest
    launch = graph._launch_stages

    def launch_locked() -> None:
        with graph.lock:
            launch()

    monkeypatch.setattr(graph, "_launch_stages", launch_locked)
    captured(state)
    assert seen == [["graph"]]


def test_a_failing_callback_frees_the_instance():
    errors: list[Exception] = []

    def check(v: Any) -> Any:
        if errors:
            raise errors[0]
        return np.asarray(v)

    def step(s: Any, x: Any) -> Any:
        return s + jax.pure_callback(check, jax.typeof(x), x)

    captured: Any = tg.capture(step, mode="partial", prefer="graph", donate_argnums=0, verify=False)
    state = captured(jnp.zeros(2), jnp.ones(2))
    for _ in range(2):
        errors.append(ValueError("planted"))
        with pytest.raises(Exception, match="planted"):
            captured(state, jnp.ones(2))
        errors.clear()
        state = captured(state, jnp.ones(2))
    graph = captured._latest
    assert isinstance(graph, PartialGraph)
    assert (graph._others, graph._is_busy, graph.calls) == ([], False, 3)
    assert_same(state, jnp.full(2, 3.0, jnp.float32))


def test_state_of_another_instance_is_found_again():
    captured: Any = tg.capture(
        lambda s: jax.pure_callback(np.asarray, jax.typeof(s), s) + 1,
        mode="partial",
        prefer="graph",
        donate_argnums=0,
        verify=False,
    )
    one = captured(jnp.zeros(2))
    first = captured._latest
    with first.reserve():
        other = captured(jnp.full(2, 10.0, jnp.float32))
    (second,) = first._others
    addresses = [graph.replay.inputs[0].address for graph in (first, second)]
    for count in range(2, 5):
        old, one, other = (one, other), captured(one), captured(other)
        assert [one.data_ptr(), other.data_ptr()] == addresses
        assert [float(one[0]), float(other[0])] == [count, count + 10]
        for leaf in old:
            with pytest.raises(tg.ReplayError, match="donated"):
                captured(leaf)
    assert len(first._others) == 1


def test_threads_capture_one_signature_once():
    def function(x: Any) -> Any:
        return jax.pure_callback(np.asarray, jax.typeof(x), x) * 2

    captured: Any = tg.capture(function, mode="partial", prefer="graph")
    results: list[float] = []
    threads = [
        threading.Thread(target=lambda: results.append(float(captured(jnp.float32(2)))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert results == [4.0] * 3
    assert captured.cache_info()[:2] == (2, 1)


def test_a_capture_that_fails_lets_the_next_one_begin():
    started, go = threading.Event(), threading.Event()
    fails = [True]

    def function(x: Any) -> Any:
        if fails:
            fails.clear()
            started.set()
            assert go.wait(240)
            raise KeyError("planted")
        return x + 1

    captured: Any = tg.capture(function, verify=False)
    results: list[float] = []

    def fail() -> None:
        with pytest.raises(KeyError):
            captured(jnp.float32(1))

    first = threading.Thread(target=fail)
    second = threading.Thread(target=lambda: results.append(float(captured(jnp.float32(1)))))
    first.start()
    assert started.wait(240)
    second.start()
    go.set()
    first.join(timeout=240)
    second.join(timeout=240)
    assert results == [2.0]
    assert captured.cache_info().captures == 1


def test_an_interrupted_capture_is_not_waited_for():
    captured: Any = tg.capture(lambda x: x + 1, verify=False)
    captured(jnp.zeros(2))
    signature = captured._latest.signature
    captured.reset()
    for is_ended in (False, True):
        # As an interrupt at any point could leave it behind.
        left = captured._underway[signature] = CaptureUnderway()
        if is_ended:
            left.end()
        assert_same(captured(jnp.zeros(2)), jnp.ones(2))
        captured._underway.pop(signature, None)
        captured.reset()
