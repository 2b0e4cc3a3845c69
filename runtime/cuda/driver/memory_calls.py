"""Memory calls of the CUDA driver: device memory, its own pool, host memory, virtual addresses.

Those that a stream capture of the calling thread would forbid are made under a guard, because a
library may be captured by the thread that needs memory or drops it.
"""

from __future__ import annotations

from typing import Any

from tracegraph.runtime.cuda.driver.calls import DriverCalls

_PORTABLE = 0x01  # Both CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTREGISTER_PORTABLE.


class MemoryCalls(DriverCalls):
    """Calls that allocate, map or free memory. The thread needs a current context."""

    def read_memory(self) -> tuple[int, int]:
        """Returns the free and the total bytes of the device, as the driver counts them."""
        free_bytes, total_bytes = self._call("cuMemGetInfo")
        return int(free_bytes), int(total_bytes)

    def allocate_memory(self, nbytes: int) -> int:
        """Returns the address of new device memory.

        Raises:
            OutOfMemoryError: the device has too few free bytes.
        """
        with self._allow_during_capture():
            return int(self._call("cuMemAlloc", nbytes))

    def free_memory(self, address: int) -> None:
        """Frees device memory; waits for the work of the whole device."""
        with self._allow_during_capture():
            self._call("cuMemFree", address)

    def allocate_async(self, nbytes: int, stream: int) -> int:
        """Returns the address of memory from the driver's pool, to be used after a stream's work.

        Raises:
            OutOfMemoryError: the device has too few free bytes.
        """
        return int(self._call("cuMemAllocAsync", nbytes, stream))

    def free_async(self, address: int, stream: int) -> None:
        """Returns memory to the driver's pool once a stream's work so far is done."""
        self._call("cuMemFreeAsync", address, stream)

    def find_memory_pool(self, ordinal: int) -> int:
        """Returns the handle of the driver's pool of a device."""
        return int(self._call("cuDeviceGetDefaultMemPool", self._get_device(ordinal)))

    def keep_in_memory_pool(self, pool: int, nbytes: int) -> None:
        """Sets how many free bytes a pool of the driver keeps when the host waits for work."""
        attribute = self._api.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self._call("cuMemPoolSetAttribute", pool, attribute, self._api.cuuint64_t(nbytes))

    def trim_memory_pool(self, pool: int, nbytes: int) -> None:
        """Returns the free memory of a pool of the driver to the device, except ``nbytes``."""
        self._call("cuMemPoolTrimTo", pool, nbytes)

    def allocate_host(self, nbytes: int) -> int:
        """Returns the address of new page-locked host memory, usable from every context."""
        with self._allow_during_capture():
            return int(self._call("cuMemHostAlloc", nbytes, _PORTABLE))

    def free_host(self, address: int) -> None:
        """Frees page-locked host memory."""
        with self._allow_during_capture():
            self._call("cuMemFreeHost", address)

    def register_host(self, address: int, nbytes: int) -> None:
        """Page-locks ordinary host memory, for every context."""
        with self._allow_during_capture():
            self._call("cuMemHostRegister", address, nbytes, _PORTABLE)

    def unregister_host(self, address: int) -> None:
        """Makes host memory ordinary again."""
        with self._allow_during_capture():
            self._call("cuMemHostUnregister", address)

    def read_granularity(self, ordinal: int) -> int:
        """Returns the bytes that mapped memory of a device is a multiple of."""
        option = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        properties = self._make_properties(ordinal)
        return int(self._call("cuMemGetAllocationGranularity", properties, option))

    def reserve_addresses(self, nbytes: int) -> int:
        """Returns the start of a range of addresses that nothing else gets, without memory."""
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def release_addresses(self, address: int, nbytes: int) -> None:
        """Frees a whole range of addresses; nothing is mapped there any more."""
        self._call("cuMemAddressFree", address, nbytes)

    def create_memory(self, ordinal: int, nbytes: int) -> int:
        """Returns the handle of new memory of a device, without an address.

        Raises:
            OutOfMemoryError: the device has too few free bytes.
        """
        shown = (nbytes, f"device {ordinal}")
        properties = self._make_properties(ordinal)
        return int(self._call("cuMemCreate", nbytes, properties, 0, shown=shown))

    def release_memory(self, handle: int) -> None:
        """Releases memory; the device frees it once it is mapped nowhere."""
        self._call("cuMemRelease", handle)

    def map_memory(self, address: int, nbytes: int, handle: int) -> None:
        """Maps memory at a reserved address; not to be touched before `allow_access`."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap_memory(self, address: int, nbytes: int) -> None:
        """Unmaps memory, at once: no work that uses it may be pending."""
        self._call("cuMemUnmap", address, nbytes)

    def allow_access(self, address: int, nbytes: int, ordinal: int) -> None:
        """Lets a device read and write mapped memory."""
        access = self._api.CUmemAccessDesc()
        access.location = self._make_location(ordinal)
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        shown = (address, nbytes, f"device {ordinal}")
        self._call("cuMemSetAccess", address, nbytes, [access], 1, shown=shown)

    def _make_properties(self, ordinal: int) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._make_location(ordinal)
        return properties

    def _make_location(self, ordinal: int) -> Any:
        location = self._api.CUmemLocation()
        location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = ordinal
        return location
