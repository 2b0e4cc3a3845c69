"""A CudaDevice over host memory: arrays of JAX's CPU device, and kernels written in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.definitions import SIZE
from tests.fakes.memory_driver import MemoryDriver
from tracegraph.runtime.arrays import live_buffers
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.cuda import jax_order, measurement
from tracegraph.runtime.cuda.device import CudaDevice
from tracegraph.runtime.cuda.memory import jax_arrays
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, KernelNode, LaunchShape
from tracegraph.runtime.jax_interop import make_aval, to_immutable
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.replay import Replay

STREAM = 0x5555
SHAPE = LaunchShape((1, 1, 1), (32, 1, 1))


class CudaOnHost(CudaDevice):
    """A CudaDevice whose driver is a MemoryDriver.

    Args:
        driver: of this device alone.
        index: of the CPU device that has its memory.
    """

    def __init__(self, driver: MemoryDriver, index: int = 0) -> None:
        super().__init__(jax.local_devices(backend="cpu")[index], driver, STREAM)
        self.driver = driver


def make_device(monkeypatch: pytest.MonkeyPatch, *, index: int = 0, **options: Any) -> CudaOnHost:
    """Returns a device over one of JAX's CPU devices; options are those of MemoryDriver.

    As on a GPU, what JAX computes comes behind all work on the stream, and memory that JAX frees is
    not used by others before that work is done.
    """
    driver = MemoryDriver(**options)
    kept = driver.jax_memory
    allocator, define = jax_arrays._make_allocator, jax_order._define_anew

    def compute(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            driver.finish(STREAM)
            result = jax.block_until_ready(function(*arrays))
            if driver.is_deferred:
                kept.append(result)
            return result

        return run

    def make_allocator(shapes: Any, device: Any) -> Any:
        # Memory has no value until it is written: nothing has to be finished for it.
        def allocate() -> Any:
            arrays = jax.block_until_ready(allocator(shapes, device)())
            if driver.is_deferred:
                kept.extend(arrays)
            return arrays

        return allocate

    monkeypatch.setattr(jax_arrays, "_make_allocator", make_allocator)
    # What is copied is not held back until the stream is done with it.
    monkeypatch.setattr(jax_arrays, "MOST_COPIED_BYTES", 0)
    monkeypatch.setattr(jax_arrays, "SMALL_RESULTS_BYTES", 0)
    monkeypatch.setattr(jax_order, "_define_anew", compute(define))
    monkeypatch.setattr(live_buffers, "_copy_array", compute(live_buffers._copy_array))
    driver.kernels |= {
        "double": on_floats(lambda x: 2 * x),
        "increment": on_floats(lambda x: x + 1),
        "add": on_floats(np.add),
        "compare_pieces": compare_pieces,
        "measure_pieces": measure_pieces,
        "do_nothing": do_nothing,
        "do_nothing_after_wait": do_nothing,
        "spin": do_nothing,
        "read_bytes": read_zeros,
    }
    return CudaOnHost(driver, index)


def on_floats(function: Callable[..., Any]) -> Callable[[tuple[bytes, ...]], None]:
    """Returns a kernel whose last parameter is its target, all of them float32[4]."""

    def run(parameters: tuple[bytes, ...]) -> None:
        *sources, target = (view_floats(int.from_bytes(p, "little")) for p in parameters)
        target[:] = function(*sources)

    return run


def do_nothing(parameters: tuple[bytes, ...]) -> None:
    """Does what kernels of `timing_kernels` do that write nothing."""
    assert all(len(parameter) == 8 for parameter in parameters)


def read_zeros(parameters: tuple[bytes, ...]) -> None:
    """Does what the kernel `timing_kernels.READ_BYTES` does: what it reads must be zeros."""
    first, end, stride = (int.from_bytes(parameter, "little") for parameter in parameters)
    assert (first % 16, end % 16, stride % 16) == (0, 0, 0)
    assert ctypes.string_at(first, end - first) == bytes(end - first)


def count_work(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each memcpy, memset and kernel between two events take one microsecond."""
    marks = device.driver._marks

    def elapsed_ms(start: int, end: int) -> float:
        return (marks[end][1] - marks[start][1]) / 1000

    monkeypatch.setattr(device.driver, "elapsed_ms", elapsed_ms)


def compare_pieces(parameters: tuple[bytes, ...]) -> None:
    """Does what the kernel `comparison.COMPARE_PIECES` does."""
    first, verdicts = (int.from_bytes(parameter, "little") for parameter in parameters)
    # The verdicts follow the table.
    table = np.ctypeslib.as_array((ctypes.c_uint64 * ((verdicts - first) // 8)).from_address(first))
    for index, (one, other, nbytes) in enumerate(table.reshape(-1, 3).tolist()):
        if ctypes.string_at(one, nbytes) != ctypes.string_at(other, nbytes):
            ctypes.memset(verdicts + index, 1, 1)


def measure_pieces(parameters: tuple[bytes, ...]) -> None:
    """Does what the kernel `measurement.MEASURE_PIECES` does."""
    first, found = (int.from_bytes(parameter, "little") for parameter in parameters)
    table = np.ctypeslib.as_array((ctypes.c_uint64 * ((found - first) // 8)).from_address(first))
    dtypes = [jnp.dtype(name) for name in measurement.FORMATS]
    rows = []
    for one, other, count, number in table.reshape(-1, 4).tolist():
        dtype = dtypes[number]
        raw = [
            np.frombuffer(ctypes.string_at(a, count * dtype.itemsize), dtype) for a in (one, other)
        ]
        ours, theirs = (each.astype(np.float64) for each in raw)
        finite = np.isfinite(theirs)
        is_same = np.array_equal(ours[~finite], theirs[~finite], equal_nan=True)
        bits, other_bits = (each[finite].view(f"u{dtype.itemsize}") for each in raw)
        difference = np.max(np.abs(ours[finite] - theirs[finite]), initial=0.0)
        magnitude = np.max(np.abs(theirs[finite]), initial=0.0)
        flags = (not is_same) + 2 * (not np.array_equal(bits, other_bits))
        rows.append((difference, magnitude, flags))
    result = np.array(rows, measurement.FOUND).tobytes()
    ctypes.memmove(found, result, len(result))


def view_floats(address: int, count: int = SIZE) -> np.ndarray[Any, Any]:
    """Returns the bytes at an address as floats."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def floats(values: Any) -> np.ndarray[Any, Any]:
    """Returns a float32 array on the host."""
    return np.asarray(values, np.float32)


def kernel(symbol: str, reads: str, target: str) -> KernelNode:
    """Returns a launch of a kernel on whole buffers."""
    names = (*reads.split(), target)
    uses = tuple(BufferUse(name, 0, 4 * SIZE) for name in names)
    code = KernelCode(symbol, b"image of " + symbol.encode())
    return KernelNode(symbol, code, SHAPE, uses, (False,) * (len(uses) - 1) + (True,))


def make_cuda_replay(
    device: CudaDevice, definition: GraphDefinition, state: ArrayState = ArrayState.FRESH
) -> Replay:
    """Returns the definition on a device, with a pool of its own."""
    return Replay(definition, device, PrivatePool(new_pool_id(), device.allocator), state)


def place(values: Any, *, skip: int = 0, dtype: Any = np.float32) -> jax.Array:
    """Returns a plain array on a border of 256 bytes, or so many bytes behind one."""
    values = np.asarray(values, dtype)
    room = np.zeros(values.nbytes + 512, np.uint8)
    start = -room.ctypes.data % 256 + skip
    view = room[start : start + values.nbytes].view(dtype).reshape(values.shape)
    view[...] = values
    array = to_immutable(view, make_aval(values.shape, dtype), jax.devices("cpu")[0])
    assert not view.nbytes or array.unsafe_buffer_pointer() == view.ctypes.data
    return array
