"""Pluggable allocators: a library that the test compiles serves the segments."""

from __future__ import annotations

import ctypes
import gc
import pathlib
import threading

import pytest

from tests.fakes.pluggable_library import MEMORY, PluggableLibrary
from tests.oracles.error_lines import match
from tracegraph.runtime.errors import ConfigError, InternalError, OutOfMemoryError
from tracegraph.runtime.memory.providers.pluggable import PluggableAllocator, PluggableProvider

STREAM = 0x7FFF_0000_5555


@pytest.fixture
def library(tmp_path: pathlib.Path) -> PluggableLibrary:
    return PluggableLibrary(tmp_path)


def make_provider(library: PluggableLibrary, device: int = 3) -> PluggableProvider:
    return library.open().make_provider(device, {0: 0, 1: STREAM}.__getitem__, lambda: MEMORY)


def test_the_library_is_called_with_size_device_and_stream(library: PluggableLibrary) -> None:
    provider = make_provider(library)
    segment = provider.allocate(1000, stream=1)
    assert (library.read("live_count"), library.read("live_bytes")) == (1, 1000)
    assert library.read_last() == (3, STREAM)
    assert (segment.nbytes, provider.reserved_bytes) == (1000, 1000)
    ctypes.memset(segment.address, 7, 1000)
    provider.free(segment)
    assert (library.read("live_count"), library.read("live_bytes")) == (0, 0)
    assert provider.reserved_bytes == 0
    provider.free(provider.allocate(1))
    assert library.read_last() == (3, 0)
    assert library.read("wrong_frees") == 0


def test_what_the_device_has_is_told(library: PluggableLibrary) -> None:
    provider = make_provider(library)
    assert (provider.available_bytes(), provider.total_bytes()) == MEMORY
    assert provider.name == "pluggable"


def test_null_is_out_of_memory(library: PluggableLibrary) -> None:
    library.limit(4096)
    provider = make_provider(library)
    kept = provider.allocate(4000)
    with pytest.raises(OutOfMemoryError) as raised:
        provider.allocate(1000, stream=1)
    match(
        raised.value,
        "the pluggable allocator returned NULL for 1,000 bytes",
        "test_allocate(1000, 3, 0x7fff00005555)",
        "NULL says that there is no memory",
        "free arrays",
    )
    provider.free(kept)
    provider.free(provider.allocate(1000))
    assert library.read("live_count") == 0


def test_a_segment_is_taken_back_once(library: PluggableLibrary) -> None:
    provider = make_provider(library)
    segment = provider.allocate(64)
    provider.free(segment)
    with pytest.raises(InternalError, match="it is not in use"):
        provider.free(segment)
    with pytest.raises(InternalError, match="it is not in use"):
        make_provider(library).free(provider.allocate(64))
    gc.collect()
    assert (library.read("live_count"), library.read("live_bytes")) == (0, 0)


def test_memory_outlives_allocator_and_provider(library: PluggableLibrary) -> None:
    allocator = library.open()
    provider = allocator.make_provider(0, lambda stream: stream, lambda: MEMORY)
    kept = [provider.allocate(512), provider.allocate(512)]
    ctypes.memset(kept[1].address, 5, 512)
    del allocator, provider
    library.path.unlink()
    gc.collect()
    assert library.read("live_count") == 2
    assert ctypes.string_at(kept[1].address, 512) == bytes([5]) * 512
    del kept[0]
    gc.collect()
    assert library.read("live_count") == 1
    kept.clear()
    gc.collect()
    assert (library.read("live_count"), library.read("wrong_frees")) == (0, 0)


def test_threads_share_a_provider(library: PluggableLibrary) -> None:
    provider = make_provider(library)
    lock = threading.Lock()

    def work() -> None:
        for _ in range(50):
            # The counters of the library are not atomic.
            with lock:
                segment = provider.allocate(64)
            with lock:
                provider.free(segment)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (library.read("live_count"), provider.reserved_bytes) == (0, 0)


def test_a_library_that_is_not_there_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "missing.so"
    with pytest.raises(ConfigError) as raised:
        PluggableAllocator(path, "test_allocate", "test_free")
    match(
        raised.value,
        f"cannot load the library '{path}'",
        "argument `path_to_so` of PluggableAllocator: ",
        "a pluggable allocator is a shared library",
        "compile it with",
    )
    assert raised.value.anchor == "pluggable-allocator"


def test_a_file_that_is_no_library_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("no library")
    with pytest.raises(ConfigError, match="cannot load the library"):
        PluggableAllocator(path, "test_allocate", "test_free")


@pytest.mark.parametrize(
    ("names", "argument", "missing"),
    [
        (("allocate", "test_free"), "alloc_fn_name", "allocate"),
        (("test_allocate", "release"), "free_fn_name", "release"),
    ],
)
def test_a_function_that_is_not_there_is_refused(
    library: PluggableLibrary, names: tuple[str, str], argument: str, missing: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        PluggableAllocator(library.path, *names)
    match(
        raised.value,
        f"the library '{library.path}' has no function '{missing}'",
        f"argument `{argument}` of PluggableAllocator",
        "the function is looked up by its name",
        "declare it",
    )


def test_it_is_printed_with_its_path(library: PluggableLibrary) -> None:
    assert repr(library.open()) == f"PluggableAllocator('{library.path}')"
