"""Arrays of JAX with undefined contents: memory of JAX's own that our work writes.

A compiled program allocates them, one per shape, dtype and count: it runs nothing on the GPU.

Note [Unscheduled]. More than half of the time of such a compilation went to XLA's model of what
collectives cost, by which it schedules: 31 ms, and 13 without, for a described H200. These programs
have nothing to schedule.

Note [Small arenas]. To compile that program takes XLA 8 ms or more, for which a capture would
wait: the size of its scratch is known last of all. On a machine with an H200, 8 MB are copied from
the host in 2 ms, 24 in 5, 64 in 11, and so a small part of an arena is: its scratch, and its kept
part while the program for it is still being compiled. The copy waits for JAX's work so far, as a
capture does anyway. The first results of a graph that was not compiled in this process are made so,
too, when it is instantiated: 64 graphs of a file have 64 shapes of results. No other allocation may
wait.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

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
# See Note [Small arenas].
SMALL_BYTES = 32 << 20
SMALL_RESULTS_BYTES = 8 << 20
# See Note [Unscheduled].
OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": False}


def _make_allocator(shapes: Types, jax_device: Any) -> Any:
    """Returns the result of `_compile_allocator`; waits while another thread compiles it."""
    once = _Once(_compile_allocator, shapes, jax_device)
    return _allocators.setdefault((shapes, jax_device), once).find()


class _Once:
    """The result of a call that is made when it is first asked for, and again if it failed.

    Attributes:
        is_running: True while a thread makes the call.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = functools.partial(function, *arguments)
        # Re-entrant: a finaliser may run inside of the call.
        self._lock = threading.RLock()
        self._result: Any = None
        self.is_running = False

    def find(self) -> Any:
        with self._lock:
            if self._result is None:
                self.is_running = True
                try:
                    self._result = self._call()
                finally:
                    self.is_running = False
            return self._result


_allocators: dict[Any, _Once] = {}


def _compile_allocator(shapes: Types, jax_device: Any) -> Any:
    """Returns a compiled function that returns fresh arrays with undefined contents."""
    return _compile_lowered(_lower_allocator(shapes, jax_device))


def _compile_lowered(lowered: jax.stages.Lowered) -> Any:
    return lowered.compile(compiler_options=dict(OPTIONS))


def _lower_allocator(shapes: Types, jax_device: Any) -> jax.stages.Lowered:
    def allocate() -> tuple[Any, ...]:
        return tuple(jnp.empty(shape, dtype) for shape, dtype in shapes)

    # On the default device arrays are uncommitted, as the results of `jax.jit`.
    sharding = None if is_default_device(jax_device) else find_sharding(jax_device)
    with computing(), jax.default_device(jax_device), jax.enable_x64(True):
        return jax.jit(allocate, out_shardings=sharding).lower()


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
    """Returns what `allocate_arrays` does, by copies; see Note [Small arenas].

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


def lower_segment(nbytes: int, jax_device: Any) -> Callable[[], None]:
    """Lowers the program of `allocate_bytes`; returns what compiles it, for any thread.

    Args:
        nbytes: how many.
        jax_device: the GPU.
    """
    key = _name_bytes(nbytes), jax_device
    once = _allocators.get(key) or _Once(_compile_lowered, _lower_allocator(*key))
    return functools.partial(_compile_segment, key, once)


def _compile_segment(key: Any, once: _Once) -> None:
    # What fails, fails again where it is needed, and says so there.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _allocators.setdefault(key, once).find()


def prepare_segments(sizes: Iterable[int], jax_device: Any) -> None:
    """Prepares one `allocate_bytes` of each size, in threads of their own where it takes long.

    Args:
        sizes: in bytes.
        jax_device: the GPU.
    """
    for nbytes in sizes:
        if not prepare_bytes(nbytes, jax_device):
            arguments = _name_bytes(nbytes), jax_device
            # Python starts no thread once the main one has ended; then it is done when needed.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=prepare_together, args=arguments).start()


def prepare_bytes(nbytes: int, jax_device: Any) -> bool:
    """Prepares the next two `allocate_bytes` of a small size; see Note [Small arenas].

    Both parts of an arena may have it. Where there is a program for the size, that is taken.

    Returns:
        False for a size that is not small: that needs `prepare_together`.
    """
    if (_name_bytes(nbytes), jax_device) in _allocators:
        return True
    if nbytes > SMALL_BYTES:
        return False
    _to_copy[nbytes, jax_device] = 2
    return True


def allocate_bytes(nbytes: int, jax_device: Any) -> Any:
    """Returns a plain array of undefined bytes in memory of XLA's own.

    Args:
        nbytes: how many.
        jax_device: the GPU.

    Raises:
        jax.errors.JaxRuntimeError: JAX's allocator cannot grow by that much.
    """
    left = _to_copy.pop((nbytes, jax_device), 0)
    if left > 1:
        _to_copy[nbytes, jax_device] = left - 1
    if not left and not _is_late(nbytes, jax_device):
        (array,) = _allocate(_name_bytes(nbytes), jax_device)
        return array
    host = np.empty(nbytes, np.uint8)
    with computing():
        return jax.block_until_ready(jax.device_put(host, jax_device, may_alias=False))


def _is_late(nbytes: int, jax_device: Any) -> bool:
    """True where the program for a small size is still being compiled; see Note [Small arenas]."""
    once = _allocators.get((_name_bytes(nbytes), jax_device))
    return once is not None and once.is_running and nbytes <= SMALL_BYTES


def _name_types(avals: Iterable[Any]) -> Types:
    return tuple((aval.shape, aval.dtype) for aval in avals)


def _name_bytes(nbytes: int) -> Types:
    """Returns the shapes of the program that allocates so many bytes."""
    return (((nbytes,), np.dtype(np.uint8)),)


# By size and GPU, how many times more.
_to_copy: dict[tuple[int, Any], int] = {}


def _make_weak(array: Any) -> Any:
    """Returns the same memory as an array of weak type."""
    aval = array.aval.update(weak_type=True)
    return ArrayImpl(aval, array.sharding, [array], committed=array.committed)
