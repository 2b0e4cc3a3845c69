"""Pools shared by captures: in every way, to the byte, and what a pool that is gone says."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.devices import add_in_two_regions, ones, use_device
from tests.fakes.pluggable_library import PluggableLibrary
from tests.oracles import error_lines
from tracegraph.memory import MemPool, empty_cache, memory_reserved
from tracegraph.runtime.definition.graph import ArenaSize
from tracegraph.runtime.memory.sizes import round_exact

N = 1000
KINDS = ("host", "jax", "cuda_async")
WAYS = ("function", "handle", "MemPool", "id of a MemPool")


@pytest.fixture(params=KINDS, autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    use_device(monkeypatch, request.param)
    gc.collect()
    empty_cache()
    before = memory_reserved()
    yield request.param
    gc.collect()
    empty_cache()
    assert memory_reserved() == before


def read_size(captured: tg.GraphedFunction) -> ArenaSize:
    assert captured._latest is not None
    return captured._latest.lowered.definition.arena_size


def make_chain(way: str, *counts: int) -> tuple[list[tg.GraphedFunction], Any]:
    """Returns graphs of one pool, for arguments of so many elements, and what names the pool."""
    pool: Any = {"function": None, "handle": tg.graph_pool_handle()}.get(way)
    owner = MemPool() if "MemPool" in way else None
    if owner is not None:
        pool = owner if way == "MemPool" else owner.id
    chain = []
    for index, count in enumerate(counts):
        captured = tg.capture(add_in_two_regions(index), pool=pool, verify=False)
        captured(ones(count))
        chain.append(captured)
        pool = captured.pool() if way == "function" else pool
    return chain, owner or pool


def check_values(chain: list[tg.GraphedFunction], *counts: int) -> None:
    for index in (2, 0, 1, 1, 2, 0):
        result = chain[index](ones(counts[index]))
        np.testing.assert_array_equal(np.asarray(result), np.full(counts[index], 1.0 + index))


@pytest.mark.parametrize("way", WAYS)
def test_three_captures_share_in_every_way(way: str, kind: str) -> None:
    before = memory_reserved()
    chain, owner = make_chain(way, N, N, N)
    sizes = [read_size(each) for each in chain]
    # Each has its kept part, and all of them have one scratch.
    kept = sum(round_size(size.kept_bytes, kind) for size in sizes)
    shared = round_size(max(size.scratch_bytes for size in sizes), kind)
    assert all(size.scratch_bytes >= 4 * N for size in sizes)
    assert memory_reserved() - before == kept + shared
    assert {each.pool_bytes for each in chain} == {kept + shared}
    assert len({each.pool() for each in chain}) == 1
    check_values(chain, N, N, N)
    assert memory_reserved() - before == kept + shared
    if isinstance(owner, MemPool):
        assert owner.use_count() == 2
        assert sum(segment["total_size"] for segment in owner.snapshot()) == kept + shared


def round_size(nbytes: int, kind: str) -> int:
    return nbytes if kind == "cuda_async" else round_exact(nbytes)


@pytest.mark.parametrize("way", WAYS)
def test_captures_of_different_sizes(way: str, kind: str) -> None:
    before = memory_reserved()
    counts = (N, 4 * N, 2 * N)
    chain, _owner = make_chain(way, *counts)
    sizes = [read_size(each) for each in chain]
    kept = sum(round_size(size.kept_bytes, kind) for size in sizes)
    # The second does not fit into the scratch of the first; the third shares that of the second.
    scratch = sum(round_size(size.scratch_bytes, kind) for size in sizes[:2])
    assert memory_reserved() - before == kept + scratch
    check_values(chain, *counts)


@pytest.mark.parametrize("count", [1, 100, N, 300_000, 5_000_000])
def test_the_bytes_before_the_capture_are_those_after_it(count: int, kind: str) -> None:
    captured = tg.capture(add_in_two_regions(1.0), verify=False)
    lowered = captured.lower(ones(count))
    before = memory_reserved()
    graph = lowered.instantiate()
    taken = memory_reserved() - before
    assert lowered.pool_bytes == taken or kind == "cuda_async"
    assert 0 <= lowered.pool_bytes - taken < lowered.pool_bytes // 30 + 1024
    assert f"{lowered.pool_bytes:,} bytes, known before the first run" in captured.explain(
        ones(count)
    )
    np.testing.assert_array_equal(np.asarray(graph(ones(count))), np.full(count, 2.0))


def test_in_a_shared_pool_the_bytes_before_are_the_most() -> None:
    first = tg.capture(add_in_two_regions(1.0), verify=False)
    first(ones(N))
    second = tg.capture(add_in_two_regions(2.0), pool=first.pool(), verify=False)
    lowered = second.lower(ones(N))
    before = memory_reserved()
    graph = lowered.instantiate()
    taken = memory_reserved() - before
    # The scratch of the first serves the second as well; its kept part is its own.
    assert taken < lowered.pool_bytes
    size = lowered.lowered.definition.arena_size
    assert lowered.pool_bytes - taken >= size.scratch_bytes
    assert taken >= size.kept_bytes
    np.testing.assert_array_equal(np.asarray(graph(ones(N))), np.full(N, 3.0))


@pytest.mark.parametrize("way", ["id", "function"])
def test_a_pool_of_a_dead_function_is_refused(way: str) -> None:
    first = tg.capture(add_in_two_regions(1.0))
    first(ones(N))
    pool = first.pool() if way == "id" else MemPool().id
    del first
    gc.collect()
    with pytest.raises(tg.TracegraphError) as raised:
        tg.capture(lambda x: x, pool=pool)
    error_lines.match(
        raised.value, f"there is no pool {pool}", f"private pool {pool}", "a pool", "keep the"
    )


def test_a_function_keeps_the_pool_that_it_is_to_share() -> None:
    first = tg.capture(add_in_two_regions(1.0))
    first(ones(N))
    second = tg.capture(add_in_two_regions(2.0), pool=first.pool())
    del first
    gc.collect()
    np.testing.assert_array_equal(np.asarray(second(ones(N))), np.full(N, 3.0))


def test_a_handle_serves_again_after_its_graphs() -> None:
    handle = tg.graph_pool_handle()
    for amount in (1.0, 2.0):
        captured = tg.capture(add_in_two_regions(amount), pool=handle)
        np.testing.assert_array_equal(np.asarray(captured(ones(N))), np.full(N, 1 + amount))
        assert captured.pool() == handle
        del captured
        gc.collect()


def test_a_mem_pool_keeps_what_its_graphs_have_left(kind: str) -> None:
    pool = MemPool()
    before = memory_reserved()
    sizes = []
    for amount in (1.0, 2.0):
        captured = tg.capture(add_in_two_regions(amount), pool=pool)
        captured(ones(N))
        del captured
        gc.collect()
        sizes.append(memory_reserved() - before)
    # The second graph is where the first was.
    assert sizes[0] == sizes[1]
    assert (sizes[0] > 0) == (kind != "cuda_async")


def test_a_mem_pool_without_splits() -> None:
    pool = MemPool(no_split=True)
    captured = tg.capture(add_in_two_regions(1.0), pool=pool)
    np.testing.assert_array_equal(np.asarray(captured(ones(N))), np.full(N, 2.0))
    segments = pool.snapshot()
    assert all(len(segment["blocks"]) == 1 for segment in segments)
    assert captured.pool_bytes == sum(segment["total_size"] for segment in segments)
    del captured


def test_a_mem_pool_with_an_allocator_of_the_user(tmp_path: pathlib.Path, kind: str) -> None:
    library = PluggableLibrary(tmp_path)
    pool = MemPool(library.open())
    before = memory_reserved()
    captured = tg.capture(lambda s, x: (s + x, s * 2), donate_argnums=0, pool=pool)
    state, y = captured(ones(N), ones(N))
    state, y = captured(state, y)
    assert library.read("live_bytes") == captured.pool_bytes == memory_reserved() - before
    np.testing.assert_array_equal(np.asarray(y), np.full(N, 4.0))
    assert captured._latest is not None
    arena = captured._latest.replay.arena
    assert type(arena.block.segment.storage).__name__ == "OwnedMemory"
    del captured, pool, arena
    gc.collect()
    # The state lives in memory of the library, which must not be freed under it.
    assert library.read("live_count") >= 1
    np.testing.assert_array_equal(np.asarray(state), np.full(N, 4.0))
    del state, y
    gc.collect()
    assert (library.read("live_count"), library.read("wrong_frees")) == (0, 0)
    assert kind in KINDS
