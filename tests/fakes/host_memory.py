"""A static buffer on NumPy memory, for tests of arrays without a graph."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.definition.graph import ReplayClock
from tracegraph.runtime.jax_interop import make_aval


class NumpyBuffer:
    """One buffer; `replay` overwrites it as a captured graph would."""

    def __init__(self, value: Any, *, weak_type: bool = False, name: str = "y") -> None:
        self.view = np.array(value)
        self.aval = make_aval(self.view.shape, self.view.dtype, weak_type=weak_type)
        self.jax_device = jax.devices()[0]
        self.clock = ReplayClock()
        self.clock.generation = 1
        self.name = name
        self.arena: Any = object()
        self.snapshot_count = 0

    context = None
    memory = None

    @property
    def address(self) -> int:
        return self.view.ctypes.data

    def snapshot(self) -> np.ndarray[Any, Any]:
        self.snapshot_count += 1
        return self.view.copy()

    def write(self, value: Any) -> None:
        np.copyto(self.view, np.asarray(value))

    def replay(self, value: Any, *settled: Array) -> None:
        """Settles the given arrays, then puts a new value in the buffer."""
        with self.clock.lock:
            for array in settled:
                array.settle()
            self.view[...] = value
            self.clock.generation += 1


def make_array(value: Any, state: ArrayState = ArrayState.FRESH, **options: Any) -> Array:
    """Returns an array in a buffer of its own."""
    buffer = NumpyBuffer(value, **options)
    return Array(buffer, buffer.clock.generation, state)
