"""One captured function in several threads: right results, one capture, no torn reads."""

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

SIZE = 20_000
# A reader that asks again at once keeps the writer from its locks, and reads almost nothing.
TURN_S = 1e-4
# Between two steps, so that readers begin while there is a state to read.
STEP_S = 1e-3


def run_together(functions):
    """Runs all functions at once and returns their results; an exception of one is raised."""
    barrier = threading.Barrier(len(functions))

    def run(function):
        barrier.wait(timeout=240)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout=240) for future in [pool.submit(run, f) for f in functions]]


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_threads_share_one_capture(outputs):
    traces = []

    def function(x, y):
        traces.append(1)
        return jnp.sin(x) * 2 + y, x.sum()

    captured = tg.capture(function, verify=False)

    def call(seed):
        x = jnp.full(SIZE, seed, jnp.float32)
        return [captured(x, float(i)) for i in range(10)]

    results = run_together([lambda seed=seed: call(seed) for seed in range(4)])
    for seed, values in enumerate(results):
        wanted = np.asarray(jnp.sin(jnp.full(SIZE, seed, jnp.float32)) * 2)
        for i, (y, total) in enumerate(values):
            assert np.array_equal(y, wanted + np.float32(i))
            assert float(total) == seed * SIZE
    assert captured.cache_info() == (39, 1, 64, 1)
    assert len(traces) == 2


def test_threads_with_several_signatures():
    captured = tg.capture(lambda x: x * 2, verify=False)

    def call(size):
        return [int(captured(jnp.full(size, i)).sum()) for i in range(8)]

    results = run_together([lambda size=size: call(size) for size in (1, 2, 3, 1, 2, 3)])
    assert results == [[2 * i * size for i in range(8)] for size in (1, 2, 3, 1, 2, 3)]
    assert captured.cache_info() == (45, 3, 64, 3)


def test_threads_share_donated_state():
    captured = tg.capture(lambda s: {"n": s["n"] + 1}, donate_argnums=0)
    states = queue.SimpleQueue()
    states.put(captured({"n": jnp.int32(0)}))

    def count():
        for _ in range(50):
            states.put(captured(states.get()))

    run_together([count] * 4)
    assert int(states.get()["n"]) == 201


def test_one_of_several_threads_gets_the_state_that_all_pass():
    captured = tg.capture(lambda s: {"n": s["n"] + 1}, donate_argnums=0)
    state, taken = captured({"n": jnp.int32(0)}), []

    def take():
        with contextlib.suppress(tg.ReplayError):
            taken.append(captured(state))

    run_together([take] * 4)
    assert [int(each["n"]) for each in taken] == [2]


def test_results_are_read_while_another_thread_replays():
    captured = tg.capture(lambda x: (jnp.broadcast_to(x, (SIZE,)), x))
    inbox, stop = [captured(jnp.float32(0))], threading.Event()

    def produce():
        for i in range(1, 60):
            inbox.append(captured(jnp.float32(i)))
        stop.set()

    def consume():
        seen = 0
        while not stop.wait(TURN_S) or seen < len(inbox):
            for big, small in inbox[seen:]:
                value = np.asarray(big)
                assert (value == float(small)).all()
                seen += 1
        return seen

    assert run_together([produce, consume, consume])[1:] == [60, 60]


def test_resident_state_is_never_read_half_written():
    captured = tg.capture(lambda s: {"w": s["w"] + 1}, donate_argnums=0)
    state = captured({"w": jnp.zeros(SIZE, jnp.int32)})
    find_ends = jax.jit(lambda w: (w.min(), w.max()))
    find_ends(jnp.zeros(SIZE, jnp.int32))
    box, stop = [state], threading.Event()

    def train():
        for _ in range(200):
            box[0] = captured(box[0])
            stop.wait(STEP_S)
        stop.set()

    def read():
        while not stop.wait(TURN_S):
            with contextlib.suppress(tg.ReplayError):
                value = np.asarray(box[0]["w"])
                assert value.min() == value.max()

    def compute():
        while not stop.wait(TURN_S):
            with contextlib.suppress(tg.ReplayError):
                low, high = find_ends(box[0]["w"])
                assert int(low) == int(high)

    run_together([train, read, compute])
    assert int(box[0]["w"][0]) == 201


def test_another_graph_never_reads_half_written_state():
    train = tg.capture(lambda s: {"w": s["w"] + 1}, donate_argnums=0)
    evaluate = tg.capture(lambda s: (s["w"].min(), s["w"].max()))
    state = train({"w": jnp.zeros(SIZE * 50, jnp.int32)})
    evaluate(state)
    box, stop = [state], threading.Event()

    def run_train():
        for _ in range(100):
            box[0] = train(box[0])
            stop.wait(STEP_S)
        stop.set()

    def run_evaluate():
        while not stop.wait(TURN_S):
            with contextlib.suppress(tg.ReplayError):
                low, high = evaluate(box[0])
                assert int(low) == int(high)

    run_together([run_train, run_evaluate, run_evaluate])


def test_two_graphs_feed_each_other_from_two_threads():
    first, second = tg.capture(lambda x: x + 1), tg.capture(lambda x: x * 1.0)
    boxes = [first(jnp.zeros(SIZE)), second(jnp.zeros(SIZE))]

    def run_first():
        for _ in range(100):
            boxes[0] = first(boxes[1])

    def run_second():
        for _ in range(100):
            boxes[1] = second(boxes[0])

    run_together([run_first, run_second])
    for box in boxes:
        assert np.asarray(box).min() == np.asarray(box).max()


def test_a_failure_in_one_thread_does_not_disturb_the_others():
    captured = tg.capture(lambda x: x * 2)
    captured(jnp.ones(3))

    def fail():
        for _ in range(20):
            with pytest.raises(tg.CaptureError):
                captured({1})
        return 0

    def work():
        return sum(int(captured(jnp.full(3, i)).sum()) for i in range(20))

    assert run_together([fail, work, fail, work]) == [0, 1140, 0, 1140]


def test_a_capture_in_one_thread_while_another_prints_and_captures(capfd):
    def slow(x):
        for _ in range(20):
            x = jnp.tanh(x) + 1
        return x

    def capture_it():
        return float(tg.capture(slow, verify=False)(jnp.float32(1)))

    def talk():
        for i in range(50):
            print("line", i)
        return jax.make_jaxpr(lambda x: x + 1)(1.0) is not None

    first, talked, second = run_together([capture_it, talk, capture_it])
    assert first == second
    assert talked
    assert capfd.readouterr().out.count("line") == 50
