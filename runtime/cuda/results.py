"""Results of a replay in memory of JAX's own: immutable values that nothing has to be copied for.

A result that the user still holds keeps its memory, and the next replay writes elsewhere; one that
was dropped unread gives its memory back for the next. So a loop alternates between two pieces of
memory, and pays one changed node parameter a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tracegraph.runtime.array import Array, Lifetime
from tracegraph.runtime.cuda.buffer import CudaBuffer, CudaContext, DeviceValue, DeviceView
from tracegraph.runtime.cuda.jax_order import allocate_arrays
from tracegraph.runtime.jax_interop import ArrayImpl

_get_pointer = ArrayImpl.unsafe_buffer_pointer
# Arrays that are made at once: eight cost twice as much as one, and small ones take no room.
STOCK = 8
SMALL_BYTES = 1 << 16
MAX_SPARES = 8


class ResultPort:
    """The place where one result of a graph is written.

    Args:
        buffer: the static buffer that it stands for.
        patchers: functions that point the graph's nodes at another address.

    Attributes:
        is_taken: True while the memory that the graph writes belongs to a result.
    """

    __slots__ = ("_buffer", "_patchers", "_raw", "_spares", "is_taken")

    def __init__(self, buffer: CudaBuffer, patchers: Sequence[Callable[[int], None]]) -> None:
        self._buffer, self._patchers = buffer, tuple(patchers)
        self._raw: Any = None
        self._spares: list[Any] = []
        # Nothing is bound yet; the first launch takes memory.
        self.is_taken = True

    def renew(self) -> None:
        """Points the graph at memory that nobody holds; called before a launch."""
        raw = self._spares.pop() if self._spares else self._stock_up()
        address = _get_pointer(raw)
        for patch in self._patchers:
            patch(address)
        self._raw, self.is_taken = raw, False

    def hand_out(self, generation: int) -> Array:
        """Returns the value that the last launch writes."""
        self.is_taken = True
        return Array(Result(self, self._raw, generation), generation, Lifetime.FRESH)

    def take_back(self, raw: Any) -> None:
        """Gets the memory of a result that was dropped unread."""
        if raw is self._raw:
            self.is_taken = False
        elif len(self._spares) < MAX_SPARES:
            self._spares.append(raw)

    def _stock_up(self) -> Any:
        aval, buffer = self._buffer.aval, self._buffer
        count = STOCK if buffer.nbytes <= SMALL_BYTES else 1
        raw, *spares = allocate_arrays(
            aval.shape, aval.dtype, aval.weak_type, buffer.jax_device, count
        )
        self._spares += spares
        return raw

    @property
    def buffer(self) -> CudaBuffer:
        """The static buffer that it stands for."""
        return self._buffer


class Result:
    """The memory of one result; a StaticBuffer that nobody writes again.

    Args:
        port: takes the memory back if nobody has seen it.
        raw: the memory, as a plain array.
        generation: number of the replay that writes it.
    """

    __slots__ = ("_port", "_raw", "generation")
    is_handed_out = False

    def __init__(self, port: ResultPort, raw: Any, generation: int) -> None:
        self._port, self._raw, self.generation = port, raw, generation

    def __del__(self) -> None:
        # No call into JAX here, see Note [Finalisers] of `Arena`.
        if self._raw is not None:
            self._port.take_back(self._raw)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._port.buffer.name

    @property
    def aval(self) -> Any:
        """JAX's abstract value."""
        return self._port.buffer.aval

    @property
    def jax_device(self) -> Any:
        """The GPU."""
        return self._port.buffer.jax_device

    @property
    def lock(self) -> threading.RLock:
        """The lock of the graph that made it."""
        return self._port.buffer.lock

    @property
    def arena(self) -> Any:
        """None: it is in no arena, and no replay overwrites it."""
        return None

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return _get_pointer(self._raw)

    @property
    def view(self) -> DeviceView:
        """The bytes themselves."""
        return DeviceView(self.address, self._copy)

    @property
    def _context(self) -> CudaContext:
        return self._port.buffer.context

    def snapshot(self) -> DeviceValue:
        """Gives the memory itself away: it is a value of its own already."""
        raw, self._raw = self._raw, None
        return DeviceValue(raw, self._context)

    def _copy(self) -> DeviceValue:
        # The value stays with this result, which may be read again.
        aval = self.aval
        (raw,) = allocate_arrays(aval.shape, aval.dtype, aval.weak_type, self.jax_device, 1)
        self._context.copy(_get_pointer(raw), self.address, self._port.buffer.nbytes)
        return DeviceValue(raw, self._context)

    def wait(self) -> None:
        """Blocks the host until the value is there."""
        self._context.order.synchronize()

    def is_ready(self) -> bool:
        """True when a read would not wait."""
        return self._context.order.is_idle()
