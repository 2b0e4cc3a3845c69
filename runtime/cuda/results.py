"""Results of a replay in memory of JAX's own: immutable values that nothing has to be copied for.

A result that the user still holds keeps its memory, and the next replay writes elsewhere; one that
was dropped unread leaves its memory to the next. So a loop alternates between two pieces of
memory, and pays one changed node parameter a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.cuda.buffer import CudaBuffer, DeviceValue, DeviceView
from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.cuda.memory.jax_arrays import allocate_arrays, make_first_arrays
from tracegraph.runtime.definition.graph import ReplayClock
from tracegraph.runtime.jax_interop import ArrayImpl

_get_pointer = ArrayImpl.unsafe_buffer_pointer
# Arrays that are made at once: eight cost twice as much as one, and small ones take no room.
STOCK = 8
SMALL_BYTES = 1 << 16
MAX_SPARES = 8

# A plain array and its address.
ArrayPiece: TypeAlias = tuple[Any, int]


def count_stock(nbytes: int) -> int:
    """Returns how many results of a size get their memory at once."""
    return STOCK if nbytes <= SMALL_BYTES else 1


class ResultMemory:
    """What results of one kind have in common: each is in memory of JAX's own.

    Args:
        name: what messages call them.
        aval: JAX's abstract value.
        nbytes: of each.
        context: of the GPU.
        lock: held while one is read.

    Attributes:
        spares: memory of results that were dropped unread, for the next ones.
        room: how many spares are kept.
        clock: with the lock; it never advances, because a result is written once.
    """

    __slots__ = ("aval", "clock", "context", "name", "nbytes", "room", "spares")

    # As many arguments as a result has properties.
    def __init__(
        self, name: str, aval: Any, nbytes: int, context: CudaContext, lock: threading.RLock
    ) -> None:
        self.name, self.aval, self.nbytes = name, aval, nbytes
        self.context, self.clock = context, ReplayClock(lock)
        # Results append to it, in any thread and between any two lines of what takes from it. That
        # is one step, and changes nothing else: whose the memory is that a graph writes, only
        # launches say.
        self.spares: list[ArrayPiece] = []
        self.room = 0

    def allocate(self, count: int) -> list[Any]:
        """Returns memory of JAX's own for results."""
        aval, held = self.aval, self.context.held
        if held:
            held.poll()
        return allocate_arrays(
            aval.shape, aval.dtype, aval.weak_type, self.context.jax_device, count
        )


class ResultPort(ResultMemory):
    """The place where one result of a graph is written.

    It does not hold the arena, and is closed with the graph: a result that outlives it keeps only
    its own memory.

    Args:
        buffer: the static buffer whose value it writes.
        patchers: functions that point the graph's nodes at another address.

    Attributes:
        is_taken: True while the memory that the graph writes belongs to a result.
    """

    __slots__ = ("_patchers", "_piece", "is_taken")

    def __init__(self, buffer: CudaBuffer, patchers: Sequence[Callable[[int], None]]) -> None:
        lock = buffer.clock.lock
        super().__init__(buffer.name, buffer.aval, buffer.nbytes, buffer.context, lock)
        self._patchers = tuple(patchers)
        self._piece: ArrayPiece | None = None
        self.room = MAX_SPARES
        # Nothing is bound yet; the first launch takes memory.
        self.is_taken = True

    def renew(self) -> None:
        """Points the graph at memory that no result holds; called before a launch."""
        piece = self.spares.pop() if self.spares else self._stock_up()
        if piece is not self._piece:
            # None until the driver has accepted it at every node.
            self._piece = None
            for patch in self._patchers:
                patch(piece[1])
            self._piece = piece
        self.is_taken = False

    def take_first(self) -> None:
        """Gets memory for the first results, if a launch would compile for it; the host waits."""
        raws = make_first_arrays(self.aval, self.context.jax_device, count_stock(self.nbytes))
        self.spares += [(raw, _get_pointer(raw)) for raw in raws]

    def close(self) -> None:
        """Lets go of the graph and of the memory for its next results: there will be none."""
        self.room, self._patchers, self._piece = 0, (), None
        self.spares.clear()

    def hand_out(self) -> Array:
        """Returns the value that the last launch writes."""
        self.is_taken = True
        assert self._piece is not None
        return Array(Result(self, self._piece), self.clock.generation, ArrayState.FRESH)

    def _stock_up(self) -> ArrayPiece:
        raws = self.allocate(count_stock(self.nbytes))
        piece, *spares = ((raw, _get_pointer(raw)) for raw in raws)
        self.spares += spares
        return piece


class Result:
    """The memory of one result, to be read.

    Note [Results as inputs]. A graph reads the result of another graph, or of its own, where it is.
    Dropped unread, the memory returns to its port, and the next launch of that port's graph may
    write it: after all that is on the stream by then. The caller keeps what it passes to a graph
    alive until that is launched. And a graph never writes what it reads, because memory that is
    held is not among the spares.

    Args:
        port: gets the memory if it was never read.
        piece: of memory.

    Attributes:
        arena: None: it is in no arena, and no replay overwrites it.
    """

    __slots__ = ("_is_seen", "_piece", "_port")
    arena = None

    def __init__(self, port: ResultMemory, piece: ArrayPiece) -> None:
        self._port, self._piece, self._is_seen = port, piece, False

    def __del__(self) -> None:
        # No call into JAX here, see Note [Finalisers] of `Arena`.
        try:
            if self._is_seen:
                return
        except AttributeError:
            # Made by half: `_is_seen` is set last.
            return
        port = self._port
        if len(port.spares) < port.room:
            port.spares.append(self._piece)

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
        return self._port.context.jax_device

    @property
    def clock(self) -> ReplayClock:
        """See `ResultPort`."""
        return self._port.clock

    @property
    def context(self) -> CudaContext:
        """That of the GPU."""
        return self._port.context

    @property
    def memory(self) -> Any:
        """The memory, unless a reader has just made another array of it."""
        raw = self._piece[0]
        return None if raw.is_deleted() else raw

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._piece[1]

    @property
    def view(self) -> DeviceView:
        """The bytes themselves."""
        return DeviceView(self.address, self._copy)

    def snapshot(self) -> DeviceValue:
        """Returns the memory itself: nothing writes to it any more."""
        # Kept here too, so that a read that fails may be tried again.
        self._is_seen = True
        return DeviceValue(self._piece[0], self.context)

    def _copy(self) -> DeviceValue:
        # The value stays with this result, which may be read again.
        (raw,) = self._port.allocate(1)
        self.context.copy(_get_pointer(raw), self.address, self._port.nbytes)
        return DeviceValue(raw, self.context)
