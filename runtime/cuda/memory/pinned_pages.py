"""Page-locked memory of the CUDA driver, and the one allocator of it in a process."""

from __future__ import annotations

import threading
import weakref

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.memory.events import CudaEvents
from tracegraph.runtime.environment import read_alloc_conf
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.memory.providers.segment import Segment

_allocators: weakref.WeakValueDictionary[int, CachingHostAllocator]
_allocators = weakref.WeakValueDictionary()
_lock = threading.Lock()


class CudaPages:
    """Page-locks memory for all contexts of the process, in any thread.

    Args:
        driver: the CUDA driver.
        context: of a GPU, through which it is done.
    """

    name = "cuda"

    def __init__(self, driver: CudaDriver, context: int) -> None:
        self._driver, self._context = driver, context

    def allocate(self, nbytes: int) -> Segment:
        """Returns a fresh page-locked segment.

        Raises:
            OutOfMemoryError: the machine has no more memory that can be locked.
        """
        with self._driver.use_context(self._context):
            return Segment(self._driver.allocate_host(nbytes), nbytes, None)

    def free(self, segment: Segment) -> None:
        """Frees a segment."""
        with self._driver.use_context(self._context):
            self._driver.free_host(segment.address)

    def register(self, segment: Segment) -> None:
        """Page-locks ordinary memory, which the segment keeps alive.

        Raises:
            CudaError: the driver refused.
        """
        with self._driver.use_context(self._context):
            self._driver.register_host(segment.address, segment.nbytes)

    def unregister(self, segment: Segment) -> None:
        """Makes the memory ordinary again."""
        with self._driver.use_context(self._context):
            self._driver.unregister_host(segment.address)


def find_pinned_allocator(driver: CudaDriver, context: int) -> CachingHostAllocator:
    """Returns the allocator of page-locked memory that all GPUs of a driver share.

    It lives while a GPU or an array in its memory does.

    Args:
        driver: the CUDA driver.
        context: of a GPU; that of the first one serves all.

    Raises:
        ConfigError: ``TRACEGRAPH_ALLOC_CONF`` is wrong.
    """
    with _lock:
        # The allocator holds the driver, so that no other has its identity meanwhile.
        allocator = _allocators.get(id(driver))
        if allocator is None:
            config, events = read_alloc_conf(), CudaEvents(driver)
            allocator = CachingHostAllocator(
                CudaPages(driver, context), config=config, events=events
            )
            _allocators[id(driver)] = allocator
        return allocator
