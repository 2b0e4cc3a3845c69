"""What is chosen once per process: backend, caching, the user's own allocator; several devices."""

from __future__ import annotations

import pathlib

import pytest

from tests.fakes.pluggable_library import compile_library
from tests.processes import run_program

USE_ALL = """
    import gc, jax, jax.numpy as jnp, numpy as np, tracegraph as tg
    step = tg.capture(lambda s, x: (s + x, s * 2), donate_argnums=0)
    planned = step.lower(jnp.ones(1000), 1.0).pool_bytes
    state, y = step(jnp.ones(1000), 1.0)
    state, y = step(state, 1.0)
    excess = planned - step.pool_bytes
    assert np.array_equal(y, np.full(1000, 4.0)) and float(state[3]) == 3.0
    address = tg.memory.caching_allocator_alloc(1000)
    allocated = tg.memory.memory_allocated() - step.pool_bytes
    reserved = tg.memory.memory_reserved() - step.pool_bytes
    tg.memory.caching_allocator_delete(address)
    pool = tg.memory.MemPool(no_split=True)
    with tg.memory.use_mem_pool(pool):
        tg.memory.caching_allocator_delete(tg.memory.caching_allocator_alloc(10))
    shared = tg.capture(lambda x: (x, x + 1), pool=pool)
    assert np.array_equal(shared(jnp.ones(5))[1], np.full(5, 2.0))
    tg.memory.dump_snapshot("/dev/null")
    assert "tracegraph memory" in tg.memory.memory_summary()
    kept = y
    del step, state, y, shared, pool, address
    gc.collect()
    tg.memory.empty_cache()
    print(tg.memory.get_allocator_backend(), allocated, reserved, excess)
    assert tg.memory.memory_reserved() == tg.memory.memory_allocated() == 0
"""
MIB = 1 << 20


@pytest.mark.parametrize(
    "conf",
    [
        "",
        "expandable_segments:True",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.5,max_split_size_mb:20",
    ],
)
def test_the_native_backend(conf: str) -> None:
    words = run_program(USE_ALL, TRACEGRAPH_ALLOC_CONF=conf).split()
    assert words == ["native", "1024", str(2 * MIB), "0"]


def test_the_backend_without_a_cache_of_ours() -> None:
    words = run_program(USE_ALL, TRACEGRAPH_ALLOC_CONF="backend:cudaMallocAsync").split()
    assert words[:3] == ["cudaMallocAsync", "1000", "1000"]
    # Nothing is rounded: less than what was planned, by less than a multiple of 512.
    assert 0 <= int(words[3]) < 512


def test_without_caching_nothing_is_counted() -> None:
    program = USE_ALL.replace("- step.pool_bytes\n", "\n")
    words = run_program(program, TRACEGRAPH_NO_MEMORY_CACHING="1").split()
    assert words[:3] == ["native", "0", "0"]


def test_a_wrong_setting_is_refused_at_the_first_use() -> None:
    out = run_program(
        """
        import tracegraph as tg
        captured = tg.capture(lambda x: x)
        for use in (lambda: captured(1.0), tg.memory.memory_stats, tg.memory.MemPool):
            try:
                use()
            except tg.ConfigError as error:
                print(error.where, "|", error.anchor)
        """,
        TRACEGRAPH_ALLOC_CONF="max_split_size:1",
    )
    assert out.count("TRACEGRAPH_ALLOC_CONF in the environment of this process, entry") == 3


def test_an_allocator_of_the_user(tmp_path: pathlib.Path) -> None:
    program = """
        import ctypes, gc, sys
        import jax.numpy as jnp, numpy as np, tracegraph as tg
        library = ctypes.CDLL(sys.argv[1])
        read = lambda name: ctypes.c_ssize_t.in_dll(library, name).value
        mine = tg.memory.PluggableAllocator(sys.argv[1], "test_allocate", "test_free")
        tg.memory.change_current_allocator(mine)
        step = tg.capture(lambda s, x: (s + x, s * 2), donate_argnums=0)
        state, y = step(jnp.ones(1000), jnp.ones(1000))
        state, y = step(state, y)
        assert float(state[0]) == 4.0 and float(y[999]) == 4.0
        assert tg.memory.get_allocator_backend() == "pluggable"
        assert read("live_bytes") == tg.memory.memory_reserved() == step.pool_bytes > 8000
        address = tg.memory.caching_allocator_alloc(100)
        assert read("live_bytes") == step.pool_bytes + 100
        tg.memory.caching_allocator_delete(address)
        assert read("live_bytes") == step.pool_bytes
        try:
            tg.memory.change_current_allocator(mine)
        except tg.ConfigError as error:
            print(error)
        del step, mine
        gc.collect()
        assert float(state[1]) == 4.0 and read("live_count") == 1
        del state, y
        gc.collect()
        print(read("live_count"), read("live_bytes"), read("wrong_frees"))
    """
    out = run_program(program, compile_library(tmp_path))
    assert out.startswith("the allocator is in use and cannot be changed\n  where: change_current")
    assert out.endswith("python -m tracegraph error pluggable-allocator\n0 0 0\n")


def test_an_allocator_of_the_user_that_has_nothing(tmp_path: pathlib.Path) -> None:
    program = """
        import ctypes, gc, sys
        import jax.numpy as jnp, tracegraph as tg
        library = ctypes.CDLL(sys.argv[1])
        limit = ctypes.c_ssize_t.in_dll(library, "limit_bytes")
        mine = tg.memory.PluggableAllocator(sys.argv[1], "test_allocate", "test_free")
        tg.memory.change_current_allocator(mine)
        captured = tg.capture(lambda x: (x, x * 2))
        for limit.value in (0, 100, 100_000):
            try:
                print(float(captured(jnp.ones(1000))[1][0]))
            except tg.OutOfMemoryError as error:
                print(error.what)
    """
    out = run_program(program, compile_library(tmp_path)).splitlines()
    assert out[2:] == ["2.0"]
    assert all(line.startswith("out of memory: tried to allocate") for line in out[:2])


def test_two_devices() -> None:
    program = """
        import gc, jax, jax.numpy as jnp, tracegraph as tg
        first, second = jax.devices("cpu")
        on_first = tg.capture(lambda x: (x, x * 2))
        on_first(jnp.ones(1000))
        with jax.default_device(second):
            on_second = tg.capture(lambda x: (x, x + 1))
            y = on_second(jnp.ones(5000))[1]
            assert y.devices() == {second}
        assert tg.memory.memory_allocated(1) == tg.memory.memory_allocated(second) > 40_000
        assert tg.memory.memory_allocated() == on_first.pool_bytes
        address = tg.memory.caching_allocator_alloc(1, device=1)
        found = {s["device"]: s["total_size"] for s in tg.memory.memory_snapshot()}
        assert found == {0: on_first.pool_bytes, 1: 2 << 20}, found
        assert tg.memory.memory_reserved(0) == on_first.pool_bytes
        tg.memory.caching_allocator_delete(address)
        tg.memory.empty_cache()
        assert tg.memory.memory_reserved(1) == on_second.pool_bytes
        tg.memory.dump_snapshot("/dev/null")

        # A pool is memory of one device, whatever made it.
        for pool in (on_first.pool(), tg.memory.MemPool(device=0), tg.memory.MemPool(device=0).id):
            with jax.default_device(second):
                try:
                    tg.capture(lambda x: x * 3, pool=pool)(1.0)
                except tg.TracegraphError as error:
                    print(error.what)
        mine = tg.memory.MemPool(device=1)
        try:
            with tg.memory.use_mem_pool(mine, device=0):
                pass
        except tg.ConfigError as error:
            print(error.where)
        with tg.memory.use_mem_pool(mine, device=1), tg.memory.use_mem_pool(tg.memory.MemPool()):
            a = tg.memory.caching_allocator_alloc(8, device=1)
            b = tg.memory.caching_allocator_alloc(8, device=0)
            assert tg.memory.memory_stats(1)["segment.all.current"] == 2
            assert len(mine.snapshot()) == 1
        with jax.default_device(second):
            shared = tg.capture(lambda x: (x, x - 1), pool=mine)
            shared(1.0)
        assert mine.use_count() == 2
        tg.memory.caching_allocator_delete(a)
        tg.memory.caching_allocator_delete(b)
        handle = tg.graph_pool_handle()
        one = tg.capture(lambda x: (x, x), pool=handle)
        one(2.0)
        with jax.default_device(second):
            try:
                tg.capture(lambda x: (x, x), pool=handle)(2.0)
            except tg.TracegraphError as error:
                print(error.what)
            del one
            gc.collect()
            tg.capture(lambda x: (x, x), pool=handle)(2.0)
    """
    flags = "--xla_force_host_platform_device_count=2"
    out = run_program(program, XLA_FLAGS=flags).splitlines()
    assert len(out) == 5
    refused = [each for each in out if each.endswith("is one of another device")]
    assert len(refused) == 3
    assert out[3] == "argument `pool` of tg.memory.use_mem_pool"
