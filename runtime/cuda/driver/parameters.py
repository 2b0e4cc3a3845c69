"""The parameters of a kernel as the driver reads them: pointers to memory, one per parameter."""

from __future__ import annotations

import array
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
        self._sizes = tuple(len(parameter) for parameter in parameters)
        starts = [0]
        for size in self._sizes:
            lines = -(-size // PARAMETER_ALIGNMENT)
            starts.append(starts[-1] + lines * PARAMETER_ALIGNMENT // WORD_BYTES)
        self.starts = tuple(starts[:-1])
        nbytes = starts[-1] * WORD_BYTES
        # Not arrays of ctypes: each has a type of its own, which is a cycle.
        memory = array.array("Q", bytes(nbytes + PARAMETER_ALIGNMENT))
        skipped = -memory.buffer_info()[0] % PARAMETER_ALIGNMENT
        self.words = memoryview(memory).cast("B")[skipped : skipped + nbytes].cast("Q")
        first = memory.buffer_info()[0] + skipped
        self._pointers = array.array("Q", [first + WORD_BYTES * start for start in starts])
        self.address = self._pointers.buffer_info()[0]
        self.write(parameters)

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
