"""Lifetimes on a GPU: nothing is freed under pending work, whatever gets the memory next."""

from __future__ import annotations

import ctypes
import gc
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.subprocesses import run_python
from tests.gpu.test_pools import SETTINGS
from tracegraph.memory import caching_allocator_alloc, caching_allocator_delete
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.default_device import find_any_device

pytestmark = pytest.mark.usefixtures("gpu", "untried")
MIB = 1 << 20
# Large, because the driver takes about a thousand copies before the host has to wait.
SIDE_BYTES = 2048 * MIB
N = 2048


class SideWork:
    """Work on a stream of the user: slow copies, and reads of memory behind them."""

    def __init__(self) -> None:
        device: Any = find_any_device()
        self.stream, self.context = tg.Stream(), device.context
        self.order, self.driver = self.context.order, self.context.driver
        self.handle = self.order.find_stream(self.stream)
        self._blocks = [caching_allocator_alloc(SIDE_BYTES, stream=self.stream) for _ in range(2)]

    def delay(self, count: int = 300) -> None:
        """Keeps the stream busy, about a millisecond per copy, behind what is on JAX's by now.

        A collection of garbage in a process with JAX in it takes some tenths of a second.
        """
        self.order.make_wait(self.handle, self.order.stream)
        with self.order.use_context():
            for _ in range(count):
                self.driver.copy_async(*self._blocks, SIDE_BYTES, self.handle)

    def read(self, address: int, nbytes: int) -> int:
        """Enqueues a copy; returns where it will stand."""
        target = caching_allocator_alloc(nbytes, stream=self.stream)
        with self.order.use_context():
            self.driver.copy_async(target, address, nbytes, self.handle)
        return target

    def fetch(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Waits for the stream, returns floats of the device's memory, and frees it."""
        with self.order.use_context():
            host = self.driver.allocate_host(nbytes)
            try:
                self.driver.copy_async(host, address, nbytes, self.handle)
                self.driver.synchronize_stream(self.handle)
                content = ctypes.string_at(host, nbytes)
            finally:
                self.driver.free_host(host)
        caching_allocator_delete(address)
        return np.frombuffer(content, np.float32)

    def close(self) -> None:
        self.stream.synchronize()
        for address in self._blocks:
            caching_allocator_delete(address)
        tg.memory.empty_cache()


@pytest.fixture
def side() -> Any:
    work = SideWork()
    yield work
    work.close()


def compute(count: int) -> list[jax.Array]:
    return [jnp.full((N, N), jnp.nan) for _ in range(count)]


def copy_from_host(count: int) -> list[jax.Array]:
    value = np.full((N, N), np.nan, np.float32)
    return [jax.device_put(value) for _ in range(count)]


def copy_from_pinned(count: int) -> list[jax.Array]:
    value = tg.memory.pin_memory(np.full((N, N), np.nan, np.float32))
    captured = tg.capture(lambda x: (x, x + 1), verify=False)
    return [captured(value)[1] for _ in range(count)]


NEXT_USERS: list[Callable[[int], list[jax.Array]]] = [compute, copy_from_host, copy_from_pinned]


@pytest.mark.parametrize("take", NEXT_USERS, ids=lambda take: take.__name__)
def test_memory_that_is_dropped_under_replays(take: Callable[[int], list[jax.Array]]) -> None:
    """The next owner, on whatever stream JAX copies, comes after the replays."""
    for _ in range(3):
        captured = tg.capture(
            lambda s, x: (s @ x / N, s[0] @ x @ x / N**2), donate_argnums=0, verify=False
        )
        x = jnp.ones((N, N))
        state, y = captured(jnp.ones((N, N)), x)
        for _ in range(30):
            state, y = captured(state, x)
        del captured, state, x
        gc.collect()
        poison = take(8)
        assert np.array_equal(np.asarray(y), np.ones(N, np.float32))
        assert np.isnan(np.asarray(poison[-1])).all()


def test_a_graph_in_the_memory_of_another_that_is_still_replayed() -> None:
    pool = tg.memory.MemPool()
    results = []
    for index in range(6):
        captured = tg.capture(
            lambda s, n=index: (s @ jnp.eye(N) + 0 * n, (s @ jnp.eye(N)).sum(0)),
            donate_argnums=0,
            pool=pool,
            verify=False,
        )
        state, y = captured(jnp.full((N, N), float(index)))
        for _ in range(5):
            state, y = captured(state)
        results.append(y)
        del captured, state
        gc.collect()
    values = [float(y[0]) for y in results]
    assert values == [float(index) * N for index in range(6)]


@pytest.mark.usefixtures("alone_on_gpu")
@pytest.mark.parametrize("is_recorded", [True, False])
def test_record_stream_of_a_result(is_recorded: bool, side: SideWork) -> None:
    captured = tg.capture(lambda x: x * 2, verify=False)
    nbytes, sevens = 4 * N * N, jnp.ones((N, N)) * 7
    result = captured(jnp.ones((N, N)))
    address = result.data_ptr()
    side.delay(900)
    target = side.read(address, nbytes)
    if is_recorded:
        result.record_stream(side.stream)
    del result
    gc.collect()
    # Computed before: of the same type, so that it is the same graph.
    later = [captured(sevens) for _ in range(4)]
    taken = {each.data_ptr() for each in later}
    found = side.fetch(target, nbytes)
    # Without a record the memory is written again at once; whether that is seen is a race.
    assert (address in taken) == (not is_recorded)
    assert not is_recorded or np.array_equal(found, np.full(N * N, 2.0, np.float32))


@pytest.mark.usefixtures("alone_on_gpu")
def test_record_stream_of_state(side: SideWork) -> None:
    pool = tg.memory.MemPool()
    captured = tg.capture(lambda s: s + 1, donate_argnums=0, pool=pool, verify=False)
    state = captured(jnp.ones((N, N)))
    assert isinstance(state, Array)
    nbytes, address = 4 * N * N, state.data_ptr()
    other = tg.capture(lambda s: s + 1, donate_argnums=0, pool=pool, verify=False)
    sevens = jnp.ones((N, N)) * 7
    lowered = other.lower(sevens)
    side.delay(900)
    target = side.read(address, nbytes)
    state.record_stream(side.stream)
    del captured, state
    gc.collect()
    # The driver unloads the kernels of a dropped graph only when the GPU has nothing to do.
    is_over = side.stream.query()
    kept = lowered.instantiate()(sevens)
    assert is_over or kept.data_ptr() != address
    assert np.array_equal(side.fetch(target, nbytes), np.full(N * N, 2.0, np.float32))


def test_memory_of_jax_that_goes_to_another_stream(side: SideWork) -> None:
    """JAX's stream still reads it; the other stream's first write comes behind that."""
    x = jnp.ones((N, N))
    for _ in range(10):
        y = x @ jnp.ones((N, N)) / N
        for _ in range(30):
            y = y @ x / N
        total = y.sum()
        address = y.unsafe_buffer_pointer()
        del y
        target = caching_allocator_alloc(4 * N * N, stream=side.stream)
        with side.order.use_context():
            side.driver.fill_async(target, 0xFF, 1, 4 * N * N, side.handle)
        assert float(total) == N * N, address == target
        caching_allocator_delete(target)
        tg.memory.empty_cache()


def test_memory_of_another_stream_that_goes_to_jax(side: SideWork) -> None:
    """The other stream still writes it; JAX's first write comes behind that."""
    for _ in range(5):
        target = caching_allocator_alloc(4 * N * N, stream=side.stream)
        side.delay(50)
        with side.order.use_context():
            side.driver.fill_async(target, 0xFF, 1, 4 * N * N, side.handle)
        caching_allocator_delete(target)
        tg.memory.empty_cache()
        arrays = [jnp.full((N, N), 3.0) + index for index in range(8)]
        side.stream.synchronize()
        for index, array in enumerate(arrays):
            assert np.array_equal(np.asarray(array), np.full((N, N), 3.0 + index))


PROGRAM = """
    import gc, jax, jax.numpy as jnp, numpy as np, tracegraph as tg
    def run(n):
        captured = tg.capture(lambda s, x: (s @ x / 1024, s.sum()), donate_argnums=0, verify=False)
        x = jnp.ones((1024, 1024))
        state, total = captured(jnp.ones((1024, 1024)), x)
        for _ in range(50):
            state, total = captured(state, x)
        if n % 2:
            del state
        del captured
        gc.collect()
        poison = [jnp.full((1024, 1024), jnp.nan) for _ in range(4)]
        copies = [jax.device_put(np.full((1024, 1024), np.nan, np.float32)) for _ in range(4)]
        tg.memory.empty_cache()
        assert float(total) == 1024.0 * 1024, total
        if n % 2 == 0:
            assert float(state[3, 3]) == 1.0
    for n in range(6):
        run(n)
    gc.collect()
    tg.memory.empty_cache()
    assert tg.memory.memory_reserved() == 0
    captured = tg.capture(lambda s: (s @ s / 1024, s.sum()), donate_argnums=0)
    state, total = captured(jnp.ones((1024, 1024)))
    for _ in range(100):
        state, total = captured(state)
    print("done")
"""


@pytest.mark.parametrize("name", SETTINGS)
def test_every_provider(name: str) -> None:
    """Dropped in the middle of replays, and alive in the middle of them at interpreter exit."""
    done = run_python(
        ["-X", "faulthandler", "-c", textwrap.dedent(PROGRAM)],
        variables={"TRACEGRAPH_ALLOC_CONF": SETTINGS[name]},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")
    for trouble in ("Exception ignored", "Fatal Python error"):
        assert trouble not in done.stderr, done.stderr
