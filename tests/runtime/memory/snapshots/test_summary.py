"""The table of `memory_summary`, compared with files."""

import pytest

from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.snapshots.summary import (
    WIDTH,
    format_count,
    format_size,
    format_summary,
)


def make_stats():
    allocator = CachingAllocator(HostProvider())
    blocks = [allocator.allocate(nbytes) for nbytes in (1000, 700_000, 3 << 20, 12 << 20)]
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    return allocator.statistics.to_dict() | {"num_ooms": 3, "num_alloc_retries": 4}


@pytest.mark.parametrize("is_abbreviated", [False, True])
def test_the_table(golden, is_abbreviated):
    name = "memory_summary_abbreviated" if is_abbreviated else "memory_summary"
    golden(name, format_summary(make_stats(), device=1, is_abbreviated=is_abbreviated))


def test_every_line_is_equally_wide():
    big = dict.fromkeys(make_stats(), 10**12)
    for stats in ({}, make_stats(), big):
        lines = format_summary(stats).splitlines()
        assert {len(line) for line in lines} == {WIDTH + 2}


@pytest.mark.parametrize(
    ("nbytes", "scale", "text"),
    [
        (0, 0, "     0 B  "),
        (786_431, 786_431, "786431 B  "),
        (786_432, 786_432, "   768 KiB"),
        (1023, 1 << 20, "     0 KiB"),
        (3 << 30, 3 << 30, "  3072 MiB"),
        (1 << 60, 1 << 60, "  1024 PiB"),
    ],
)
def test_sizes(nbytes, scale, text):
    assert format_size(nbytes, scale) == text


@pytest.mark.parametrize(
    ("count", "scale", "text"),
    [
        (749_999, 749_999, " 749999   "),
        (750_000, 750_000, "    750 K "),
        (10**10, 10**10, "  10000 M "),
    ],
)
def test_counts(count, scale, text):
    assert format_count(count, scale) == text
