"""Buffers over several devices: a part on each, one value of JAX for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.static_buffer import DeviceContext, StaticBuffer
from tracegraph.runtime.definition.graph import ReplayClock
from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.jax_interop import join_parts, list_parts, to_plain
from tracegraph.runtime.streams.stream import Stream

# Origins of arrays that a buffer remembers.
MAX_KNOWN = 64


class GlobalType(NamedTuple):
    """What an array over several devices is.

    Attributes:
        aval: JAX's abstract value of the whole array.
        sharding: where its parts are.
    """

    aval: Any
    sharding: Any


class SpreadContext:
    """The work of several devices that goes on after a call has returned.

    Args:
        contexts: of each.
    """

    def __init__(self, contexts: Sequence[DeviceContext]) -> None:
        self._contexts = tuple(contexts)

    def synchronize(self) -> None:
        """Blocks the host until all work that was enqueued so far is done."""
        for each in self._contexts:
            each.synchronize()

    def is_idle(self) -> bool:
        """True when all work that was enqueued so far is done."""
        return all(each.is_idle() for each in self._contexts)

    def number_stream(self, stream: Stream) -> int:
        """Raises: a stream is of one device."""
        raise _make_stream_error(stream)

    def start_read(self, address: int, aval: Any) -> None:
        """Returns None: JAX puts a value together from its parts."""

    def hold(self, array: Any, memory: Any, stream: Stream) -> None:
        """Raises: a stream is of one device."""
        del array, memory
        raise _make_stream_error(stream)


class SpreadValue:
    """A private copy of a value, a part on each device.

    Args:
        parts: as `ReadableBuffer.snapshot` returns them.
        aval: of the whole value.
        sharding: where it is.
    """

    __slots__ = ("_aval", "_sharding", "parts")

    def __init__(self, parts: Sequence[Any], aval: Any, sharding: Any) -> None:
        self.parts, self._aval, self._sharding = tuple(parts), aval, sharding

    def copy(self) -> SpreadValue:
        """Returns a value that nothing writes."""
        return SpreadValue([part.copy() for part in self.parts], self._aval, self._sharding)

    def block_until_ready(self) -> None:
        """Blocks the host until the bytes are there."""
        for part in self.parts:
            part.block_until_ready()

    def is_ready(self) -> bool:
        """True when a read would not wait."""
        return all(part.is_ready() for part in self.parts)

    def to_jax(self) -> Any:
        """Returns the value as one plain array; one thread at a time."""
        return join_parts(self._aval, self._sharding, [part.to_jax() for part in self.parts])


class SpreadResult:
    """A result of which each device has a part in memory of its own, to be read.

    Args:
        name: what messages call it.
        arrays: the parts, which belong to it alone.
        aval: of the whole value.
        sharding: where it is.
        clock: with the lock of the graph; it never advances, because a result is written once.
        context: the work of all devices.

    Attributes:
        arena: None: it is in no arena, and no replay overwrites it.
    """

    __slots__ = ("_arrays", "aval", "clock", "context", "jax_device", "name")
    arena = None

    def __init__(
        self,
        name: str,
        arrays: Sequence[Array],
        aval: Any,
        sharding: Any,
        clock: ReplayClock,
        context: DeviceContext,
    ) -> None:
        self.name, self.aval, self.jax_device, self.clock = name, aval, sharding, clock
        self._arrays, self.context = tuple(arrays), context

    @property
    def memory(self) -> Any:
        """One plain array over the memory of all parts; None once a reader has made others."""
        parts = [each.find_memory() for each in self._arrays]
        if any(part is None for part in parts):
            return None
        return join_parts(self.aval, self.jax_device, parts)

    @property
    def address(self) -> int:
        """Address of the first byte of the first part."""
        return self._arrays[0].data_ptr()

    @property
    def view(self) -> SpreadValue:
        """The bytes themselves, to be copied."""
        return SpreadValue([each.peek() for each in self._arrays], self.aval, self.jax_device)

    def snapshot(self) -> SpreadValue:
        """Returns the memory itself: nothing writes to it any more."""
        parts = [_PlainPart(each) for each in self._arrays]
        return SpreadValue(parts, self.aval, self.jax_device)


class _PlainPart:
    """A part of a result, whose array is made when it is needed."""

    __slots__ = ("_array",)

    def __init__(self, array: Array) -> None:
        self._array = array

    @property
    def address(self) -> int:
        return self._array.data_ptr()

    def copy(self) -> _PlainPart:
        return self

    def block_until_ready(self) -> None:
        self._array.block_until_ready()

    def is_ready(self) -> bool:
        return self._array.is_ready()

    def to_jax(self) -> Any:
        return self._array.jax()


class SpreadBuffer:
    """A static buffer over several devices.

    Args:
        parts: of each device of this process, in order of the devices.
        aval: of the whole value.
        sharding: where it is; it stands for the JAX device of other buffers.
        clock: counts the replays of the graph that owns the buffer.
        context: the work of all devices.

    Attributes:
        parts: as given.
        memory: None, since the next replay may write the bytes.
    """

    __slots__ = ("_orders", "aval", "clock", "context", "jax_device", "name", "parts")
    memory = None

    def __init__(
        self,
        parts: Sequence[StaticBuffer],
        aval: Any,
        sharding: Any,
        clock: ReplayClock,
        context: DeviceContext,
    ) -> None:
        self.parts, self.name = tuple(parts), parts[0].name
        self.aval, self.jax_device = aval, sharding
        self.clock, self.context = clock, context
        # Arrays of one origin share the object that says where they are.
        self._orders: dict[int, _Order] = {}

    @property
    def address(self) -> int:
        """Address of the first byte on the first device."""
        return self.parts[0].address

    @property
    def arena(self) -> Arena | None:
        """The arena on the first device."""
        return self.parts[0].arena

    @property
    def view(self) -> SpreadValue:
        """The bytes themselves, to be copied."""
        return SpreadValue([part.view for part in self.parts], self.aval, self.jax_device)

    def snapshot(self) -> SpreadValue:
        """Returns a private copy of the current bytes."""
        return SpreadValue([part.snapshot() for part in self.parts], self.aval, self.jax_device)

    def write(self, value: Any) -> None:
        """Copies a value into the parts; one that is elsewhere is put on the devices first."""
        if isinstance(value, Array):
            is_spread = value.sharding.num_devices > 1
            value = value.peek() if is_spread else value.jax()
        if isinstance(value, SpreadValue):
            pieces: Sequence[Any] = value.parts
        else:
            # A copy of what a graph of one device has is no array yet.
            made = value.to_jax() if hasattr(value, "to_jax") else value
            pieces = self._split(to_plain(made))
        for part, piece in zip(self.parts, pieces, strict=True):
            part.write(piece)

    def reads(self, array: Any, /) -> bool:
        """True while the graph reads a plain array that it took where the array is."""
        pieces = self._find_pieces(array)
        if pieces is None:
            return False
        return all(part.reads(piece) for part, piece in zip(self.parts, pieces, strict=True))

    def read_at(self, address: int, /) -> bool:
        """Returns False: one address is of one device."""
        del address
        return False

    def make_writer(self) -> Callable[[Any], None]:
        """Returns what takes a plain JAX array of the same type."""
        writers = [part.make_writer() for part in self.parts]

        def take(value: Any) -> None:
            pieces = self._find_pieces(value)
            if pieces is None:
                self.write(value)
                return
            for writer, piece in zip(writers, pieces, strict=True):
                writer(piece)

        return take

    def _split(self, value: Any) -> Sequence[Any]:
        """Returns the piece of a value that belongs to each part."""
        pieces = self._find_pieces(value)
        if pieces is None:
            pieces = self._find_pieces(place_value(value, self.jax_device))
        assert pieces is not None
        return pieces

    def _find_pieces(self, array: Any) -> Sequence[Any] | None:
        """Returns the same of a plain array that has them where they belong; None of others."""
        if not isinstance(array, jax.Array):
            return None
        sharding = array.sharding
        order = self._orders.get(id(sharding))
        if order is None:
            order = self._find_order(array)
            if order is None:
                return None
            if len(self._orders) < MAX_KNOWN:
                self._orders[id(sharding)] = order
        pieces = list_parts(array)
        return [pieces[index] for index in order.indices]

    def _find_order(self, array: Any) -> _Order | None:
        sharding = array.sharding
        if not sharding.is_equivalent_to(self.jax_device, array.ndim):
            return None
        found = {piece.device: index for index, piece in enumerate(list_parts(array))}
        return _Order(sharding, [found[part.jax_device] for part in self.parts])


class _Order(NamedTuple):
    """Which of an array's pieces each part takes; it holds the sharding whose id is its key."""

    sharding: Any
    indices: Sequence[int]


def place_value(value: Any, sharding: Any) -> Any:
    """Returns a value as one array over several devices, as `jax.device_put` does.

    Where devices are of several processes, each process gives what its own need: JAX would compare
    the values of all processes first.

    Args:
        value: an array of JAX or NumPy, or a number; of these the same in all processes.
        sharding: where it is to be.
    """
    is_array = isinstance(value, jax.Array)
    if sharding.is_fully_addressable or (is_array and not value.is_fully_addressable):
        return jax.device_put(value, sharding)
    shape, can_cut = np.shape(value), is_array or isinstance(value, np.ndarray)
    parts = [
        jax.device_put(value[place] if can_cut else value, device)
        for device, place in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _make_stream_error(stream: Stream) -> UnsupportedError:
    return UnsupportedError(
        f"{stream} cannot hold an array over several devices",
        where="record_stream",
        why="a stream is of one device, and the array has a part on each of several",
        fix="record_stream of each part: array.addressable_shards[i].data",
        anchor="several-devices",
    )
