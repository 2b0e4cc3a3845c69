"""Arrays of JAX with undefined contents: memory of JAX's own that our work writes.

A compiled program allocates them, one per shape, dtype and count: it runs nothing on the GPU.

Note [Unscheduled]. More than half of the time of such a compilation went to XLA's model of what
collectives cost, by which it schedules: 31 ms, and 13 without, for a described H200. These programs
have nothing to schedule.

Note [Arenas]. To compile that program takes XLA 8 ms or more, and the size of an arena is known
last of all. So an arena is a copy of as many undefined bytes, which the driver allocates and frees
again: that compiles nothing. On an H200 it takes 0.7 to 2 ms for 4 to 512 MiB, the program 12 to
19. It waits for all work of the GPU, as a capture does anyway and no other allocation may. More
than 512 MiB are not taken from others on the GPU, not even for so long: there, and where the driver
has too little, the program is compiled.

Note [First results]. The first results of a graph that was not compiled in this process are copied
from the host when it is instantiated: 64 graphs of a file have 64 shapes of results. 8 MB take 2 to
9 ms.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.cuda.memory.lent_memory import LentMemory
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.jax_interop import (
    ArrayImpl,
    computing,
    find_sharding,
    is_default_device,
    to_immutable,
)

# Shape and dtype of each array.
Types: TypeAlias = tuple[tuple[tuple[int, ...], Any], ...]

_is_ready = ArrayImpl.is_ready
# See Note [Arenas], and Note [First results].
MOST_COPIED_BYTES = 512 << 20
SMALL_RESULTS_BYTES = 8 << 20
# See Note [Unscheduled].
OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": False}


def _make_allocator(shapes: Types, jax_device: Any) -> Any:
    """Returns the result of `_compile_allocator`; waits while another thread compiles it."""
    once = _Once(_compile_allocator, shapes, jax_device)
    return _allocators.setdefault((shapes, jax_device), once).find()


class _Once:
    """The result of a call that is made when it is first asked for, and again if it failed."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = functools.partial(function, *arguments)
        # Re-entrant: a finaliser may run inside of the call.
        self._lock = threading.RLock()
        self._result: Any = None

    def find(self) -> Any:
        with self._lock:
            if self._result is None:
                self._result = self._call()
            return self._result


_allocators: dict[Any, _Once] = {}


def _compile_allocator(shapes: Types, jax_device: Any) -> Any:
    """Returns a compiled function that returns fresh arrays with undefined contents."""

    def allocate() -> tuple[Any, ...]:
        return tuple(jnp.empty(shape, dtype) for shape, dtype in shapes)

    # On the default device arrays are uncommitted, as the results of `jax.jit`.
    sharding = None if is_default_device(jax_device) else find_sharding(jax_device)
    with computing(), jax.default_device(jax_device), jax.enable_x64(True):
        lowered = jax.jit(allocate, out_shardings=sharding).lower()
        return lowered.compile(compiler_options=dict(OPTIONS))


def allocate_arrays(
    shape: tuple[int, ...], dtype: Any, weak_type: bool, jax_device: Any, count: int
) -> list[Any]:
    """Returns plain arrays in memory of XLA's own, with undefined contents.

    Args:
        shape: of each.
        dtype: of each.
        weak_type: whether they adopt the dtype of what they meet.
        jax_device: the GPU.
        count: how many; several at once cost little more than one.

    Raises:
        jax.errors.JaxRuntimeError: JAX's allocator cannot grow by that much.
    """
    arrays = _allocate(((shape, dtype),) * count, jax_device)
    return [_make_weak(array) for array in arrays] if weak_type else arrays


def allocate_together(avals: Sequence[Any], jax_device: Any) -> list[Any]:
    """Returns arrays as `allocate_arrays` does, of several types by one program.

    Args:
        avals: JAX's abstract value of each.
        jax_device: the GPU.

    Raises:
        jax.errors.JaxRuntimeError: JAX's allocator cannot grow by that much.
    """
    arrays = _allocate(_name_types(avals), jax_device)
    pairs = zip(arrays, avals, strict=True)
    return [_make_weak(array) if aval.weak_type else array for array, aval in pairs]


def prepare_together(types: Types, jax_device: Any) -> None:
    """Compiles beforehand what allocates arrays: JAX takes 8 ms or more for it, once.

    In any thread; what allocates them in another one waits for it.

    Args:
        types: of the arrays.
        jax_device: the GPU.
    """
    _make_allocator(types, jax_device)


def is_prepared(avals: Sequence[Any], jax_device: Any) -> bool:
    """True where there is a program for what `allocate_together` is asked for."""
    return (_name_types(avals), jax_device) in _allocators


def _allocate(shapes: Types, jax_device: Any) -> list[Any]:
    with computing():
        arrays = list(_make_allocator(shapes, jax_device)())
    for array in arrays:
        # Without memory: Note [Arrays that were never made].
        if _is_ready(array):
            array.block_until_ready()
    return arrays


def make_first_arrays(aval: Any, jax_device: Any, count: int) -> list[Any]:
    """Returns what `allocate_arrays` does, by copies; see Note [First results].

    Args:
        aval: JAX's abstract value of each.
        jax_device: the GPU.
        count: how many.

    Returns:
        The arrays, or none: if they are large, if a program for them is compiled, or without
        memory, which is an error only of what needs them.
    """
    key = ((aval.shape, aval.dtype),) * count, jax_device
    nbytes = count * math.prod(aval.shape) * aval.dtype.itemsize
    if key in _allocators or not 0 < nbytes <= SMALL_RESULTS_BYTES:
        return []
    # One each: a host device takes them as they are.
    hosts = [np.empty(aval.shape, aval.dtype) for _ in range(count)]
    try:
        return jax.block_until_ready([to_immutable(each, aval, jax_device) for each in hosts])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return []


def allocate_bytes(nbytes: int, jax_device: Any, order: JaxOrder | None = None) -> Any:
    """Returns a plain array of undefined bytes in memory of XLA's own, see Note [Arenas].

    Args:
        nbytes: how many.
        jax_device: the GPU.
        order: of its streams, where it may wait for the work of the GPU.

    Raises:
        jax.errors.JaxRuntimeError: JAX's allocator cannot grow by that much.
    """
    copied = None if order is None else _copy_undefined(nbytes, jax_device, order)
    if copied is not None:
        return copied
    (array,) = _allocate((((nbytes,), np.dtype(np.uint8)),), jax_device)
    return array


def _copy_undefined(nbytes: int, jax_device: Any, order: JaxOrder) -> Any:
    """Returns a copy of memory of the driver's; None for a large one, or where there is none."""
    if nbytes > MOST_COPIED_BYTES:
        return None
    try:
        with order.use_context(), _hold_memory(order.driver, nbytes) as address, computing():
            source = jax.dlpack.from_dlpack(LentMemory(address, nbytes, jax_device))
            return jax.block_until_ready(jax.device_put(source, jax_device, may_alias=False))
    except OutOfMemoryError:
        return None


@contextlib.contextmanager
def _hold_memory(driver: CudaDriver, nbytes: int) -> Iterator[int]:
    address = driver.allocate_memory(nbytes)
    try:
        yield address
    finally:
        driver.free_memory(address)


def _name_types(avals: Iterable[Any]) -> Types:
    return tuple((aval.shape, aval.dtype) for aval in avals)


def _make_weak(array: Any) -> Any:
    """Returns the same memory as an array of weak type."""
    aval = array.aval.update(weak_type=True)
    return ArrayImpl(aval, array.sharding, [array], committed=array.committed)
