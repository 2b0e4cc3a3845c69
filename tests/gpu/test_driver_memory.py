"""Memory straight from the CUDA driver: every provider, with bytes written and read on the GPU."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from tests.fakes.pluggable_library import compile_library
from tracegraph.runtime.cuda.driver.driver import load_driver
from tracegraph.runtime.cuda.memory.driver_providers import CudaAsyncProvider, CudaProvider
from tracegraph.runtime.cuda.memory.virtual_provider import CudaVirtualProvider
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.direct_allocator import DirectAllocator
from tracegraph.runtime.memory.config import parse_alloc_conf
from tracegraph.runtime.memory.providers.pluggable import PluggableAllocator

# The bytes that are free are those of the whole GPU, and some tests take all of them.
pytestmark = pytest.mark.usefixtures("gpu", "alone_on_gpu")

MIB = 1 << 20
KINDS = ("cuda", "cuda_async", "cuda_vmm")


class Session:
    """The driver, JAX's context of the first GPU, and a stream of our own."""

    def __init__(self) -> None:
        # JAX makes the context first.
        self.ordinal = jax.devices()[0].local_hardware_id
        self.driver = load_driver()
        self.context = self.driver.retain_primary_context(self.ordinal)
        with self.driver.use_context(self.context):
            self.stream = self.driver.create_stream()

    def make(self, kind: str) -> Any:
        driver, context, ordinal = self.driver, self.context, self.ordinal
        makers: dict[str, Callable[[], Any]] = {
            "cuda": lambda: CudaProvider(driver, context),
            "cuda_async": lambda: CudaAsyncProvider(
                driver, context, ordinal, lambda number: self.stream
            ),
            "cuda_vmm": lambda: CudaVirtualProvider(driver, context, ordinal),
        }
        return makers[kind]()

    def check_bytes(self, address: int, nbytes: int, value: int) -> None:
        """Fills memory on the GPU and reads it back."""
        with self.driver.use_context(self.context):
            host = self.driver.allocate_host(nbytes)
            try:
                self.driver.fill_async(address, value, 1, nbytes, self.stream)
                self.driver.copy_async(host, address, nbytes, self.stream)
                self.driver.synchronize_stream(self.stream)
                assert ctypes.string_at(host, nbytes) == bytes([value]) * nbytes
            finally:
                self.driver.free_host(host)

    def read_free_bytes(self) -> int:
        with self.driver.use_context(self.context):
            self.driver.synchronize_context()
            return self.driver.read_memory()[0]


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    yield session
    with session.driver.use_context(session.context):
        session.driver.destroy_stream(session.stream)
    session.driver.release_primary_context(session.ordinal)


@pytest.mark.parametrize("kind", KINDS)
def test_segments_hold_bytes_and_go_back(session: Session, kind: str) -> None:
    provider = session.make(kind)
    # The first use of a kernel takes memory for good.
    warm_up = provider.allocate(64 * MIB)
    session.check_bytes(warm_up.address, 64 * MIB, 3)
    provider.free(warm_up)
    del warm_up
    before = session.read_free_bytes()
    segment = provider.allocate(64 * MIB)
    session.check_bytes(segment.address, 64 * MIB, 7)
    provider.free(segment)
    if kind == "cuda_async":
        session.read_free_bytes()
        provider.trim()
    assert session.read_free_bytes() >= before
    with pytest.raises(OutOfMemoryError, match=f"{kind} provider"):
        provider.allocate(provider.total_bytes() + MIB)


def test_pages_are_mapped_and_unmapped(session: Session) -> None:
    provider = session.make("cuda_vmm")
    page = max(provider.granularity_bytes(), 2 * MIB)
    range_bytes = provider.total_bytes() // page * page
    address = provider.reserve(range_bytes)
    before = session.read_free_bytes()
    for index in range(4):
        provider.map(address + index * page, page)
    # One access over the borders of pages.
    session.check_bytes(address, 4 * page, 9)
    provider.unmap(address + page, 2 * page)
    provider.map(address + page, 2 * page)
    session.check_bytes(address, 4 * page, 5)
    provider.unmap(address, 4 * page)
    assert session.read_free_bytes() >= before
    with pytest.raises(OutOfMemoryError, match="cuda_vmm provider"):
        provider.map(address, range_bytes)
    provider.release(address, range_bytes)


def test_expandable_segments(session: Session) -> None:
    config = parse_alloc_conf("expandable_segments:True")
    before = session.read_free_bytes()
    allocator = CachingAllocator(session.make("cuda_vmm"), config=config)
    blocks = [allocator.allocate(nbytes) for nbytes in (512, 5 * MIB, 30 * MIB, 70 * MIB)]
    for number, block in enumerate(blocks):
        session.check_bytes(block.address, block.nbytes, number)
    for block in blocks:
        allocator.free(block)
    whole = allocator.allocate(105 * MIB)
    assert whole.address == blocks[1].address
    session.check_bytes(whole.address, whole.nbytes, 8)
    allocator.free(whole)
    allocator.empty_cache()
    assert session.read_free_bytes() >= before


def test_a_library_that_calls_cuda(session: Session, tmp_path: pathlib.Path) -> None:
    # The library gives host memory, which the GPU reaches once it is page-locked.
    library = PluggableAllocator(compile_library(tmp_path), "test_allocate", "test_free")
    with session.driver.use_context(session.context):
        provider = library.make_provider(
            session.ordinal, lambda number: session.stream, session.driver.read_memory
        )
        allocator = DirectAllocator(provider)
        block = allocator.allocate(MIB)
        session.driver.register_host(block.address, MIB)
        session.check_bytes(block.address, MIB, 4)
        session.driver.unregister_host(block.address)
        allocator.free(block)
