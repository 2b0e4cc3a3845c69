"""FreeList: free blocks in the order (stream, bytes, address), for best fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Placed(Protocol):
    """What has a place in a free list."""

    stream: int
    nbytes: int
    address: int


BlockType = TypeVar("BlockType", bound=Placed)


class FreeList(Generic[BlockType]):
    """An ordered set of blocks. Each stream has its own: a block serves its stream only.

    A block's stream, bytes and address must not change while it is in the list.

    Example:
        >>> from types import SimpleNamespace as Piece
        >>> free = FreeList()
        >>> free.add(Piece(stream=0, nbytes=1024, address=8192))
        >>> free.add(Piece(stream=0, nbytes=1024, address=4096))
        >>> free.find(600, stream=0).address, free.find(600, stream=1)
        (4096, None)
    """

    __slots__ = ("_by_stream",)

    def __init__(self) -> None:
        # The address decides between blocks of a size, so two blocks are never compared.
        self._by_stream: dict[int, list[tuple[int, int, BlockType]]] = {}

    def __iter__(self) -> Iterator[BlockType]:
        for stream in sorted(self._by_stream):
            for _, _, block in self._by_stream[stream]:
                yield block

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._by_stream.values())

    def __contains__(self, block: BlockType) -> bool:
        entries = self._by_stream.get(block.stream, [])
        index = bisect_left(entries, (block.nbytes, block.address))
        return index < len(entries) and entries[index][2] is block

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks together."""
        return sum(block.nbytes for block in self)

    def add(self, block: BlockType) -> None:
        """Puts a block in its place."""
        entry = (block.nbytes, block.address, block)
        entries = self._by_stream.get(block.stream)
        if entries is None:
            self._by_stream[block.stream] = [entry]
        else:
            insort(entries, entry)

    def remove(self, block: BlockType) -> None:
        """Takes a block out.

        Raises:
            KeyError: it is not in the list.
        """
        entries = self._by_stream.get(block.stream, [])
        index = bisect_left(entries, (block.nbytes, block.address))
        if index == len(entries) or entries[index][2] is not block:
            raise KeyError(f"the block at {block.address:#x} is not in the free list")
        del entries[index]

    def clear(self) -> None:
        """Takes all blocks out."""
        self._by_stream.clear()

    def find(self, nbytes: int, stream: int) -> BlockType | None:
        """Returns the smallest block of ``stream`` that has ``nbytes`` bytes, or None.

        Of several of that size it is the one with the lowest address.
        """
        entries = self._by_stream.get(stream)
        if not entries:
            return None
        index = bisect_left(entries, (nbytes,))
        return entries[index][2] if index < len(entries) else None

    def take(self, nbytes: int, stream: int, below_bytes: int) -> BlockType | None:
        """Takes out the block that `find` would return, if it has less than ``below_bytes``."""
        entries = self._by_stream.get(stream)
        if not entries:
            return None
        index = bisect_left(entries, (nbytes,))
        if index == len(entries) or entries[index][0] >= below_bytes:
            return None
        return entries.pop(index)[2]

    def list_from(self, nbytes: int, stream: int) -> list[BlockType]:
        """Returns all blocks of ``stream`` with at least ``nbytes`` bytes, smallest first."""
        entries = self._by_stream.get(stream, [])
        return [block for _, _, block in entries[bisect_left(entries, (nbytes,)) :]]
