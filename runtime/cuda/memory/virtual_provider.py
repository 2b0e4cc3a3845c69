"""The cuda_vmm provider: addresses and memory apart from each other, for expandable segments."""

from __future__ import annotations

import functools

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.memory.driver_providers import CudaProvider
from tracegraph.runtime.errors import OutOfMemoryError


class CudaVirtualProvider(CudaProvider):
    """A VirtualProvider over the driver's virtual memory calls. Safe from several threads.

    Args:
        driver: the CUDA driver.
        context: of the GPU.
        ordinal: of the GPU, as the driver numbers them.
    """

    name = "cuda_vmm"

    def __init__(self, driver: CudaDriver, context: int, ordinal: int) -> None:
        super().__init__(driver, context)
        self._ordinal = ordinal

    @functools.cached_property
    def _granularity_bytes(self) -> int:
        return self._driver.read_granularity(self._ordinal)

    def granularity_bytes(self) -> int:
        """Returns the bytes that addresses and sizes below are multiples of."""
        return self._granularity_bytes

    def reserve(self, nbytes: int) -> int:
        """Returns the start of a range of addresses that nothing else gets.

        Raises:
            OutOfMemoryError: there are not that many addresses left.
        """
        with self._driver.use_context(self._context):
            return self._driver.reserve_addresses(nbytes)

    def map(self, address: int, nbytes: int) -> None:
        """Maps fresh memory at reserved addresses, for this GPU to read and write.

        Raises:
            OutOfMemoryError: the GPU has too little memory.
        """
        with self._driver.use_context(self._context):
            try:
                handle = self._driver.create_memory(self._ordinal, nbytes)
            except OutOfMemoryError as error:
                raise self._make_memory_error(nbytes) from error
            try:
                self._driver.map_memory(address, nbytes, handle)
            finally:
                # From here on the mapping alone keeps the memory.
                self._driver.release_memory(handle)
            try:
                self._driver.allow_access(address, nbytes, self._ordinal)
            except BaseException:
                self._driver.unmap_memory(address, nbytes)
                raise

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps the memory of one `map`, or of several in a row.

        Unlike cuMemFree the driver does not wait here by itself.
        """
        with self._driver.use_context(self._context):
            self._driver.synchronize_context()
            self._driver.unmap_memory(address, nbytes)

    def release(self, address: int, nbytes: int) -> None:
        """Frees a range that `reserve` returned; nothing is mapped there any more."""
        with self._driver.use_context(self._context):
            self._driver.release_addresses(address, nbytes)
