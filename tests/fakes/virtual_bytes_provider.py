"""A provider of segments and of ranges of addresses, with real bytes behind what is mapped."""

from __future__ import annotations

from tests.fakes.bytes_provider import TOKEN_BYTES, BytesProvider, Call
from tracegraph.runtime.errors import OutOfMemoryError

GRANULARITY_BYTES = 2 << 20
FIRST_RANGE = 1 << 40
RANGE_STEP = 1 << 36


class VirtualBytesProvider(BytesProvider):
    """Adds the calls of a VirtualProvider; ranges lie far above all segments.

    Only what `write` touches is kept, so that a range costs nothing.

    Attributes:
        ranges: size of each range by its address.
        mapped: size of each piece of memory by its address.
    """

    name = "virtual bytes"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.ranges: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self._words: dict[int, int] = {}

    def available_bytes(self) -> int:
        return super().available_bytes() - sum(self.mapped.values())

    def granularity_bytes(self) -> int:
        return GRANULARITY_BYTES

    def reserve(self, nbytes: int) -> int:
        address = FIRST_RANGE
        while address in self.ranges:
            address += RANGE_STEP
        self.ranges[address] = nbytes
        self.calls.append(Call("reserve", nbytes, address))
        return address

    def map(self, address: int, nbytes: int) -> None:
        self.call_count += 1
        if self.call_count in self.failing_calls or nbytes > self.available_bytes():
            self.calls.append(Call("map", nbytes, None))
            raise OutOfMemoryError(
                f"no {nbytes:,} bytes left",
                where="virtual bytes provider",
                why="the test says so",
                fix="nothing",
                anchor="out-of-memory",
            )
        start = max(each for each in self.ranges if each <= address)
        assert address + nbytes <= start + self.ranges[start], "map outside of the range"
        assert not self._list_mapped(address, nbytes), "mapped twice"
        assert address % GRANULARITY_BYTES == nbytes % GRANULARITY_BYTES == 0
        self.mapped[address] = nbytes
        self.calls.append(Call("map", nbytes, address))

    def unmap(self, address: int, nbytes: int) -> None:
        starts = self._list_mapped(address, nbytes)
        assert starts, "nothing is mapped there"
        assert min(starts) == address, "unmap of a part"
        assert sum(self.mapped.pop(start) for start in starts) == nbytes, "unmap of a part"
        # Fresh memory holds nothing of what was there.
        lost = [each for each in self._words if address <= each < address + nbytes]
        for each in lost:
            del self._words[each]
        self.calls.append(Call("unmap", nbytes, address))

    def release(self, address: int, nbytes: int) -> None:
        assert not self._list_mapped(address, nbytes), "released with memory in it"
        assert self.ranges.pop(address) == nbytes, "a range is released as a whole"
        self.calls.append(Call("release", nbytes, address))

    def write(self, address: int, nbytes: int, number: int) -> None:
        if address < FIRST_RANGE:
            super().write(address, nbytes, number)
            return
        for each in self._choose_words(address, nbytes):
            self._words[each] = number

    def read(self, address: int, nbytes: int) -> set[int]:
        if address < FIRST_RANGE:
            return super().read(address, nbytes)
        return {self._words.get(each, 0) for each in self._choose_words(address, nbytes)}

    def _choose_words(self, address: int, nbytes: int) -> tuple[int, int, int]:
        mapped = self._list_mapped(address, nbytes)
        ends = [start + self.mapped[start] for start in mapped]
        covered = sum(
            min(end, address + nbytes) - max(start, address)
            for start, end in zip(mapped, ends, strict=True)
        )
        assert covered == nbytes, f"{nbytes} bytes at {address:#x} are not all mapped"
        middle = address + nbytes // 2 // TOKEN_BYTES * TOKEN_BYTES
        return address, middle, address + nbytes - TOKEN_BYTES

    def _list_mapped(self, address: int, nbytes: int) -> list[int]:
        return [
            start
            for start, size in self.mapped.items()
            if start < address + nbytes and address < start + size
        ]
