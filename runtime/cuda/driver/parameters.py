"""The parameters of a kernel as the driver reads them: pointers to memory, one per parameter."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Sequence
from typing import Any

# A tensor map needs this alignment; for everything else it is more than enough.
PARAMETER_ALIGNMENT = 64
WORD_BYTES = 8


class PackedParameters:
    """Parameters of one kernel in memory, each aligned to 64 bytes.

    Args:
        parameters: the bytes of each.

    Attributes:
        words: the bytes of all parameters, as numbers of eight bytes.
        starts: for each parameter the index of its first word.
        address: of the array of pointers, as a launch takes it; valid while this object lives.

    Example:
        >>> packed = PackedParameters([b"12345678", b"ab"])
        >>> packed.starts, packed.address % 8, packed.read()
        ((0, 8), 0, (b'12345678', b'ab'))
    """

    def __init__(self, parameters: Sequence[bytes]) -> None:
        self._sizes = tuple(map(len, parameters))
        lines = [-(-size // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT for size in self._sizes]
        padded = b"".join(map(bytes.ljust, parameters, lines, itertools.repeat(b"\0")))
        starts = [0, *itertools.accumulate(lines)]
        self.starts = tuple(start // WORD_BYTES for start in starts[:-1])
        # Not arrays of ctypes: each has a type of its own, which is a cycle.
        memory = array.array("Q", bytes(len(padded) + PARAMETER_ALIGNMENT))
        address, _ = memory.buffer_info()
        skipped = -address % PARAMETER_ALIGNMENT
        content = memoryview(memory).cast("B")[skipped : skipped + len(padded)]
        content[:] = padded
        self.words = content.cast("Q")
        self._pointers = array.array("Q", [address + skipped + start for start in starts])
        self.address, _ = self._pointers.buffer_info()

    def read(self) -> tuple[bytes, ...]:
        """Returns the current bytes of each parameter."""
        memory = self.words.cast("B")
        ranges = zip(self.starts, self._sizes, strict=True)
        return tuple(bytes(memory[8 * start : 8 * start + size]) for start, size in ranges)

    def write(self, parameters: Sequence[bytes]) -> None:
        """Replaces the bytes of all parameters by as many others."""
        memory = self.words.cast("B")
        for start, parameter in zip(self.starts, parameters, strict=True):
            memory[8 * start : 8 * start + len(parameter)] = parameter


class KernelPatch:
    """The parameters of one kernel node of an executable graph, to be changed in place.

    Args:
        packed: what the driver reads.
        attempt: makes the current bytes those of all launches from now on; the
            first item of what it returns is the error, 0 for none.
        report: raises what an attempt that failed has found, or makes up for it.
    """

    __slots__ = ("attempt", "packed", "report")

    def __init__(
        self,
        packed: PackedParameters,
        attempt: Callable[[], tuple[Any, ...]],
        report: Callable[[], None],
    ) -> None:
        self.packed, self.attempt, self.report = packed, attempt, report

    def send(self) -> None:
        """Makes the current bytes those of all launches from now on.

        Raises:
            CudaError: the driver refuses them.
        """
        if self.attempt()[0]:
            self.report()
