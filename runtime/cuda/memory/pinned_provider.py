"""Page-locked memory of the CUDA driver, and the one allocator of it in a process."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tracegraph.runtime.cuda.events import CudaEvents
from tracegraph.runtime.environment import read_alloc_conf
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.memory.providers.segment import Segment

_allocators: weakref.WeakValueDictionary[int, CachingHostAllocator]
_allocators = weakref.WeakValueDictionary()
_lock = threading.Lock()


class CudaPages:
    """Page-locks memory for all contexts of the process.

    Args:
        driver: the CUDA driver. The thread that allocates or registers needs a current context.
    """

    name = "cuda"

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._context = 0

    def allocate(self, nbytes: int) -> Segment:
        """Returns a fresh page-locked segment.

        Raises:
            OutOfMemoryError: the machine has no more memory that can be locked.
        """
        self._context = self._context or self._driver.get_current()
        return Segment(self._driver.allocate_host(nbytes), nbytes, None)

    def free(self, segment: Segment) -> None:
        """Takes back a segment, in a thread with a context or without."""
        with self._driver.use_context(self._context):
            self._driver.free_host(segment.address)

    def register(self, segment: Segment) -> None:
        """Page-locks ordinary memory, which the segment keeps alive.

        Raises:
            CudaError: the driver refused.
        """
        self._context = self._context or self._driver.get_current()
        self._driver.register_host(segment.address, segment.nbytes)

    def unregister(self, segment: Segment) -> None:
        """Makes the memory ordinary again, in a thread with a context or without."""
        with self._driver.use_context(self._context):
            self._driver.unregister_host(segment.address)


def find_pinned_allocator(driver: Any) -> CachingHostAllocator:
    """Returns the allocator of page-locked memory that all users of a driver share.

    It lives while somebody holds it or an array in its memory.

    Raises:
        ConfigError: ``TRACEGRAPH_ALLOC_CONF`` is wrong.
    """
    with _lock:
        # The allocator holds the driver, so that no other has its identity meanwhile.
        allocator = _allocators.get(id(driver))
        if allocator is None:
            config, events = read_alloc_conf(), CudaEvents(driver)
            allocator = CachingHostAllocator(CudaPages(driver), config=config, events=events)
            _allocators[id(driver)] = allocator
        return allocator
