"""The waist between front end and lowering: what is to be captured, without the IR."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tracegraph.runtime.definition.packing import count_packed_bytes

# Of buffers whose elements mean nothing to the lowering.
BYTE = np.dtype(np.uint8)


@dataclasses.dataclass(frozen=True)
class BufferSpec:
    """One array in device memory, or a value that the program keeps in host memory.

    Attributes:
        name: unique in its request.
        shape: physical shape: that of a typed PRNG key includes its key data.
        dtype: physical dtype: a typed PRNG key is ``uint32``.
        weak_type: True when JAX lets the value adopt the dtype of what it meets.
        content: the bytes of a constant of the compiled program; None for every other buffer.
        is_packed: True where elements of less than a byte share bytes.
        is_host: True for a temporary in host memory, see Note [Host memory] in
            `planning/memory_plan.py`.

    More than six fields because it is all that lowering knows of an array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False
    content: bytes | None = dataclasses.field(default=None, repr=False)
    is_packed: bool = False
    is_host: bool = False

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes that the array takes."""
        if self.is_packed:
            return count_packed_bytes(self.shape, self.dtype)
        return math.prod(self.shape) * self.dtype.itemsize


class Role(enum.Enum):
    """How an input reaches its static buffer."""

    COPIED = "copied"
    DONATED = "donated"
    CONSTANT = "constant"


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """A static input buffer and how it is filled: each replay, once and then resident, or once.

    Attributes:
        buffer: holds it.
        role: how it is filled.
        is_kept: False where no value is needed between two replays, as each fills it again.
        may_be_lent: True where calls may have it read in the caller's memory, see Note [Lent
            inputs] in `planning/lent_inputs.py`.
    """

    buffer: BufferSpec
    role: Role
    is_kept: bool = True
    may_be_lent: bool = False


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """A result.

    Attributes:
        buffer: holds it.
        alias: name of the donated input that it updates; None if it updates none.
        is_static: True where each replay writes it to the same place.
        is_kept: False where it is taken out before another graph of the pool is replayed.
    """

    buffer: BufferSpec
    alias: str | None = None
    is_static: bool = False
    is_kept: bool = True


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a region runs.

    Attributes:
        stream: number of its stream; 0 is the capturing stream.
        waits: names of the regions on other streams that must finish before it.
        is_captured: False for a region that runs eagerly between two graphs.
    """

    stream: int = 0
    waits: tuple[str, ...] = ()
    is_captured: bool = True


@dataclasses.dataclass(frozen=True)
class EventPoint:
    """Where each replay records an event of the user's, or waits for one.

    Attributes:
        event: a `runtime.streams.event.Event`.
        is_wait: False for a record.
    """

    event: Any
    is_wait: bool


@dataclasses.dataclass(frozen=True)
class Region:
    """A maximal run of ops on one stream, or a point between two of them.

    Attributes:
        name: unique in its request.
        function: flat and traceable; takes and returns arrays as ``inputs`` and ``outputs`` say.
        inputs: what it reads.
        outputs: what it defines.
        place: its stream, its waits, and whether it is captured.
        point: None for a run of ops; a point reads and defines nothing.
    """

    name: str
    function: Callable[..., tuple[Any, ...]] = dataclasses.field(repr=False)
    inputs: tuple[BufferSpec, ...]
    outputs: tuple[BufferSpec, ...]
    place: Place = Place()
    point: EventPoint | None = None


@dataclasses.dataclass(frozen=True)
class CaptureRequest:
    """Everything that lowering needs to know of a captured function.

    Attributes:
        name: the function's name.
        regions: in program order.
        inputs: every static input, constants included.
        outputs: every flat result, in order.
    """

    name: str
    regions: tuple[Region, ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
