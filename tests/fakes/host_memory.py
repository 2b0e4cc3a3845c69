"""A static buffer on NumPy memory, for tests of arrays without a graph."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np

from tracegraph.runtime.array import Array, Lifetime
from tracegraph.runtime.jax_interop import make_aval


class NumpyBuffer:
    """One buffer; `replay` overwrites it as a captured graph would."""

    def __init__(self, value: Any, *, weak_type: bool = False, name: str = "y") -> None:
        self.view = np.array(value)
        self.aval = make_aval(self.view.shape, self.view.dtype, weak_type=weak_type)
        self.jax_device = jax.devices()[0]
        self.lock = threading.RLock()
        self.name = name
        self.arena = object()
        self.generation = 1
        self.snapshot_count = 0
        self.dropped_leaves = 0

    memory = None
    holder = None

    @property
    def address(self) -> int:
        return self.view.ctypes.data

    def snapshot(self) -> np.ndarray[Any, Any]:
        self.snapshot_count += 1
        return self.view.copy()

    def write(self, value: Any) -> None:
        np.copyto(self.view, np.asarray(value))

    is_handed_out = False

    def take_result(self) -> Any:
        return None

    def make_writer(self) -> Any:
        return self.write

    def restore(self) -> bool:
        return False

    def wait(self) -> None:
        """Returns at once, as on the host."""

    def is_ready(self) -> bool:
        return True

    def record_stream(self, stream: Any) -> None:
        """Has nothing to note."""

    def drop_leaf(self) -> None:
        """Counts deleted resident leaves."""
        self.dropped_leaves += 1

    def replay(self, value: Any, *settled: Array) -> None:
        """Settles the given arrays, then puts a new value in the buffer."""
        with self.lock:
            for array in settled:
                array.settle()
            self.view[...] = value
            self.generation += 1


def make_array(value: Any, lifetime: Lifetime = Lifetime.FRESH, **options: Any) -> Array:
    """Returns an array in a buffer of its own."""
    buffer = NumpyBuffer(value, **options)
    return Array(buffer, buffer.generation, lifetime)
