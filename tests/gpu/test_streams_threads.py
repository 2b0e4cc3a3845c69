"""Replays from other streams and from several threads give what the executables give."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import assert_replayed
from tests.gpu.subprocesses import run_python

pytestmark = pytest.mark.usefixtures("gpu")
THREADS = 8
SIZE = 50_000


def work(x, y):
    return jnp.cumsum(x)[::-1] * 2 + y, jnp.tanh(x).sum()


def make_arguments(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=SIZE).astype(np.float32), np.float32(seed)


def run_together(functions):
    """Runs all functions at once and returns their results; an exception of one is raised."""
    barrier = threading.Barrier(len(functions))

    def run(function):
        barrier.wait(timeout=60)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout=180) for future in [pool.submit(run, f) for f in functions]]


def check_all(captured, calls):
    for args, result in calls:
        assert_replayed(captured, result, args)


def test_replays_on_other_streams():
    captured = tg.capture(work)
    streams = [None, tg.Stream(), tg.Stream(priority=-1), tg.default_stream()]
    calls = []
    for seed in range(24):
        args = make_arguments(seed)
        with tg.stream(streams[seed % len(streams)]):
            calls.append((args, captured(*args)))
    check_all(captured, calls)
    assert captured.cache_info().captures == 1


def test_state_goes_from_stream_to_stream():
    captured = tg.capture(lambda s, x: (s * 0.5 + x, s.sum()), donate_argnums=0)
    streams = [tg.Stream() for _ in range(3)]
    state, _ = captured(jnp.zeros(SIZE), 0.0)
    wanted = np.zeros(SIZE, np.float32)
    for index in range(60):
        with tg.stream(streams[index % 3]):
            state, total = captured(state, float(index))
        assert float(total) == pytest.approx(float(wanted.sum()), rel=1e-5)
        wanted = wanted * np.float32(0.5) + np.float32(index)
    assert np.array_equal(state, wanted)


def test_a_stream_waits_for_another_through_an_event():
    captured = tg.capture(work)
    first, second = tg.Stream(), tg.Stream()
    args = make_arguments(0)
    event = tg.Event()
    with tg.stream(first):
        summed, _ = captured(*args)
        event.record()
    event.wait(second)
    with tg.stream(second):
        again = captured(summed, args[1])
    second.synchronize()
    assert event.query()
    assert_replayed(captured, again, (np.asarray(summed), args[1]))


def test_a_capture_on_its_own_stream_with_a_fork_and_a_join():
    side = tg.Stream()

    @tg.capture(stream=tg.Stream())
    def forked(x):
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            left = jnp.cumsum(jnp.tanh(x))
        right = jnp.cumsum(x)
        tg.current_stream().wait_stream(side)
        return left + right, left @ right

    for seed in range(25):
        x, _ = make_arguments(seed)
        assert_replayed(forked, forked(x), (x,))


def test_threads_share_one_capture():
    captured = tg.capture(work)

    def call(thread):
        seeds = range(thread * 100, thread * 100 + 20)
        return [(make_arguments(seed), captured(*make_arguments(seed))) for seed in seeds]

    results = run_together([lambda t=thread: call(t) for thread in range(THREADS)])
    for calls in results:
        check_all(captured, calls)
    assert captured.cache_info() == (THREADS * 20 - 1, 1, 64, 1)


def test_threads_on_streams_of_their_own():
    captured = tg.capture(work)
    captured(*make_arguments(0))

    def call(thread):
        with tg.stream(tg.Stream()):
            args = [jax.device_put(make_arguments(thread * 10 + i)) for i in range(10)]
            return [(arg, captured(*arg)) for arg in args]

    for calls in run_together([lambda t=thread: call(t) for thread in range(THREADS)]):
        check_all(captured, calls)


def test_threads_count_in_one_state():
    captured = tg.capture(lambda s: {"n": s["n"] + 1}, donate_argnums=0)
    states = queue.SimpleQueue()
    states.put(captured({"n": jnp.zeros(1000, jnp.int32)}))

    def count():
        for _ in range(100):
            states.put(captured(states.get()))

    run_together([count] * THREADS)
    state = states.get()
    assert int(state["n"].min()) == int(state["n"].max()) == 100 * THREADS + 1


def test_two_graphs_feed_each_other_from_two_threads():
    first, second = tg.capture(lambda x: x + 1), tg.capture(lambda x: x * 1.0)
    boxes = [first(jnp.zeros(SIZE)), second(jnp.zeros(SIZE))]

    def run(function, mine, other):
        for _ in range(200):
            boxes[mine] = function(boxes[other])

    run_together([lambda: run(first, 0, 1), lambda: run(second, 1, 0)])
    for box in boxes:
        assert float(jnp.min(box)) == float(jnp.max(box))


def test_threads_capture_at_the_same_time():
    def capture_and_call(thread):
        captured = tg.capture(lambda x: jnp.sort(x) * (thread + 1) + jnp.tanh(x) @ x)
        x = np.random.default_rng(thread).normal(size=4096).astype(np.float32)
        return captured, x, captured(x)

    runs = run_together([lambda t=thread: capture_and_call(t) for thread in range(THREADS)])
    for captured, x, result in runs:
        assert_replayed(captured, result, (x,))


LATE_ON_HOST = """
import faulthandler
faulthandler.dump_traceback_later(240, exit=True)
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg

cpu, gpu = jax.devices("cpu")[0], jax.devices("gpu")[0]
step = tg.capture(lambda x: x * 2)
step(jnp.ones(4))
seen = []

def call_back(a):
    # JAX runs callbacks with the CPU as the default device.
    with tg.device_of(on_gpu := jax.device_put(np.asarray(a), gpu)):
        seen.append(float(step(on_gpu)[0]))
    return np.asarray(a)

@jax.jit
def late(gate, x):
    for _ in range(3):
        gate = jnp.tanh(gate @ gate)
    return jax.pure_callback(call_back, jax.ShapeDtypeStruct((4,), jnp.float32), x + gate[0, 0])

gate, x = jax.device_put((np.zeros((900, 900), np.float32), np.ones(4, np.float32)), cpu)
for _ in range(5):
    z = jax.device_put(late(gate, x), gpu)
    seen.append(float(step(z)[0]))
print(seen == [2.0] * 10)
"""


def test_no_late_argument_needs_the_graph_that_it_is_for():
    """A callback on the host calls the graph that gets its result: Note [Late arrays under a lock].

    A watchdog ends the process if it hangs.
    """
    done = run_python(["-c", LATE_ON_HOST], variables={"JAX_PLATFORMS": "cuda,cpu"})
    assert (done.returncode, done.stdout.split()) == (0, ["True"]), done.stderr[-2000:]
