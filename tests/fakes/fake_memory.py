"""FakeMemory: the memory calls of FakeDriver, with the checks that a real driver would not make.

Memory is ordinary host memory, ranges of addresses included, so that tests which move bytes find
them. A device has only so many bytes; what is reserved but not mapped must not be touched.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from typing import Any

from tests.fakes.fake_state import FakeState, check
from tracegraph.runtime.cuda.driver.calls import CopyRange, FillRange, make_call_error
from tracegraph.runtime.memory.providers.host_virtual import NO_RESERVE

ALIGNMENT = 256
GRANULARITY = 2 << 20


@dataclasses.dataclass
class FakeMapping:
    """Memory at a reserved address."""

    nbytes: int
    handle: int
    is_accessible: bool = False


class FakeMemory(FakeState):
    """Device memory, host memory and ranges of addresses.

    Args:
        memory_bytes: memory of each device.
        options: those of FakeState.

    Attributes:
        kept_bytes: how much each pool of the driver keeps, by handle, as it was set.
    """

    def __init__(self, *, memory_bytes: int = 1 << 35, **options: Any) -> None:
        super().__init__(**options)
        self.memory_bytes = memory_bytes
        self.kept_bytes: dict[int, int] = {}
        self._memory: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        self._pools: dict[int, int] = {}
        self._ranges: dict[int, tuple[int, Any]] = {}
        self._mappings: dict[int, FakeMapping] = {}
        self._registered: dict[int, int] = {}

    def read_memory(self) -> tuple[int, int]:
        self._enter("read_memory", needs_context=True)
        return self.memory_bytes - self._count_used_bytes(), self.memory_bytes

    def allocate_memory(self, nbytes: int) -> int:
        return self._allocate("memory", "allocate_memory", nbytes)

    def free_memory(self, address: int) -> None:
        self._destroy("memory", "free_memory", address)
        self._forget(address)

    def allocate_async(self, nbytes: int, stream: int) -> int:
        self._check_stream(stream)
        address = self._allocate("pool memory", "allocate_async", nbytes, stream)
        self._streams[address] = stream
        return address

    def free_async(self, address: int, stream: int) -> None:
        self._check_stream(stream)
        self._check_live("pool memory", address)
        check(self._streams.pop(address) == stream, "free_async on another stream, without a wait")
        self._destroy("pool memory", "free_async", address)
        self._forget(address)

    def find_memory_pool(self, ordinal: int) -> int:
        self._enter("find_memory_pool", ordinal)
        return self._pools.setdefault(ordinal, next(self._numbers))

    def keep_in_memory_pool(self, pool: int, nbytes: int) -> None:
        self._enter("keep_in_memory_pool", pool, nbytes)
        check(pool in self._pools.values(), f"{pool:#x} is no pool of the driver")
        self.kept_bytes[pool] = nbytes

    def trim_memory_pool(self, pool: int, nbytes: int) -> None:
        self._enter("trim_memory_pool", pool, nbytes)
        check(pool in self._pools.values(), f"{pool:#x} is no pool of the driver")

    def allocate_host(self, nbytes: int) -> int:
        return self._allocate("host memory", "allocate_host", nbytes)

    def free_host(self, address: int) -> None:
        self._destroy("host memory", "free_host", address)
        self._forget(address)

    def register_host(self, address: int, nbytes: int) -> None:
        self._enter("register_host", address, nbytes, needs_context=True)
        check(nbytes > 0, "register_host of 0 bytes")
        check(not _overlap(self._registered, address, nbytes), "memory registered twice")
        self._registered[address] = nbytes

    def unregister_host(self, address: int) -> None:
        check(address in self._registered, f"memory at {address:#x} is not registered")
        del self._registered[address]
        self._enter("unregister_host", address)

    def read_granularity(self, ordinal: int) -> int:
        self._enter("read_granularity", ordinal)
        return GRANULARITY

    def reserve_addresses(self, nbytes: int) -> int:
        check(nbytes > 0 and nbytes % GRANULARITY == 0, f"a range of {nbytes} bytes")
        self._enter("reserve_addresses", nbytes, needs_context=True)
        # Nothing is committed before it is touched.
        room = mmap.mmap(-1, nbytes + GRANULARITY, flags=mmap.MAP_PRIVATE | NO_RESERVE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        address = start + -start % GRANULARITY
        self._ranges[address] = nbytes, room
        self._live[address] = "range"
        return address

    def release_addresses(self, address: int, nbytes: int) -> None:
        self._check_live("range", address)
        check(self._ranges[address][0] == nbytes, "a range is released as a whole")
        check(not self._list_mappings(address, nbytes), "a range is released with memory in it")
        self._destroy("range", "release_addresses", address)
        del self._ranges[address]

    def create_memory(self, ordinal: int, nbytes: int) -> int:
        check(nbytes > 0 and nbytes % GRANULARITY == 0, f"create_memory of {nbytes} bytes")
        self._check_room(nbytes, "create_memory")
        handle = self._create("handle", "create_memory", ordinal, nbytes)
        self._sizes[handle] = nbytes
        return handle

    def release_memory(self, handle: int) -> None:
        self._destroy("handle", "release_memory", handle)
        self._forget_unused(handle)

    def map_memory(self, address: int, nbytes: int, handle: int) -> None:
        self._enter("map_memory", address, nbytes, handle)
        self._check_live("handle", handle)
        check(self._sizes[handle] == nbytes, "memory is mapped as a whole")
        check(address % GRANULARITY == 0, f"misaligned address {address:#x}")
        inside = [
            start
            for start, (size, _) in self._ranges.items()
            if start <= address and address + nbytes <= start + size
        ]
        check(bool(inside), f"map_memory at {address:#x}, which is not reserved")
        check(not self._list_mappings(address, nbytes), f"{address:#x} is mapped twice")
        self._mappings[address] = FakeMapping(nbytes, handle)

    def unmap_memory(self, address: int, nbytes: int) -> None:
        mapped = self._check_mappings(address, nbytes, "unmap_memory")
        self._enter("unmap_memory", address, nbytes)
        for start in mapped:
            self._forget_unused(self._mappings.pop(start).handle)

    def allow_access(self, address: int, nbytes: int, ordinal: int) -> None:
        self._enter("allow_access", address, nbytes, ordinal)
        for start in self._check_mappings(address, nbytes, "allow_access"):
            self._mappings[start].is_accessible = True

    def _allocate(self, kind: str, name: str, nbytes: int, *arguments: int) -> int:
        check(nbytes > 0, f"{name} of {nbytes} bytes")
        self._enter(name, nbytes, *arguments, needs_context=True)
        if kind != "host memory":
            self._check_room(nbytes, name)
        memory = ctypes.create_string_buffer(nbytes + ALIGNMENT)
        start = ctypes.addressof(memory)
        address = start + -start % ALIGNMENT
        self._memory[address] = memory
        self._live[address] = kind
        if kind != "host memory":
            self._sizes[address] = nbytes
        return address

    def _forget(self, address: int) -> None:
        self._memory.pop(address)
        self._sizes.pop(address, None)

    def _forget_unused(self, handle: int) -> None:
        """Memory without an address stays while its handle is held or it is mapped."""
        is_mapped = any(mapping.handle == handle for mapping in self._mappings.values())
        if handle not in self._live and not is_mapped:
            del self._sizes[handle]

    def _count_used_bytes(self) -> int:
        return sum(self._sizes.values())

    def _check_room(self, nbytes: int, name: str) -> None:
        if self._count_used_bytes() + nbytes > self.memory_bytes:
            raise make_call_error("CUDA_ERROR_OUT_OF_MEMORY", name, f"{name}({nbytes})", "full")

    def _list_mappings(self, address: int, nbytes: int) -> list[int]:
        sizes = {start: mapping.nbytes for start, mapping in self._mappings.items()}
        return _overlap(sizes, address, nbytes)

    def _check_mappings(self, address: int, nbytes: int, name: str) -> list[int]:
        """Returns the mappings that make up a range exactly."""
        mapped = self._list_mappings(address, nbytes)
        total_bytes = sum(self._mappings[start].nbytes for start in mapped)
        check(
            total_bytes == nbytes and min(mapped, default=0) == address,
            f"{name} of {nbytes} bytes at {address:#x}, which are not just what is mapped there",
        )
        return mapped

    def _run(self, action: Any) -> None:
        if isinstance(action, CopyRange):
            self._check_access(action.source_address, action.nbytes)
            self._check_access(action.target_address, action.nbytes)
        if isinstance(action, FillRange):
            self._check_access(action.target_address, action.element_bytes * action.count)
        super()._run(action)

    def _check_access(self, address: int, nbytes: int) -> None:
        reserved = {start: size for start, (size, _) in self._ranges.items()}
        if not _overlap(reserved, address, nbytes):
            return
        covered = 0
        for start in self._list_mappings(address, nbytes):
            mapping = self._mappings[start]
            check(mapping.is_accessible, f"work on memory at {start:#x} without access")
            end = min(start + mapping.nbytes, address + nbytes)
            covered += end - max(start, address)
        check(covered == nbytes, f"work on {nbytes} bytes at {address:#x}, not all mapped")


def _overlap(sizes: dict[int, int], address: int, nbytes: int) -> list[int]:
    """Returns the starts of the ranges that share a byte with another one."""
    return [
        start
        for start, size in sizes.items()
        if start < address + nbytes and address < start + size
    ]
