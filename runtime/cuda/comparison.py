"""Comparing device memory bit for bit, and copying arrays; nothing is compiled for it.

Note [Kernels that compare]. XLA takes 20 ms or more to compile even a trivial program, and one per
shape. A comparison at capture must be cheap for any shapes, so that the ranges are compared by a
kernel that knows bytes only, and measured by one that knows formats of floats. They are kept as
PTX, which every driver translates for its GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.cuda.driver.calls import KernelLaunch
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader, LoadedKernel
from tracegraph.runtime.cuda.measurement import FORMATS, FOUND, MEASURE_PIECES, join_pieces
from tracegraph.runtime.cuda.memory.jax_arrays import allocate_together, is_prepared
from tracegraph.runtime.definition.nodes import KernelCode, LaunchShape
from tracegraph.runtime.definition.packing import (
    PACKED_BITS,
    count_packed_bytes,
    is_packable,
    unpack,
)
from tracegraph.runtime.device import FloatDifference
from tracegraph.runtime.jax_interop import ArrayImpl

_get_pointer = ArrayImpl.unsafe_buffer_pointer
THREADS = 256
# What one block of threads compares; a row of the table names it by two addresses and a size.
PIECE_BYTES = 256 << 10

# Each block of threads compares the piece of its number, and writes 1 to the byte of that number
# where it finds a difference.
COMPARE_PIECES = KernelCode(
    "compare_pieces",
    b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry compare_pieces(.param .u64 pieces, .param .u64 verdicts)
{
    .reg .pred %is_end, %is_unequal;
    .reg .b16  %a, %b;
    .reg .b32  %block, %thread, %threads;
    .reg .b64  %row, %one, %other, %nbytes, %index, %step, %verdict, %from_one, %from_other;

    mov.u32       %block, %ctaid.x;
    mov.u32       %thread, %tid.x;
    mov.u32       %threads, %ntid.x;
    ld.param.u64  %row, [pieces];
    mad.wide.u32  %row, %block, 24, %row;
    ld.global.u64 %one, [%row];
    ld.global.u64 %other, [%row+8];
    ld.global.u64 %nbytes, [%row+16];
    cvt.u64.u32   %index, %thread;
    cvt.u64.u32   %step, %threads;
NEXT:
    setp.ge.u64   %is_end, %index, %nbytes;
    @%is_end bra  END;
    add.u64       %from_one, %one, %index;
    add.u64       %from_other, %other, %index;
    ld.global.u8  %a, [%from_one];
    ld.global.u8  %b, [%from_other];
    add.u64       %index, %index, %step;
    setp.ne.u16   %is_unequal, %a, %b;
    @!%is_unequal bra NEXT;
    ld.param.u64  %verdict, [verdicts];
    cvt.u64.u32   %index, %block;
    add.u64       %verdict, %verdict, %index;
    mov.u16       %a, 1;
    st.global.u8  [%verdict], %a;
END:
    ret;
}
\0""",
)


class CudaComparison:
    """Copies and compares arrays in one GPU's memory.

    Args:
        context: of the GPU.
        kernels: of the same.
    """

    def __init__(self, context: CudaContext, kernels: KernelLoader) -> None:
        self._context, self._kernels = context, kernels

    def preload(self) -> None:
        """Loads its kernels, see `KernelLoader.keep`."""
        self._kernels.keep((COMPARE_PIECES, MEASURE_PIECES))

    def find_unequal(self, pairs: Sequence[tuple[int, int, int]]) -> list[int]:
        """Returns which pairs differ in any bit; the host waits once.

        Args:
            pairs: two addresses and a number of bytes each.
        """
        pieces, owners = _cut_pieces(pairs)
        if not owners.size:
            return []
        verdicts = self._run(self._compare, pieces, owners.size)
        return np.unique(owners[verdicts != 0]).tolist()

    def measures(self, dtype: np.dtype[Any]) -> bool:
        """True for the floats that `measure_floats` takes."""
        return dtype.name in FORMATS

    def measure_floats(
        self, pairs: Sequence[tuple[int, int, int, np.dtype[Any]]]
    ) -> list[FloatDifference]:
        """Returns how far each pair is apart; the host waits once.

        Args:
            pairs: two addresses, a number of elements, not 0, and their dtype.
        """
        if not pairs:
            return []
        pieces, owners = _cut_pieces([(a, b, n * dtype.itemsize) for a, b, n, dtype in pairs])
        sizes = np.asarray([dtype.itemsize for *_, dtype in pairs], np.uint64)
        formats = np.asarray([FORMATS[dtype.name] for *_, dtype in pairs], np.uint64)
        pieces[:, 2] //= sizes[owners]
        rows = np.column_stack((pieces, formats[owners]))
        found = self._run(self._measure, rows, owners.size * FOUND.itemsize)
        return join_pieces(found.view(FOUND), owners)

    def read_range(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        """Returns a copy on the host of an array at a device address, after all work so far."""
        order = self._context.order
        content = np.empty(count_packed_bytes(shape, dtype), np.uint8)
        with order.use_context():
            if content.nbytes:
                order.driver.copy_async(content.ctypes.data, address, content.nbytes, order.stream)
            order.synchronize()
        return unpack(content, shape, dtype)

    def copy_arrays(self, arrays: Sequence[jax.Array], *, is_rotated: bool) -> list[jax.Array]:
        """Returns private copies of plain arrays on the device.

        Args:
            arrays: plain arrays on it.
            is_rotated: exchange the two halves of each: other inputs with the same values in them,
                so that indices stay in range and floats stay finite.
        """
        copies = self._allocate_copies(arrays)
        is_empty = bool(copies)
        if not copies:
            copies = jax.block_until_ready(jax.device_put(list(arrays), may_alias=False))
        moves: list[tuple[int, int, int]] = []
        for array, other in zip(arrays, copies, strict=True):
            source, target = _get_pointer(array), _get_pointer(other)
            split, rest = _halve(array)
            if is_rotated and split:
                moves += [(target, source + split, rest), (target + rest, source, split)]
            elif is_empty and split + rest:
                moves.append((target, source, split + rest))
        order = self._context.order
        copy, stream = order.driver.copy_async, order.stream
        with order.use_context():
            for move in moves:
                copy(*move, stream)
        return copies

    def _allocate_copies(self, arrays: Sequence[jax.Array]) -> list[Any]:
        """Returns arrays of the same types without contents; none where no program is prepared.

        To copy an array by JAX takes 0.1 ms, however small: 13 ms for a step of ResNet-18.
        """
        avals, jax_device = [array.aval for array in arrays], self._context.jax_device
        return allocate_together(avals, jax_device) if is_prepared(avals, jax_device) else []

    def _run(
        self, kernel: LoadedKernel, table: np.ndarray[Any, Any], nbytes: int
    ) -> np.ndarray[Any, Any]:
        """Returns the bytes that a kernel writes, one block of threads per row of its table."""
        # What it writes follows the table, all 0.
        host = np.pad(table.view(np.uint8).ravel(), (0, nbytes))
        both = jax.block_until_ready(jax.device_put(host, self._context.jax_device))
        first = _get_pointer(both)
        parameters = (first, first + table.nbytes)
        launch = KernelLaunch(
            kernel.function,
            LaunchShape((len(table), 1, 1), (THREADS, 1, 1)),
            tuple(address.to_bytes(8, "little") for address in parameters),
        )
        with self._context.order.use_context():
            self._context.driver.launch_kernel(launch, self._context.order.stream)
        return self.read_range(parameters[1], (nbytes,), np.dtype(np.uint8))

    # Both are held for as long as this object: unloading a kernel waits for the whole GPU.
    @functools.cached_property
    def _compare(self) -> LoadedKernel:
        return self._kernels.load(COMPARE_PIECES, LaunchShape((1, 1, 1), (THREADS, 1, 1)))

    @functools.cached_property
    def _measure(self) -> LoadedKernel:
        return self._kernels.load(MEASURE_PIECES, LaunchShape((1, 1, 1), (THREADS, 1, 1)))


def _halve(array: jax.Array) -> tuple[int, int]:
    """Returns the bytes of the two halves of an array; of a packed one those of whole bytes."""
    if is_packable(array.dtype):
        nbytes = array.size * PACKED_BITS[array.dtype.name] // 8
        split = nbytes // 2
    else:
        nbytes = array.nbytes
        split = array.size // 2 * array.dtype.itemsize
    return split, nbytes - split


def _cut_pieces(
    pairs: Sequence[tuple[int, int, int]],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns one row per piece, two addresses and a size, and the index of each one's pair."""
    ranges = np.asarray(pairs, np.uint64).reshape(-1, 3)
    counts = -(-ranges[:, 2].astype(np.int64) // PIECE_BYTES)
    owners = np.repeat(np.arange(len(ranges)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = ((np.arange(owners.size) - firsts) * PIECE_BYTES).astype(np.uint64)
    pieces = ranges[owners]
    pieces[:, :2] += offsets[:, None]
    pieces[:, 2] = np.minimum(pieces[:, 2] - offsets, PIECE_BYTES)
    return pieces, owners
