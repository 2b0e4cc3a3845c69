"""A catalogue of what may surprise in tg.memory, and the wrong inputs of each of its functions."""

from __future__ import annotations

import gc
import inspect
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.pluggable_library import PluggableLibrary
from tracegraph import memory

MIB = 1 << 20
X = jnp.arange(1000.0)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    gc.collect()
    memory.empty_cache()
    yield
    memory.record_memory_history(None)
    memory.set_per_process_memory_fraction(1.0)


class Wrong(NamedTuple):
    """A call that is refused: what is raised, and how its text begins."""

    call: Callable[[], Any]
    error: type[BaseException]
    text: str


ADDRESS = (tg.TracegraphError, "nothing that caching_allocator_alloc returned is at")
FRACTION = (tg.ConfigError, "the memory fraction is")
NO_DEVICE = (tg.ConfigError, "`device` is")
NO_LIBRARY = (tg.ConfigError, "cannot load the library")
NO_PIN = (tg.TracegraphError, "an array of type")
NO_POOL = (tg.ConfigError, "`pool` is")
NO_PLUGGABLE = (tg.ConfigError, "`allocator` is a")
NO_POOL_ID = (tg.ConfigError, "`mempool_id` is")


def use(pool: Any, device: Any = None) -> None:
    with memory.use_mem_pool(pool, device):
        raise AssertionError("the context was entered")


def list_wrong_devices(name: str) -> list[Wrong]:
    function = getattr(memory, name)
    return [Wrong(lambda d=d: function(device=d), *NO_DEVICE) for d in (-1, "gpu:0", object())]


def make_wrong(name: str, values: tuple[Any, ...], error: type, text: str) -> list[Wrong]:
    function = getattr(memory, name)
    return [Wrong(lambda v=v: function(v), error, text) for v in values]


alloc, history = memory.caching_allocator_alloc, memory.record_memory_history
WRONG: dict[str, list[Wrong]] = {
    "MemPool": [
        *make_wrong("MemPool", ("jax", 3, memory.PluggableAllocator), *NO_PLUGGABLE),
        Wrong(lambda: memory.MemPool(use_on_oom="no"), tg.ConfigError, "`use_on_oom` is 'no'"),  # type: ignore[arg-type]
        Wrong(lambda: memory.MemPool(no_split=1), tg.ConfigError, "`no_split` is 1"),  # type: ignore[arg-type]
        Wrong(lambda: memory.MemPool(device=99), *NO_DEVICE),
    ],
    "PluggableAllocator": [
        Wrong(lambda: memory.PluggableAllocator("/none.so", "a", "b"), *NO_LIBRARY),
        Wrong(lambda: memory.PluggableAllocator(__file__, "a", "b"), *NO_LIBRARY),
        Wrong(lambda: memory.PluggableAllocator(pathlib.Path("/"), "a", "b"), *NO_LIBRARY),
        Wrong(lambda: memory.PluggableAllocator(None, "a", "b"), TypeError, "expected str"),  # type: ignore[arg-type]
    ],
    "caching_allocator_alloc": [
        *make_wrong("caching_allocator_alloc", (1.5, "1", None), tg.ConfigError, "`size` is"),
        Wrong(lambda: alloc(-1), tg.TracegraphError, "cannot allocate -1 bytes"),
        Wrong(lambda: alloc(1 << 60), tg.OutOfMemoryError, "cannot allocate 1,152,921,504,606,"),
        Wrong(lambda: alloc(1 << 50), tg.OutOfMemoryError, "out of memory: tried to allocate"),
        Wrong(lambda: alloc(1, stream=tg.Event()), tg.ConfigError, "`stream` is"),  # type: ignore[arg-type]
        Wrong(lambda: alloc(1, stream=0), tg.ConfigError, "`stream` is 0"),  # type: ignore[arg-type]
        Wrong(lambda: alloc(1, device="cpu"), *NO_DEVICE),
    ],
    "caching_allocator_delete": [
        *make_wrong("caching_allocator_delete", (0, -1, 1 << 40), *ADDRESS),
        *make_wrong("caching_allocator_delete", (1.0, None), tg.ConfigError, "`mem_ptr` is"),
    ],
    "change_current_allocator": make_wrong(
        "change_current_allocator", (None, "native", memory.PluggableAllocator), *NO_PLUGGABLE
    ),
    "dump_snapshot": [
        Wrong(lambda: memory.dump_snapshot("/nowhere/x.pickle"), OSError, "[Errno 2]"),
        Wrong(lambda: memory.dump_snapshot("/"), OSError, "[Errno 21]"),
        Wrong(lambda: memory.dump_snapshot(3), TypeError, "expected str"),  # type: ignore[arg-type]
    ],
    "memory_snapshot": make_wrong("memory_snapshot", ("all", 3, (1, 2, 3), True), *NO_POOL_ID),
    "pin_memory": make_wrong(
        "pin_memory",
        (np.ma.array([1]), np.array([object()]), jax.random.key(0)),
        *NO_PIN,
    ),
    "record_memory_history": [
        *make_wrong("record_memory_history", ("on", 1, True), tg.ConfigError, "`enabled` of"),
        Wrong(lambda: history(context="most"), tg.ConfigError, "`context` of"),
        Wrong(lambda: history(stacks="cpp"), tg.ConfigError, "`stacks` of"),
        Wrong(lambda: history(max_entries=0), tg.ConfigError, "`max_entries` of"),
        Wrong(lambda: history(skip_actions="malloc"), tg.ConfigError, "`skip_actions` of"),
        Wrong(lambda: history(device=5), *NO_DEVICE),
    ],
    "set_per_process_memory_fraction": [
        *make_wrong("set_per_process_memory_fraction", (-0.1, 1.1, "half", None), *FRACTION),
        Wrong(lambda: memory.set_per_process_memory_fraction(0.5, "cpu"), *NO_DEVICE),
    ],
    "use_mem_pool": [
        Wrong(lambda: use(None), *NO_POOL),
        Wrong(lambda: use(tg.graph_pool_handle()), *NO_POOL),
        Wrong(lambda: use(memory.MemPool().id), *NO_POOL),
        Wrong(lambda: use(memory.MemPool(), 7), *NO_DEVICE),
    ],
    **{
        name: list_wrong_devices(name)
        for name in (
            "get_per_process_memory_fraction",
            "max_memory_allocated",
            "max_memory_reserved",
            "mem_get_info",
            "memory_allocated",
            "memory_reserved",
            "memory_stats",
            "memory_stats_as_nested_dict",
            "memory_summary",
            "reset_accumulated_memory_stats",
            "reset_peak_memory_stats",
        )
    },
}
# Whatever is given, there is an answer.
TAKES_ANYTHING = {"is_pinned", "synchronize_copies"}


def test_every_function_is_in_the_table() -> None:
    takes_arguments = {
        name for name in memory.__all__ if inspect.signature(getattr(memory, name)).parameters
    }
    assert takes_arguments == WRONG.keys() | TAKES_ANYTHING
    assert all(len(calls) >= 3 for calls in WRONG.values())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs(name: str) -> None:
    """Each is refused by a text that names it, and leaves everything as it was."""
    before = memory.memory_allocated(), memory.memory_reserved()
    for index, wrong in enumerate(WRONG[name]):
        with pytest.raises(wrong.error) as raised:
            wrong.call()
        text = str(raised.value)
        assert text.startswith(wrong.text), (index, text)
        if isinstance(raised.value, tg.TracegraphError):
            assert len(text.split("\n")) == 4
    gc.collect()
    assert (memory.memory_allocated(), memory.memory_reserved()) == before


@pytest.mark.parametrize("value", [None, 3, "text", np.zeros(3), X, {"a": [X]}], ids=repr)
def test_inputs_that_are_never_wrong(value: Any) -> None:
    assert not memory.is_pinned(value)
    memory.synchronize_copies(value)


def test_arrays_of_jax_do_not_count() -> None:
    """tg.memory is about the memory of graphs; JAX's own arrays are JAX's affair."""
    before = memory.memory_allocated()
    kept = [jnp.ones(MIB) for _ in range(3)]
    assert memory.memory_allocated() == before
    assert len(kept) == 3


def test_results_do_not_count_but_state_does() -> None:
    """A fresh result is a value of its own; state is always in the graph's arena."""
    captured = tg.capture(lambda s, x: (s + 1, x * 2), donate_argnums=0)
    state, _ = captured(X * 1, X)
    before, kept = memory.memory_allocated(), []
    for _ in range(5):
        state, result = captured(state, X)
        kept.append(result)
    assert memory.memory_allocated() == before == captured.pool_bytes
    assert len(kept) == 5


def test_empty_cache_takes_nothing_from_a_living_graph() -> None:
    """The memory of a graph is in use from its capture to its end, also between replays."""
    captured = tg.capture(lambda x: (x, x * 2))
    captured(X)
    memory.empty_cache()
    assert memory.memory_reserved() >= captured.pool_bytes > 0
    np.testing.assert_array_equal(np.asarray(captured(X)[1]), np.asarray(X) * 2)


def test_a_dropped_graph_gives_its_memory_back_at_once_but_not_from_a_mem_pool() -> None:
    """PyTorch waits for `empty_cache` in both cases; here JAX may need the memory."""
    for pool in (None, memory.MemPool()):
        captured = tg.capture(lambda x: (x, x * 2), pool=pool)
        captured(X)
        before = memory.memory_reserved()
        del captured
        gc.collect()
        assert (memory.memory_reserved() == before) == (pool is not None)


def test_a_leaf_of_state_keeps_the_whole_pool() -> None:
    """A small array in the pool keeps all of the arena; a copy keeps nothing."""
    captured = tg.capture(lambda s: (s[0] + 1, s[1] * 2), donate_argnums=0)
    small, large = captured((jnp.ones(1), jnp.ones(MIB)))
    del captured, large
    gc.collect()
    assert memory.memory_reserved() > 4 * MIB
    copy = jnp.array(small)
    del small
    gc.collect()
    assert memory.memory_reserved() == 0
    assert float(copy[0]) == 2.0


def test_a_pool_id_alone_keeps_nothing() -> None:
    """`pool()` names a pool; only functions, graphs, arrays and MemPool objects keep one."""
    captured = tg.capture(lambda x: (x, x * 2))
    captured(X)
    pool = captured.pool()
    del captured
    gc.collect()
    with pytest.raises(tg.TracegraphError, match="there is no pool"):
        tg.capture(lambda x: x, pool=pool)


def test_use_mem_pool_is_for_one_thread_and_not_for_captures() -> None:
    """A capture has the pool that its ``pool=`` names, wherever it is called."""
    pool = memory.MemPool()
    captured = tg.capture(lambda x: (x, x * 2))
    addresses: list[int] = []
    with memory.use_mem_pool(pool):
        captured(X)
        thread = threading.Thread(target=lambda: addresses.append(alloc(10)))
        thread.start()
        thread.join()
        assert pool.snapshot() == []
    memory.caching_allocator_delete(addresses[0])


def test_emptying_the_cache_inside_of_a_context_does_nothing() -> None:
    """As in PyTorch: not even for the default pool."""
    memory.caching_allocator_delete(alloc(MIB))
    before = memory.memory_reserved()
    with memory.use_mem_pool(memory.MemPool()):
        memory.empty_cache()
        assert memory.memory_reserved() == before == 2 * MIB
    memory.empty_cache()
    assert memory.memory_reserved() == 0


def test_an_address_is_deleted_once() -> None:
    """The same address may belong to another block by the second time."""
    address = alloc(100)
    memory.caching_allocator_delete(address)
    again = alloc(100)
    assert again == address
    memory.caching_allocator_delete(address)
    with pytest.raises(tg.TracegraphError, match="nothing that caching_allocator_alloc"):
        memory.caching_allocator_delete(again)


def test_the_memory_of_a_graph_cannot_be_deleted_by_its_address() -> None:
    """`data_ptr` of a state array may be where a block of the allocator begins."""
    captured = tg.capture(lambda s: s + 1, donate_argnums=0, outputs="static")
    state = captured(X * 1)
    with pytest.raises(tg.TracegraphError, match="nothing that caching_allocator_alloc"):
        memory.caching_allocator_delete(state.data_ptr())
    np.testing.assert_array_equal(np.asarray(captured(state)), np.asarray(X) + 2)


def test_the_fraction_is_of_all_that_the_allocator_has() -> None:
    """A fraction of 0 lets nothing new in, and takes nothing away."""
    address = alloc(100)
    memory.set_per_process_memory_fraction(0.0)
    within = alloc(100)
    with pytest.raises(tg.OutOfMemoryError, match="out of memory"):
        alloc(3 * MIB)
    memory.set_per_process_memory_fraction(1.0)
    for each in (address, within):
        memory.caching_allocator_delete(each)


def test_the_bytes_before_a_capture_are_for_a_pool_of_its_own() -> None:
    """In a shared pool `lower(...).pool_bytes` is the most that it may take."""
    first = tg.capture(lambda x: (x, x * 2))
    first(X)
    second = tg.capture(lambda x: (x, x * 3), pool=first.pool())
    planned = second.lower(X).pool_bytes
    before = memory.memory_reserved()
    second(X)
    assert memory.memory_reserved() - before <= planned


def test_a_peak_stays_until_it_is_reset() -> None:
    """Also after everything is gone."""
    memory.caching_allocator_delete(alloc(50 * MIB))
    memory.empty_cache()
    assert memory.max_memory_reserved() >= 50 * MIB
    memory.reset_peak_memory_stats()
    assert memory.max_memory_reserved() == memory.memory_reserved()


def test_history_is_kept_only_while_it_is_on(tmp_path: pathlib.Path) -> None:
    """What was allocated before has no stack; turning it off forgets the trace."""
    address = alloc(100)
    history(clear_history=True)
    (block,) = (
        block
        for segment in memory.memory_snapshot()
        for block in segment["blocks"]
        if block["address"] == address
    )
    assert block["frames"] == []
    memory.caching_allocator_delete(address)
    history(None)
    memory.dump_snapshot(tmp_path / "snapshot.pickle")
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0


def test_an_allocator_of_the_user_is_not_asked_again_for_what_is_cached(
    tmp_path: pathlib.Path,
) -> None:
    """A MemPool caches what its library allocated; the library frees it with the pool."""
    library = PluggableLibrary(tmp_path)
    pool = memory.MemPool(library.open())
    with memory.use_mem_pool(pool):
        memory.caching_allocator_delete(alloc(100))
    memory.empty_cache()
    assert library.read("live_count") == 1
    del pool
    gc.collect()
    assert library.read("live_count") == 0


def test_page_locked_memory_is_not_device_memory() -> None:
    """It has statistics and a cache of its own."""
    before = memory.memory_reserved()
    pinned = memory.pin_memory(np.zeros(MIB))
    assert memory.memory_reserved() == before
    assert memory.host_memory_stats()["active_bytes.current"] >= pinned.nbytes
    memory.empty_cache()
    assert memory.is_pinned(pinned)
