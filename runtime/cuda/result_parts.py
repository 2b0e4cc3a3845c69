"""First parts of results, copied out on the stream: arrays of their own, which nothing computes.

One program of XLA allocates all parts of a call, and one memcpy each fills them. A result whose
part was copied is dropped unread, so the next launch writes the same memory again, behind the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.arrays.array_parts import find_part_rows
from tracegraph.runtime.cuda.buffer import DeviceValue, DeviceView
from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.cuda.memory.jax_arrays import allocate_together
from tracegraph.runtime.cuda.results import Result, ResultMemory
from tracegraph.runtime.jax_interop import ArrayImpl, make_aval, to_row_major

_get_pointer = ArrayImpl.unsafe_buffer_pointer


def cut_arrays(
    context: CudaContext, arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]]
) -> list[Array]:
    """Returns the first part of each array.

    Args:
        context: of the GPU that the arrays are on.
        arrays: what a replay returned, or plain arrays.
        shapes: of the parts.
    """
    if context.held:
        context.held.poll()
    pairs = zip(arrays, shapes, strict=True)
    avals = [make_aval(n, a.dtype, weak_type=a.aval.weak_type) for a, n in pairs]
    raws = allocate_together(avals, context.jax_device)
    return [_cut(context, *each) for each in zip(arrays, avals, raws, strict=True)]


def _cut(context: CudaContext, array: Any, aval: Any, raw: Any) -> Array:
    rows = find_part_rows(aval.shape, array.shape, aval.dtype)
    assert rows is not None
    is_ours, address = type(array) is Array, _get_pointer(raw)
    lock = array.lock if is_ours else threading.RLock()
    with lock:
        memory = array.find_memory() if is_ours else array
        whole = _find_address(array.peek() if memory is None else memory, context)
        context.copy_part(address, whole, rows, is_cut=True)
    kind = ResultMemory("a part of a result", aval, rows.count * rows.nbytes, context, lock)
    return Array(Result(kind, (raw, address)), kind.clock.generation, ArrayState.FRESH)


def _find_address(value: Any, context: CudaContext) -> int:
    """Returns where a value is that the stream has written by the time it reads it."""
    if isinstance(value, DeviceValue | DeviceView):
        return value.address
    plain = to_row_major(value)
    context.order.await_array(plain)
    return _get_pointer(plain)
