"""The host provider: what the machine has, and segments of it."""

from __future__ import annotations

import gc
import pathlib
from typing import Any

import numpy as np
import pytest

from tracegraph.runtime.errors import ConfigError, InternalError, OutOfMemoryError
from tracegraph.runtime.memory.providers import host
from tracegraph.runtime.memory.providers.host import HostProvider

MIB = 1 << 20


def test_more_than_the_machine_has_is_refused_before_it_is_allocated():
    provider = HostProvider()
    free_bytes = provider.available_bytes()
    assert free_bytes > 0
    with pytest.raises(OutOfMemoryError, match="cannot reserve"):
        provider.allocate(1 << 60)
    with pytest.raises(OutOfMemoryError, match="cannot reserve"):
        provider.allocate(1 << 70)
    assert provider.allocate(1000).nbytes == 1000


def test_segments_that_were_never_touched_count_as_taken(monkeypatch: pytest.MonkeyPatch):
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
    with pytest.raises(InternalError, match="cannot free the segment at 0x"):
        provider.free(segment)
    with pytest.raises(InternalError, match="comes from another provider"):
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
