"""CudaPages: memory is page-locked in any thread, with a context of its own or without."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.fakes.memory_driver import MemoryDriver
from tracegraph.runtime.cuda.memory.pinned_pages import CudaPages, find_pinned_allocator
from tracegraph.runtime.memory.pinned.host_pages import reserve_pages


def lock_pages(pages: CudaPages) -> None:
    pages.free(pages.allocate(4096))


def register_pages(pages: CudaPages) -> None:
    segment = reserve_pages(4096)
    pages.register(segment)
    pages.unregister(segment)


@pytest.mark.parametrize("use", [lock_pages, register_pages])
def test_a_thread_without_a_context(use: Callable[[CudaPages], None]) -> None:
    driver = MemoryDriver()
    pages = CudaPages(driver, driver.retain_primary_context(0))
    contexts: list[int] = []

    def work() -> None:
        use(pages)
        contexts.append(driver.get_current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert contexts == [0]
    assert set(driver.live_handles().values()) == {"context"}


def test_all_gpus_share_one_allocator() -> None:
    driver = MemoryDriver()
    contexts = driver.retain_primary_context(0), driver.retain_primary_context(1)
    first, second = (find_pinned_allocator(driver, context) for context in contexts)
    assert first is second
