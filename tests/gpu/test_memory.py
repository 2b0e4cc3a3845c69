"""Device memory: what a pool holds, what an impossible capture leaves, and every order of deletion.

The segments come from JAX's own allocator, so that its count of bytes in use shows a leak of one.
"""

import gc
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.device_memory import measure_limit_bytes, measure_used_bytes
from tests.gpu.reference import assert_replayed
from tests.gpu.subprocesses import run_python
from tracegraph.runtime.cuda.memory import jax_arrays
from tracegraph.runtime.memory.private_pool import find_pool
from tracegraph.runtime.memory.sizes import round_exact

pytestmark = pytest.mark.usefixtures("gpu", "untried")
CHUNK = 1 << 30
# JAX hands memory out in multiples of this.
ORDERS = tuple(
    order.split()
    for order in (
        "captured state y other",
        "y captured state other",
        "state y other captured",
        "other captured y state",
        "state captured other y",
        "other y state captured",
    )
)


def step(state, x):
    mixed = state["w"] @ x
    return {"w": state["w"] + jnp.tanh(mixed)}, mixed * 2


def make_state():
    return {"w": jnp.eye(300)}


def test_the_bytes_of_a_pool_are_known_before_the_capture():
    captured = tg.capture(step, donate_argnums=0)
    x = jnp.ones((300, 300))
    planned_bytes = captured.lower(make_state(), x).pool_bytes
    state, y = captured(make_state(), x)
    assert captured.pool_bytes == round_exact(planned_bytes)
    assert captured.pool_bytes >= 3 * 300 * 300 * 4
    for _ in range(10):
        state, y = captured(state, y)
    assert captured.pool_bytes == round_exact(planned_bytes)


def test_segments_come_from_jax():
    captured = tg.capture(lambda x: jnp.sort(x) + jnp.zeros((1000, 1)), verify=False)
    lowered = captured.lower(jnp.zeros(1000))
    before = measure_used_bytes()
    graph = lowered.instantiate()
    taken_bytes = measure_used_bytes() - before
    # Without preallocation JAX's allocator grows by pieces of its own size.
    assert captured.pool_bytes <= taken_bytes <= 2 * captured.pool_bytes
    assert "provider=jax" in repr(find_pool(captured.pool()))
    del graph, lowered, captured
    assert measure_used_bytes() <= before


def test_no_program_is_compiled_for_an_arena(monkeypatch):
    types = []
    compile_allocator = jax_arrays._compile_allocator

    def note(shapes, jax_device):
        types.extend(shapes)
        return compile_allocator(shapes, jax_device)

    monkeypatch.setattr(jax_arrays, "_compile_allocator", note)
    for count in (1_003, 4_000_003):
        captured = tg.capture(lambda x: jnp.sort(x) + jnp.cumsum(x))
        x = np.random.default_rng(count).normal(size=count).astype(np.float32)
        assert_replayed(captured, captured(jnp.asarray(x)), (x,))
        assert captured.pool_bytes >= 8 * count
    assert not [dtype for _, dtype in types if dtype == np.uint8]


def make_impossible():
    """Returns a function whose results take half as much again as the device has."""
    count = measure_limit_bytes() * 3 // 2 // (CHUNK * 4) + 1
    return lambda x: [jnp.full((CHUNK,), 1.0) * x + index for index in range(count)]


def test_out_of_memory_and_what_goes_on_afterwards():
    """In the pool of another graph, which it leaves alone; test_pools.py has a pool of its own.

    JAX waits ten seconds for memory before it raises, and is called twice, so few tests do this.
    """
    first = tg.capture(lambda s: s + 1, donate_argnums=0)
    state = first(jnp.zeros(1000))

    def run_small():
        captured = tg.capture(step)
        x = np.ones((300, 300), np.float32)
        assert_replayed(captured, captured(make_state(), x), (make_state(), x))

    run_small()
    # What earlier tests left in caches goes when memory runs out.
    tg.memory.empty_cache()
    before = measure_used_bytes()
    huge = tg.capture(make_impossible(), name="huge", pool=first.pool())
    with pytest.raises(tg.OutOfMemoryError) as raised:
        huge(jnp.float32(2))
    assert raised.value.anchor == "out-of-memory"
    assert "private pool" in raised.value.where
    run_small()
    del huge, raised
    assert measure_used_bytes() == before
    state = first(state)
    assert float(state.min()) == float(state.max()) == 2.0


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_everything_goes_back(assert_memory_returns, outputs):
    def run():
        captured = tg.capture(step, donate_argnums=0, outputs=outputs)
        state, y = captured(make_state(), jnp.ones((300, 300)))
        state, y = captured(state, jnp.array(y))
        assert np.isfinite(np.asarray(y)).all()

    assert_memory_returns(run)


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_deleted_in_any_order(assert_memory_returns, order):
    """Graph, state, result, and another graph of the same pool: in every order."""

    def run():
        captured = tg.capture(step, donate_argnums=0, verify=False)
        state, y = captured(make_state(), jnp.zeros((300, 300)))
        other = tg.capture(lambda x: x * 3, pool=captured.pool(), verify=False)
        other(jnp.ones(5))
        alive = {"captured": captured, "state": state, "y": y, "other": other}
        del captured, state, y, other
        for name in order:
            del alive[name]
            gc.collect()
            check_alive(alive)

    assert_memory_returns(run)


def check_alive(alive):
    """Whatever is still there must be whole, whatever went before it."""
    if "y" in alive:
        assert float(jnp.abs(alive["y"]).max()) == 0.0
    if "state" in alive:
        assert np.array_equal(alive["state"]["w"], np.eye(300))
    if "captured" in alive and "state" in alive:
        alive["state"], alive["y"] = alive["captured"](alive["state"], jnp.zeros((300, 300)))
    if "other" in alive:
        assert float(alive["other"](jnp.full(5, 2.0))[0]) == 6.0


def test_deleted_while_a_replay_is_pending(assert_memory_returns):
    def run():
        captured = tg.capture(lambda x: (x @ x) / 2048, verify=False)
        y = captured(jnp.ones((2048, 2048)))
        for _ in range(50):
            y = captured(y)
        del captured
        gc.collect()
        poison = [jnp.full((2048, 2048), jnp.nan) for _ in range(4)]
        assert float(y[0, 0]) == 1.0
        assert len(poison) == 4

    assert_memory_returns(run)


def test_an_exception_while_tracing_gives_all_back(assert_memory_returns):
    def fail(x):
        y = jnp.sort(x) * 2
        raise ValueError(f"stopped at {y.shape}")

    def run():
        captured = tg.capture(fail)
        with pytest.raises(ValueError, match="stopped at"):
            captured(jnp.arange(1000.0))
        assert captured.pool_bytes == 0

    assert_memory_returns(run)


def test_an_exception_while_a_graph_is_built_gives_all_back(assert_memory_returns, monkeypatch):
    def run():
        captured = tg.capture(step, donate_argnums=0)
        with monkeypatch.context() as patch:
            patch.setattr("tracegraph.replaying.graph_results.ResultBuilder", stop)
            with pytest.raises(KeyboardInterrupt):
                captured(make_state(), jnp.ones((300, 300)))
        captured(make_state(), jnp.ones((300, 300)))

    def stop(*_):
        raise KeyboardInterrupt

    assert_memory_returns(run)


def test_memory_does_not_grow_from_call_to_call():
    captured = tg.capture(step, donate_argnums=0)
    x = jnp.full((300, 300), 1e-3)
    state, y = captured(make_state(), x)
    state, y = captured(state, x)
    before = measure_used_bytes()
    for _ in range(200):
        state, y = captured(state, x)
    assert measure_used_bytes() == before
    assert y.shape == (300, 300)


def run_to_exit(program):
    done = run_python(["-X", "faulthandler", "-c", textwrap.dedent(program)])
    assert done.returncode == 0, done.stderr
    for trouble in ("Exception ignored", "Fatal Python error", "runtime/cuda"):
        assert trouble not in done.stderr, done.stderr
    return done.stdout


def test_interpreter_exit_with_everything_alive():
    assert run_to_exit("""
        import jax.numpy as jnp, tracegraph as tg
        captured = tg.capture(lambda s: (s * 2, s.sum()), donate_argnums=0)
        state, total = captured(jnp.ones(1000))
        for _ in range(100):
            state, total = captured(state)
        stream = tg.Stream()
        with tg.stream(stream):
            state, total = captured(state)
        print("done")
        """).endswith("done\n")


def test_interpreter_exit_in_the_middle_of_replays():
    assert run_to_exit("""
        import sys, jax.numpy as jnp, tracegraph as tg
        captured = tg.capture(lambda x: x @ x / 2048)
        y = captured(jnp.ones((2048, 2048)))
        for _ in range(100):
            y = captured(y)
        print("done")
        sys.exit(0)
        """).endswith("done\n")


def test_interpreter_exit_with_a_cycle_and_threads():
    assert run_to_exit("""
        import gc, threading, jax.numpy as jnp, tracegraph as tg
        gc.set_threshold(200, 2, 2)
        def make(index):
            captured = tg.capture(lambda x: jnp.sort(x) * index)
            captured.cycle = captured
            return captured
        kept = [make(index) for index in range(4)]
        def call(captured):
            for _ in range(20):
                captured(jnp.arange(100.0))
        threads = [threading.Thread(target=call, args=(each,)) for each in kept]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print("done")
        """).endswith("done\n")


def test_state_of_a_dropped_graph_is_still_an_array():
    captured = tg.capture(step, donate_argnums=0)
    state, y = captured(make_state(), jnp.zeros((300, 300)))
    del captured, y
    gc.collect()
    assert np.array_equal(jax.jit(lambda w: w + 1)(state["w"]), np.eye(300) + 1)
