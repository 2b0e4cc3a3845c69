"""The parameters of a kernel as the driver reads them: pointers to memory, one per parameter."""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Sequence
from typing import Any

# A tensor map needs this alignment; for everything else that is no word it is more than enough.
PARAMETER_ALIGNMENT = 64
WORD_BYTES = 8


class PackedParameters:
    """Parameters of one kernel in memory: words side by side, else each aligned to 64 bytes.

    Args:
        parameters: the bytes of each.

    Attributes:
        words: memory with the bytes of all parameters, as numbers of eight bytes.
        starts: for each parameter the index of its first word.
        address: of the array of pointers, as a launch takes it; valid while this object lives.

    Example:
        >>> packed = PackedParameters([b"12345678", b"abcdefgh"])
        >>> packed.starts, packed.address % 8, packed.read()
        ((0, 1), 0, (b'12345678', b'abcdefgh'))
    """

    def __init__(self, parameters: Sequence[bytes]) -> None:
        self._sizes = tuple(map(len, parameters))
        count = len(self._sizes)
        # Most kernels take addresses and numbers of eight bytes only.
        if self._sizes.count(WORD_BYTES) == count:
            # Not arrays of ctypes: each has a type of its own, which is a cycle.
            memory, self.starts = array.array("Q", b"".join(parameters)), tuple(range(count))
        else:
            memory, self.starts = _align(parameters, self._sizes)
        self.words = memoryview(memory)
        first, _ = memory.buffer_info()
        # With one more, so that there is an array where there are no parameters.
        pointers = [*[first + WORD_BYTES * start for start in self.starts], 0]
        self._pointers = array.array("Q", pointers)
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


def _align(
    parameters: Sequence[bytes], sizes: Sequence[int]
) -> tuple[array.array[int], tuple[int, ...]]:
    """Returns memory with each parameter at an alignment, and the index of its first word."""
    lines = [-(-size // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT for size in sizes]
    padded = b"".join(map(bytes.ljust, parameters, lines, itertools.repeat(b"\0")))
    memory = array.array("Q", bytes(len(padded) + PARAMETER_ALIGNMENT))
    address, _ = memory.buffer_info()
    skipped = -address % PARAMETER_ALIGNMENT
    memoryview(memory).cast("B")[skipped : skipped + len(padded)] = padded
    starts = itertools.accumulate(lines[:-1], initial=skipped)
    return memory, tuple(start // WORD_BYTES for start in starts)


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
