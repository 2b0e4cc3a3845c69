"""Pools, blocks and the host provider."""

from __future__ import annotations

import concurrent.futures
import gc
import pathlib
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from tracegraph.runtime.errors import ConfigError, OutOfMemoryError, TracegraphError
from tracegraph.runtime.memory.private_pool import (
    PoolId,
    PrivatePool,
    new_pool_id,
    round_up,
)
from tracegraph.runtime.memory.providers import host
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.segment import Block, Segment

MIB = 1 << 20


def make_pool(limit_bytes: int | None = None) -> tuple[PrivatePool, HostProvider]:
    provider = HostProvider(limit_bytes)
    return PrivatePool(PoolId(7), provider), provider


def test_pool_ids_are_pairs_and_never_repeat():
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda _: new_pool_id(), range(200)))
    assert len(set(ids)) == 200
    assert all(second == 0 and number > 0 for number, second in ids)
    assert str(PoolId(3)) == "(3, 0)"


@pytest.mark.parametrize(
    ("nbytes", "rounded"),
    [
        (0, 512),
        (1, 512),
        (512, 512),
        (513, 1024),
        (MIB - 1, MIB),
        (MIB, MIB),
        (MIB + 1, MIB + 32 * 1024),
        (128 * MIB, 128 * MIB),
        (128 * MIB + 1, 130 * MIB),
    ],
)
def test_sizes_are_rounded(nbytes: int, rounded: int):
    assert round_up(nbytes) == rounded
    pool, provider = make_pool()
    block = pool.allocate(nbytes)
    assert block.nbytes == block.segment.nbytes == rounded
    assert block.address == block.segment.address + block.offset
    assert pool.reserved_bytes == pool.allocated_bytes == provider.reserved_bytes == rounded


def test_a_freed_block_is_reused_by_best_fit():
    pool, provider = make_pool()
    large, small, medium = pool.allocate(8192), pool.allocate(512), pool.allocate(2048)
    for block in (large, small, medium):
        pool.free(block)
    assert (pool.allocated_bytes, pool.reserved_bytes) == (0, 8192 + 512 + 2048)
    again = pool.allocate(1500)
    assert again.segment is medium.segment
    assert pool.allocated_bytes == 2048
    assert pool.allocate(1500).segment is large.segment
    assert pool.allocate(1500).segment not in {large.segment, small.segment, medium.segment}
    assert provider.reserved_bytes == pool.reserved_bytes == 8192 + 512 + 2048 + 1536


def test_live_blocks_do_not_overlap_and_keep_what_is_written():
    pool, _ = make_pool()
    blocks = [pool.allocate(1000 * (1 + index % 5)) for index in range(20)]
    for index, block in enumerate(blocks):
        block.segment.storage[:] = index
    assert all((block.segment.storage == index).all() for index, block in enumerate(blocks))


def test_a_block_keeps_its_memory_alive_after_the_pool_is_gone():
    pool, provider = make_pool()
    block = pool.allocate(4096)
    block.segment.storage[:] = 7
    pool.close()
    del pool
    gc.collect()
    assert provider.reserved_bytes == 0
    assert (block.segment.storage == 7).all()


def test_close_gives_everything_back_once():
    pool, provider = make_pool()
    freed, kept = pool.allocate(1000), pool.allocate(5000)
    pool.free(freed)
    pool.close()
    pool.close()
    assert pool.is_closed
    assert pool.reserved_bytes == pool.allocated_bytes == provider.reserved_bytes == 0
    pool.free(kept)
    assert pool.reserved_bytes == 0
    with pytest.raises(TracegraphError, match="cannot allocate 100 bytes from a closed pool"):
        pool.allocate(100)


def test_a_pool_that_nobody_holds_gives_everything_back():
    class CountingProvider(HostProvider):
        def free(self, segment: Segment) -> None:
            returned.append(segment.nbytes)
            super().free(segment)

    returned: list[int] = []
    pool = PrivatePool(new_pool_id(), CountingProvider())
    block = pool.allocate(1000)
    pool.free(pool.allocate(3000))
    weak_pool = weakref.ref(pool)
    del pool
    gc.collect()
    assert weak_pool() is None
    assert sorted(returned) == [1024, 3072]
    assert block.nbytes == 1024


@pytest.mark.parametrize("kind", ["double free", "foreign block", "made-up block"])
def test_a_wrong_free_is_refused(kind: str):
    pool, provider = make_pool()
    other = PrivatePool(new_pool_id(), provider)
    block = pool.allocate(600)
    if kind == "double free":
        pool.free(block)
    elif kind == "foreign block":
        block = other.allocate(600)
    else:
        block = Block(block.segment, block.offset, block.nbytes)
    before = (pool.reserved_bytes, pool.allocated_bytes)
    with pytest.raises(TracegraphError) as raised:
        pool.free(block)
    error = raised.value
    assert (
        error.what == f"cannot free the block at {block.address:#x}: it is not in use in this pool"
    )
    assert error.where == "private pool (7, 0)"
    assert error.why.startswith("it was freed before or belongs to another pool")
    assert error.fix == "free each block once, in the pool that allocated it"
    assert error.anchor == "pool"
    assert (pool.reserved_bytes, pool.allocated_bytes) == before


def test_a_negative_size_is_refused():
    with pytest.raises(TracegraphError, match="cannot allocate -1 bytes"):
        make_pool()[0].allocate(-1)


def test_out_of_memory_names_all_and_loses_nothing():
    pool, provider = make_pool(limit_bytes=10_000)
    kept = pool.allocate(4000)
    with pytest.raises(OutOfMemoryError) as raised:
        pool.allocate(8000)
    error = raised.value
    assert error.what == "cannot reserve 8,192 bytes of host memory"
    assert error.where == (
        "private pool (7, 0) with 4,096 bytes, host provider: wanted 8,192 bytes, free 5,904 bytes"
    )
    assert error.why.startswith("a graph keeps all of its buffers")
    assert error.fix.startswith("donate the state")
    assert error.anchor == "out-of-memory"
    assert provider.reserved_bytes == pool.reserved_bytes == 4096
    assert pool.allocate(5000).nbytes == 5120
    assert pool.allocated_bytes == kept.nbytes + 5120


def test_free_segments_are_released_before_out_of_memory():
    pool, provider = make_pool(limit_bytes=10_000)
    pool.free(pool.allocate(4000))
    assert pool.allocate(8000).nbytes == 8192
    assert provider.reserved_bytes == pool.reserved_bytes == 8192
    with pytest.raises(OutOfMemoryError, match="cannot reserve 4,096 bytes"):
        pool.allocate(4000)


def test_out_of_memory_after_releasing_free_segments():
    pool, _ = make_pool(limit_bytes=10_000)
    pool.free(pool.allocate(4000))
    with pytest.raises(OutOfMemoryError, match=r"private pool \(7, 0\) with 0 bytes"):
        pool.allocate(20_000)
    assert pool.allocate(4000).nbytes == 4096


def test_more_than_the_machine_has_is_refused_before_it_is_allocated():
    provider = HostProvider()
    free_bytes = provider.available_bytes()
    assert free_bytes > 0
    with pytest.raises(OutOfMemoryError, match="cannot reserve"):
        provider.allocate(1 << 60)
    with pytest.raises(OutOfMemoryError, match="cannot reserve"):
        provider.allocate(1 << 70)
    assert provider.allocate(1000).nbytes == 1000


def test_segments_that_nobody_has_touched_count_as_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "_read_physical_bytes", lambda: 10_000)
    provider = HostProvider()
    segment = provider.allocate(6000)
    assert provider.available_bytes() == 4000
    provider.free(segment)
    assert provider.available_bytes() == 10_000


def test_a_memory_error_becomes_out_of_memory(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> Any:
        raise MemoryError

    provider = HostProvider()
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", fail)
        with pytest.raises(OutOfMemoryError, match="cannot reserve 1,000 bytes of host memory"):
            provider.allocate(1000)
    assert provider.reserved_bytes == 0
    assert provider.allocate(1000).nbytes == 1000


@pytest.mark.parametrize(
    ("files", "free_bytes", "physical_bytes"),
    [
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:   4 kB\n", "max": "max\n"}, 4096, None),
        ({"meminfo": "MemAvailable:   4 kB\n", "max": "8192\n"}, 4096, 8192),
        ({"meminfo": "MemTotal: 9 kB\n", "max": "8192\n"}, 8192, 8192),
        ({"max": "8192\n"}, 8192, 8192),
        ({}, None, None),
    ],
)
def test_what_the_system_says(
    files: dict[str, str],
    free_bytes: int | None,
    physical_bytes: int | None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "MEMINFO_PATH", tmp_path / "meminfo")
    monkeypatch.setattr(host, "CGROUP_LIMIT_PATH", tmp_path / "max")
    machine_bytes = host.os.sysconf("SC_PAGE_SIZE") * host.os.sysconf("SC_PHYS_PAGES")
    assert host._read_physical_bytes() == (physical_bytes or machine_bytes)
    assert host._read_free_bytes() == (free_bytes or machine_bytes)


@pytest.mark.parametrize("nbytes", [1, 255, 256, 4097, 3 * MIB + 5])
def test_host_segments_are_aligned_and_writable(nbytes: int):
    segment = HostProvider().allocate(nbytes)
    assert segment.address % 256 == 0
    assert segment.storage.ctypes.data == segment.address
    assert segment.storage.nbytes == segment.nbytes == nbytes
    segment.storage[:] = 255
    assert segment.storage.sum(dtype=np.int64) == 255 * nbytes


def test_an_empty_segment_is_a_segment():
    segment = HostProvider(limit_bytes=0).allocate(0)
    assert segment.address % 256 == segment.nbytes == segment.storage.nbytes == 0


def test_a_segment_is_taken_back_once():
    provider = HostProvider()
    segment = provider.allocate(100)
    provider.free(segment)
    with pytest.raises(TracegraphError, match="cannot take back the segment at 0x"):
        provider.free(segment)
    with pytest.raises(TracegraphError, match="comes from another provider"):
        provider.free(HostProvider().allocate(100))


def test_a_dropped_segment_no_longer_counts():
    provider = HostProvider()
    segment = provider.allocate(100)
    assert provider.reserved_bytes == 100
    del segment
    gc.collect()
    assert provider.reserved_bytes == 0


def test_a_negative_limit_is_refused():
    with pytest.raises(ConfigError, match="`limit_bytes` is -1"):
        HostProvider(limit_bytes=-1)


def test_threads_share_a_pool():
    pool, provider = make_pool()
    start = threading.Barrier(4)

    def work(mark: int) -> bool:
        start.wait()
        is_intact = True
        for turn in range(100):
            block = pool.allocate(512 * (1 + turn % 3))
            block.segment.storage[:] = mark
            is_intact = is_intact and bool((block.segment.storage == mark).all())
            pool.free(block)
        return is_intact

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(1, 5)))
    assert pool.allocated_bytes == 0
    assert pool.reserved_bytes == provider.reserved_bytes <= 4 * 3 * 1536


def test_records_print_without_their_storage():
    pool, _ = make_pool()
    block = pool.allocate(10)
    assert repr(block) == (
        f"Block(segment=Segment(address={block.address}, nbytes=512), offset=0, nbytes=512)"
    )
    assert (
        repr(pool) == "PrivatePool((7, 0), provider=host, reserved=512 bytes, allocated=512 bytes)"
    )
