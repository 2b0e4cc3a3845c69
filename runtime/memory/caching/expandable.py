"""ExpandableSegment: a range of addresses to which memory is mapped page by page.

It grows at its end, so it is never too small for a request that the device could serve, and what
is freed in it merges: no memory is left in segments of the wrong size.
"""

from __future__ import annotations

from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.memory.providers.provider import VirtualProvider
from tracegraph.runtime.memory.providers.segment import OwnedMemory, Segment


class ExpandableSegment:
    """One range of addresses. Not locked: every method is called under the allocator's lock.

    Args:
        provider: of addresses and of memory.
        nbytes: size of the range, a multiple of ``page_bytes``.
        page_bytes: what is mapped and unmapped at once, a multiple of the provider's granularity.

    Attributes:
        segment: the range, whose storage frees everything when it is dropped.
        page_bytes: as given.

    Raises:
        OutOfMemoryError: there are not that many addresses left.

    Example:
        >>> from tracegraph.runtime.memory.providers.host_virtual import HostVirtualProvider
        >>> provider = HostVirtualProvider()
        >>> segment = ExpandableSegment(provider, 8 << 20, 2 << 20)
        >>> segment.map(segment.segment.address, 3 << 20), provider.reserved_bytes
        (4194304, 4194304)
        >>> segment.close()
        >>> provider.reserved_bytes
        0
    """

    def __init__(self, provider: VirtualProvider, nbytes: int, page_bytes: int) -> None:
        self._provider = provider
        self.page_bytes = page_bytes
        address = provider.reserve(nbytes)
        self._pages: set[int] = set()
        storage = OwnedMemory(_free, provider, address, nbytes, self._pages, page_bytes)
        self.segment = Segment(address, nbytes, storage)

    def map(self, address: int, nbytes: int) -> int:
        """Maps as many pages as a piece of the range needs.

        Args:
            address: of the piece, where a page begins; nothing is mapped there.
            nbytes: its size.

        Returns:
            The bytes of these pages; 0, with nothing mapped, if the provider has too little memory.
        """
        end = address
        try:
            for page in range(address, address + nbytes, self.page_bytes):
                self._provider.map(page, self.page_bytes)
                # Without another call in between: Note [Interrupts].
                self._pages.add(page)
                end = page + self.page_bytes
        except BaseException as error:
            if end > address:
                self.unmap(address, end - address)
            if isinstance(error, OutOfMemoryError):
                return 0
            raise
        return end - address

    @property
    def mapped_bytes(self) -> int:
        """Bytes of its memory."""
        return len(self._pages) * self.page_bytes

    def is_mapped(self, address: int) -> bool:
        """Says whether there is memory at an address of the range."""
        return self.find_page_end(address) - self.page_bytes in self._pages

    def find_page_end(self, address: int) -> int:
        """Returns where the page of an address ends."""
        start = self.segment.address
        return address + self.page_bytes - (address - start) % self.page_bytes

    def find_whole_pages(self, address: int, nbytes: int) -> tuple[int, int]:
        """Returns address and size of the pages that lie inside a piece as a whole.

        Example:
            >>> from tracegraph.runtime.memory.providers.host_virtual import HostVirtualProvider
            >>> segment = ExpandableSegment(HostVirtualProvider(), 8 << 20, 2 << 20)
            >>> start = segment.segment.address
            >>> found, nbytes = segment.find_whole_pages(start + 512, 5 << 20)
            >>> found - start, nbytes
            (2097152, 2097152)
        """
        start = self.segment.address
        first = start + -(-(address - start) // self.page_bytes) * self.page_bytes
        end = start + (address + nbytes - start) // self.page_bytes * self.page_bytes
        return first, max(end - first, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps whole pages; blocks the host until no work uses them."""
        pages = range(address, address + nbytes, self.page_bytes)
        self._provider.unmap(address, nbytes)
        self._pages.difference_update(pages)

    def close(self) -> None:
        """Frees memory and addresses."""
        self.segment.storage.close()


def _free(
    provider: VirtualProvider, address: int, nbytes: int, pages: set[int], page_bytes: int
) -> None:
    # No method: the finaliser must not point back to the segment.
    for page in sorted(pages):
        provider.unmap(page, page_bytes)
    pages.clear()
    provider.release(address, nbytes)
