"""The buffers behind LIVE arrays: static inputs; see ``graph_output.py``, too.

Note [Live values]. A LIVE array has no value of its own: it shows what its buffer holds when it is
read. In a block that is recorded nothing is read at all: the array stands for its buffer in the
program, and a replay reads the buffer as it is by then. So a graph takes such an array by
reference, and `copy_` into a static input reaches every graph that reads it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.recorder import recorder_state
from tracegraph.runtime.arrays.static_buffer import DeviceContext, PendingRead, ReadableBuffer
from tracegraph.runtime.definition.graph import ReplayClock
from tracegraph.runtime.definition.packing import is_packable
from tracegraph.runtime.jax_interop import (
    ArrayImpl,
    computing,
    is_default_device,
    leave_host,
    make_aval,
    uncommit,
)


class LiveBuffer(ReadableBuffer, Protocol):
    """What a LIVE array shows, see Note [Live values]."""

    def read(self) -> Any:
        """Returns the value as a plain array; what stands for it where this thread records."""
        ...

    def start_read(self) -> PendingRead | None:
        """Begins to copy the value to the host; None where `read` is to be asked."""
        ...

    def write(self, value: Any) -> None:
        """Copies an array of the same shape and dtype into the buffer."""
        ...


class ResidentLeaf(Protocol):
    """An `Array` in the state RESIDENT, which is made above this module."""

    def jax(self) -> jax.Array:
        """Returns the value as a plain array."""
        ...

    def data_ptr(self) -> int:
        """Returns the address of the static buffer."""
        ...

    def copy_(self, src: Any) -> Any:
        """Writes an array into the static buffer."""
        ...


class InputWriter(DeviceContext, Protocol):
    """Writes the memory of plain arrays, in the order of JAX's work on their device."""

    def make_overwriter(self, array: Any) -> Callable[[Any], None] | None:
        """Returns what enqueues copies into the memory of a plain array; None if it has none.

        It takes arrays of the same shape and dtype, on any device or of NumPy.

        Args:
            array: on the device, where nothing but graphs reads it; held by the caller.
        """
        ...


class InputReader(Protocol):
    """What a graph has loaded."""

    # The values, held for the launches that read them; None once they have to be looked at again.
    values: tuple[Any, ...] | None


class StateLeaves:
    """The leaves of all static inputs that live in one graph.

    Attributes:
        leaves: as the latest replay returned them.
        is_whole: False once one of the inputs lives elsewhere.
    """

    __slots__ = ("is_whole", "leaves")

    def __init__(self, leaves: Sequence[ResidentLeaf]) -> None:
        self.leaves, self.is_whole = leaves, True


@jax.jit
def _copy_array(array: Any) -> Any:
    """Returns a new array of a strong type: compiled, a copy costs a quarter of `jnp.array`'s."""
    return jnp.array(array, array.dtype)


# A finaliser may drop a graph.
_readers_lock = threading.RLock()


def place(array: jax.Array, jax_device: Any) -> jax.Array:
    """Returns a plain array on a device, committed to it only where `Array` would be."""
    array = leave_host(array)
    if not is_default_device(jax_device):
        return jax.device_put(array, jax_device)
    is_here = array.devices() == {jax_device}
    return array if is_here else uncommit(jax.device_put(array, jax_device))


class StaticInput:
    """An input that is filled between replays, or by a graph; it belongs to no graph.

    The value is a plain array, and a graph reads it where it is, without a copy of its own. Once a
    graph has written it, it is the leaf of a donated input that lives in that graph: Note [Leaf
    sets].

    Note [Writing an input]. A plain array that was read is an immutable value of its reader, so the
    next write makes another array. One that only graphs have read is written where it is, on a
    device that has a writer: one copy on the stream that JAX computes on, behind the replays that
    still read the old value and ahead of the next ones. XLA knows nothing of that copy. So what is
    read afterwards is the array itself if the stream is idle, else a private copy, which XLA makes
    on that stream and defines. Graphs that have loaded the value are told when there is another
    array, when the array may be deleted by who has read it, and, if they took a copy, of each
    write. A replay that was told nothing looks at no input.

    Args:
        value: the first value, which no one else holds.
        jax_device: where it is.
        writer: of the device; without one each write makes another array.

    Attributes:
        value: the plain array; None while it lives in a graph.
        is_shared: True once the plain array was given to the user.
        is_copied: True once a graph has copied the value, and does not read it where it is.
        loans: how many captures compare results on the plain array: it is not written meanwhile.
    """

    __slots__ = (
        "_clock",
        "_home",
        "_is_pending",
        "_overwriter",
        "_readers",
        "_writer",
        "aval",
        "context",
        "is_copied",
        "is_shared",
        "jax_device",
        "loans",
        "name",
        "value",
    )
    arena: Arena | None = None

    def __init__(
        self, value: jax.Array, jax_device: Any, writer: InputWriter | None = None
    ) -> None:
        self.value: Any = value
        self.jax_device = jax_device
        self.aval = make_aval(value.shape, value.dtype)
        self.name = "static input"
        self.is_shared = self.is_copied = False
        self.loans = 0
        self.context: DeviceContext | None = writer
        # XLA converts elements of less than a byte where it copies them.
        self._writer = None if is_packable(self.aval.dtype) else writer
        # Of the plain array that is the value now; made by the first write of it.
        self._overwriter: Callable[[Any], None] | None = None
        # Whether a copy that XLA does not know may be on its way.
        self._is_pending = False
        # If it lives in a graph: the leaves that it is one of, and which one.
        self._home: tuple[StateLeaves, int] | None = None
        self._readers: list[weakref.ref[InputReader]] = []
        self._clock = ReplayClock()

    @property
    def clock(self) -> ReplayClock:
        """Its lock is held while the value is read or written."""
        return self._clock

    @property
    def leaf(self) -> ResidentLeaf | None:
        """The value, if it lives in a graph."""
        home = self._home
        return None if home is None else home[0].leaves[home[1]]

    @property
    def address(self) -> int:
        """Address of the first byte, until the next write of a value that was read."""
        leaf = self.leaf
        return self.value.unsafe_buffer_pointer() if leaf is None else leaf.data_ptr()

    @property
    def memory(self) -> Any:
        """The plain array that holds the value; None while it lives in a graph."""
        return self.value if self._home is None else None

    @property
    def view(self) -> Any:
        """The value, to be copied."""
        if self.jax_device.platform == "cpu":
            return np.asarray(self._find_plain())
        leaf = self.leaf
        return self.value if leaf is None else leaf.jax()

    def snapshot(self) -> np.ndarray[Any, Any]:
        """Returns a private copy of the value."""
        return np.array(self._find_plain())

    def read(self) -> Any:
        """Returns the value, or what stands for it where this thread records."""
        recorder = recorder_state.recorder
        return self._find_plain() if recorder is None else recorder.read_live(self)

    def start_read(self) -> PendingRead | None:
        """Begins to copy the value to the host, behind the writes so far; None if `read` must."""
        is_elsewhere = self._home is not None or self.is_shared or self._writer is None
        if is_elsewhere or recorder_state.recorder is not None:
            return None
        with self._clock.lock:
            value = self.value
            if value is None or not value.is_ready() or self._writer is None:
                return None
            return self._writer.start_read(value.unsafe_buffer_pointer(), self.aval)

    def write(self, value: Any) -> None:
        """Takes a copy of an array like the value; where this thread records, in each replay."""
        if recorder_state.recorder is not None:
            recorder_state.recorder.write_live(self, value)
            return
        if self._home is not None:
            self._home[0].leaves[self._home[1]].copy_(value)
        elif not self._overwrite(value):
            is_plain = type(value) is ArrayImpl
            copy = _copy_array(value) if is_plain else jnp.array(value, self.aval.dtype)
            self.value, self._overwriter = place(copy, self.jax_device), None
            self.is_shared = self._is_pending = False
            self._tell_readers()

    def enter(self, state: StateLeaves, index: int) -> None:
        """Lives in a graph from now on, which has written it."""
        if self._home is not None:
            self._home[0].is_whole = False
        self._home, self.value, self._overwriter = (state, index), None, None
        self._tell_readers()

    def give(self) -> Any:
        """Returns the value for a graph that will write it: its leaf, or a copy of its own."""
        leaf = self.leaf
        return jnp.array(self.value) if leaf is None else leaf

    def lend(self) -> Any:
        """Returns the value for a capture, which neither deletes it nor keeps it; then `take_back`.

        So a replay need not ask if it was deleted, and the next write finds no reader.
        """
        leaf = self.leaf
        with self._clock.lock:
            self.loans += 1
            return self._find_settled() if leaf is None else leaf.jax()

    def take_back(self) -> None:
        """Says that a value that was lent is not used any more."""
        with self._clock.lock:
            self.loans -= 1

    def add_reader(self, reader: InputReader) -> None:
        """Tells a graph from now on that it has to look at the value again."""
        with _readers_lock:
            self._readers = [*_list_alive(self._readers), weakref.ref(reader)]

    def _tell_readers(self) -> None:
        for reference in self._readers:
            reader = reference()
            if reader is not None:
                reader.values = None

    def _overwrite(self, value: Any) -> bool:
        """Writes the value where it is; False if that must not or cannot be."""
        if self._writer is None or self.is_shared or self.loans:
            return False
        if self._overwriter is None:
            self._overwriter = self._writer.make_overwriter(self.value)
            if self._overwriter is None:
                return False
        self._is_pending = True
        try:
            self._overwriter(value)
            return True
        finally:
            # After the write: a graph that copies the value earlier is told, and copies again.
            if self.is_copied:
                self._tell_readers()

    def _find_plain(self) -> Any:
        leaf = self.leaf
        if leaf is not None:
            return leaf.jax()
        with self._clock.lock:
            found = self._find_settled()
            if found is self.value and not self.is_shared:
                self.is_shared = True
                self._tell_readers()
            return found

    def _find_settled(self) -> Any:
        """Returns the plain array; a private copy while a write of it may be on its way."""
        if self._is_pending and self._writer is not None:
            if not self._writer.is_idle():
                with computing():
                    return _copy_array(self.value)
            self._is_pending = False
        return self.value


def _list_alive(references: Iterable[weakref.ref[Any]]) -> list[weakref.ref[Any]]:
    return [each for each in references if each() is not None]
