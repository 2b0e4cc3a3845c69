"""Interpreter exit with everything alive: exit status 0 and not a word on standard error."""

from __future__ import annotations

import pathlib
import textwrap

import pytest

from tests.fakes.pluggable_library import compile_library
from tests.processes import run_program, run_python

EVERYTHING = """
    import gc, sys, threading, time
    import jax, jax.numpy as jnp, numpy as np, tracegraph as tg
    gc.unfreeze()
    tg.memory.record_memory_history()
    step = tg.capture(lambda s, x: ({"w": s["w"] + x}, s["w"] * 2), donate_argnums=0)
    state, y = step({"w": jnp.ones(1000)}, 1.0)
    state, unread = step(state, 1.0)
    pool = tg.memory.MemPool(no_split=True)
    shared = tg.capture(lambda x: (x, x + 1), pool=pool, outputs="static")
    static = shared(jnp.ones(10))
    handle = tg.graph_pool_handle()
    by_handle = tg.capture(lambda x: (x, x - 1), pool=handle)
    kept = by_handle(jnp.ones(10)), by_handle.lower(jnp.ones(20)).instantiate()
    with tg.memory.use_mem_pool(pool):
        raw = tg.memory.caching_allocator_alloc(1000)
    raw_default = tg.memory.caching_allocator_alloc(1 << 20)
    pinned = tg.memory.pin_memory(np.ones(1000)), tg.memory.pin_memory({"x": jnp.ones(5)})
    event, stream = tg.Event(), tg.Stream()
    event.record(stream)
    cycle = [step, state, pool]
    cycle.append(cycle)
"""


@pytest.mark.parametrize(
    "variables",
    [
        {"TRACEGRAPH_ALLOC_CONF": "expandable_segments:True"},
        {"TRACEGRAPH_ALLOC_CONF": "backend:cudaMallocAsync"},
        {"TRACEGRAPH_ALLOC_CONF": "pinned_use_background_threads:True"},
        {"TRACEGRAPH_NO_MEMORY_CACHING": "1"},
        {"TRACEGRAPH_CHECK_REPLAY": "1"},
    ],
    ids=str,
)
def test_with_everything_alive(variables: dict[str, str]) -> None:
    assert run_program(EVERYTHING + "    print('done')\n", **variables) == "done\n"


def test_in_a_process_that_is_no_copy() -> None:
    options = ["-X", "faulthandler", "-W", "error"]
    done = run_python(
        [*options, "-c", textwrap.dedent(EVERYTHING)], variables={"JAX_PLATFORMS": "cpu"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(0)",
        "context = tg.memory.use_mem_pool(pool); context.__enter__(); sys.exit(0)",
        "gc.disable(); sys.exit(0)",
        "gc.freeze(); sys.exit(0)",
        "sys.modules['kept'] = cycle; sys.exit(0)",
        "import atexit; atexit.register(lambda: (step(state, 1.0), tg.memory.memory_stats()))",
        "import atexit; atexit.register(globals().clear)",
    ],
)
def test_ends_of_all_kinds(end: str) -> None:
    run_program(f"{EVERYTHING}    {end}\n")


def test_while_threads_wait_in_the_middle() -> None:
    """Daemon threads that hold graphs, a pool context and the lock of the allocator."""
    run_program(
        EVERYTHING
        + """
    inside = threading.Barrier(4)

    def hold(context):
        with context:
            inside.wait()
            time.sleep(100)

    allocator = step._pool.join(step._device).allocator
    contexts = tg.memory.use_mem_pool(tg.memory.MemPool()), allocator.lock, step._latest.lock
    for context in contexts:
        threading.Thread(target=hold, args=(context,), daemon=True).start()
    inside.wait()
    del step, state, y, shared, pool
    gc.collect()
    """
    )


def test_while_threads_replay() -> None:
    """Threads that are joined: they go on while the main thread is already at its end."""
    run_program(
        EVERYTHING
        + """
    captured = threading.Barrier(4)

    def work(number):
        mine = tg.capture(lambda s: s + number, donate_argnums=0, pool=handle)
        state = mine(jnp.zeros(100))
        captured.wait()
        for turn in range(300):
            state = mine(state)
            if turn % 50 == 0:
                tg.memory.caching_allocator_delete(tg.memory.caching_allocator_alloc(turn + 1))
        assert float(state[0]) == 301 * number

    for number in range(3):
        threading.Thread(target=work, args=(number,)).start()
    captured.wait()
    """
    )


def test_while_daemons_allocate() -> None:
    """In the allocator only: a daemon inside of JAX's own caches may end the process with abort."""
    run_program(
        EVERYTHING
        + """
    started = threading.Barrier(4)

    allocator = step._pool.join(step._device).allocator

    def work():
        started.wait()
        while True:
            block = allocator.allocate(1000)
            allocator.statistics.to_dict()
            allocator.free(block)

    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    started.wait()
    time.sleep(0.05)
    """
    )


def test_with_an_allocator_of_the_user(tmp_path: pathlib.Path) -> None:
    """The library is still there when its memory is freed, if it is freed at all."""
    program = EVERYTHING.replace(
        "tg.memory.record_memory_history()",
        "tg.memory.change_current_allocator("
        'tg.memory.PluggableAllocator(sys.argv[1], "test_allocate", "test_free"))',
    )
    run_program(program, compile_library(tmp_path))


def test_planted_a_word_on_standard_error_is_seen() -> None:
    with pytest.raises(AssertionError, match="planted"):
        run_program("import sys; sys.stderr.write('planted')")
    with pytest.raises(AssertionError):
        run_program("import os; os._exit(3)")
    with pytest.raises(AssertionError, match="Exception ignored"):
        run_program(
            """
            import weakref
            class Kept: pass
            kept = Kept()
            weakref.finalize(kept, lambda: 1 / 0).atexit = False
            del kept
            """
        )
