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

    It does not hold the arena: a result that outlives its graph keeps only its own memory and the
    executable graph.

    Args:
        buffer: the static buffer that it stands for.
        patchers: functions that point the graph's nodes at another address.

    Attributes:
        is_taken: True while the memory that the graph writes belongs to a result.
        name: of the buffer.
        aval: JAX's abstract value of the result.
        lock: held by whoever launches the graph.
    """

    __slots__ = (
        "_patchers",
        "_raw",
        "_spares",
        "aval",
        "context",
        "is_taken",
        "lock",
        "name",
        "nbytes",
    )

    def __init__(self, buffer: CudaBuffer, patchers: Sequence[Callable[[int], None]]) -> None:
        self.name, self.aval, self.nbytes = buffer.name, buffer.aval, buffer.nbytes
        self.context, self.lock = buffer.context, buffer.lock
        self._patchers = tuple(patchers)
        self._raw: Any = None
        self._spares: list[Any] = []
        # Nothing is bound yet; the first launch takes memory.
        self.is_taken = True

    def renew(self) -> None:
        """Points the graph at memory that nobody holds; called before a launch."""
        raw = self._spares.pop() if self._spares else self._stock_up()
        if raw is not self._raw:
            self._bind(raw)
        self.is_taken = False

    def hand_out(self, generation: int) -> Array:
        """Returns the value that the last launch writes."""
        self.is_taken = True
        # Of an immutable value nobody asks what else a StaticBuffer has, as `write`.
        result: Any = Result(self, self._raw, generation)
        return Array(result, generation, Lifetime.FRESH)

    def take_back(self, raw: Any) -> None:
        """Gets the memory of a result that was dropped unread.

        It may run in any thread, between any two lines of the other methods. So it changes nothing
        but the list, which is one step; whose the memory is that the graph writes, only launches
        say.
        """
        if len(self._spares) < MAX_SPARES:
            self._spares.append(raw)

    def allocate(self, count: int) -> list[Any]:
        """Returns memory of JAX's own for results."""
        aval = self.aval
        return allocate_arrays(
            aval.shape, aval.dtype, aval.weak_type, self.context.jax_device, count
        )

    def _bind(self, raw: Any) -> None:
        # None until the driver has accepted it at every node.
        self._raw = None
        address = _get_pointer(raw)
        for patch in self._patchers:
            patch(address)
        self._raw = raw

    def _stock_up(self) -> Any:
        raw, *spares = self.allocate(STOCK if self.nbytes <= SMALL_BYTES else 1)
        self._spares += spares
        return raw


class Result:
    """The memory of one result: as much of a StaticBuffer as reading needs.

    Args:
        port: takes the memory back if nobody has seen it.
        raw: the memory, as a plain array.
        generation: number of the replay that writes it.
    """

    __slots__ = ("_is_seen", "_port", "_raw", "generation")
    is_handed_out = False

    def __init__(self, port: ResultPort, raw: Any, generation: int) -> None:
        self._port, self._raw, self.generation = port, raw, generation
        self._is_seen = False

    def __del__(self) -> None:
        # No call into JAX here, see Note [Finalisers] of `Arena`.
        if not self._is_seen:
            self._port.take_back(self._raw)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._port.name

    @property
    def aval(self) -> Any:
        """JAX's abstract value."""
        return self._port.aval

    @property
    def jax_device(self) -> Any:
        """The GPU."""
        return self._context.jax_device

    @property
    def lock(self) -> threading.RLock:
        """The lock of the graph that made it."""
        return self._port.lock

    @property
    def arena(self) -> Any:
        """None: it is in no arena, and no replay overwrites it."""
        return None

    @property
    def memory(self) -> Any:
        """The memory, unless a reader has just made another array of it."""
        return None if self._raw.is_deleted() else self._raw

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
        return self._port.context

    def snapshot(self) -> DeviceValue:
        """Gives the memory itself away: it is a value of its own already."""
        # Kept here too, so that a read that fails may be tried again.
        self._is_seen = True
        return DeviceValue(self._raw, self._context)

    def _copy(self) -> DeviceValue:
        # The value stays with this result, which may be read again.
        (raw,) = self._port.allocate(1)
        self._context.copy(_get_pointer(raw), self.address, self._port.nbytes)
        return DeviceValue(raw, self._context)

    def wait(self) -> None:
        """Blocks the host until the value is there."""
        self._context.order.synchronize()

    def is_ready(self) -> bool:
        """True when a read would not wait."""
        return self._context.order.is_idle()
