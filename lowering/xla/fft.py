"""Fourier transforms: from XLA's ``fft`` thunk to calls of cuFFT and cuBLAS.

XLA makes a plan for a batch of transforms of contiguous arrays. Two things it does beside cuFFT
become steps of their own. An inverse transform is scaled by a call of cuBLAS, in pieces where there
are more elements than that counts. A transform to real numbers reads a copy of its source, because
cuFFT may use the source as workspace.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.xla.allocations import check_dense
from tracegraph.lowering.xla.allow_list import check_listed
from tracegraph.lowering.xla.enums import read_name, read_value
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.scope import Scope
from tracegraph.runtime.definition.library_calls import Scale, Transform
from tracegraph.runtime.definition.library_nodes import LibraryCallNode
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode

# cuFFT's letters by XLA's types and element types; JAX's name of the target's dtype.
FORMS = {
    ("FFT", "C64", "C64"): ("C2C", "complex64"),
    ("FFT", "C128", "C128"): ("Z2Z", "complex128"),
    ("IFFT", "C64", "C64"): ("C2C", "complex64"),
    ("IFFT", "C128", "C128"): ("Z2Z", "complex128"),
    ("RFFT", "F32", "C64"): ("R2C", "complex64"),
    ("RFFT", "F64", "C128"): ("D2Z", "complex128"),
    ("IRFFT", "C64", "F32"): ("C2R", "float32"),
    ("IRFFT", "C128", "F64"): ("Z2D", "float64"),
}
IS_INVERSE = {"FFT": False, "RFFT": False, "IFFT": True, "IRFFT": True}
ITEM_BYTES = {"F32": 4, "F64": 8, "C64": 8, "C128": 16}
MAX_RANK = 3
# cuBLAS counts elements in 32 bits.
MAX_SCALED = 2**31 - 1
MAX_BATCH = 2**31 - 1


def decode_fft(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the steps of an ``xla.gpu.FftThunkProto``: none for an empty batch.

    Args:
        message: with listed fields only.
        name: of the instruction that it computes.
        scope: what it refers to.

    Raises:
        Refusal: a type or a shape that cuFFT is not called with, or the device has no plan for it.
    """
    transform, dtype = _read_transform(message)
    source = scope.find_use(message.input_buffer)
    target = scope.find_use(message.output_buffer)
    _check_bytes(message.input_shape, source)
    _check_bytes(message.output_shape, target)
    if source.overlaps(target):
        raise Refusal("transforms in place: XLA asks cuFFT for plans with two places only")
    if not target.nbytes:
        return []
    steps: list[DeviceStep] = []
    if "source" in transform.written:
        copied = scope.add_temporary(source.nbytes)
        node = CopyNode(f"{name}@copy", source, copied)
        steps.append(DeviceStep(node, reads=(source,), writes=(copied,)))
        source = copied
    steps.append(_make_transform(name, transform, source, target, scope))
    if transform.is_inverse:
        steps += _scale(f"{name}@scale", dtype, transform, target, scope)
    return steps


def _make_transform(
    name: str, transform: Transform, source: BufferUse, target: BufferUse, scope: Scope
) -> DeviceStep:
    operands = {"source": source, "target": target} | scope.add_workspace(transform)
    node = LibraryCallNode(name, transform, tuple(operands.items()))
    return DeviceStep(node, reads=(source,), writes=node.written)


def _read_transform(message: Any) -> tuple[Transform, str]:
    """Returns the transform, and JAX's name of its result's dtype."""
    source, target = message.input_shape, message.output_shape
    for shape, what in ((source, "an operand"), (target, "a result")):
        check_listed(shape)
        check_dense(shape, what)
    kind = read_name(message, "fft_type")
    types = tuple(read_name(shape, "element_type") for shape in (source, target))
    if (kind, *types) not in FORMS:
        raise Refusal(f"is {kind} of {types[0]} to {types[1]}, for which cuFFT has no plan")
    lengths = tuple(message.fft_length)
    rank = len(lengths)
    if not 1 <= rank <= min(MAX_RANK, len(source.dimensions)) or min(lengths) < 1:
        raise Refusal(f"transforms along {rank} axes of lengths {lengths}: one to three are known")
    outer, lasts = [], []
    for shape in (source, target):
        dimensions = tuple(shape.dimensions)
        outer.append(dimensions[:-rank])
        lasts.append(dimensions[-rank:])
    half = (*lengths[:-1], lengths[-1] // 2 + 1)
    wanted = (half if kind == "IRFFT" else lengths, half if kind == "RFFT" else lengths)
    if (lasts[0], lasts[1]) != wanted or outer[0] != outer[1]:
        raise Refusal(f"is {kind} of lengths {lengths} from {lasts[0]} to {lasts[1]}")
    batch_count = math.prod(outer[0])
    if batch_count > MAX_BATCH:
        raise Refusal(f"is a batch of {batch_count} transforms: cuFFT counts them in 32 bits")
    form, dtype = FORMS[kind, types[0], types[1]]
    is_inverse = read_value(message, "fft_type", IS_INVERSE)
    return Transform(form, is_inverse, lengths, lasts[0], lasts[1], batch_count), dtype


def _check_bytes(shape: Any, use: BufferUse) -> None:
    wanted = math.prod(shape.dimensions) * ITEM_BYTES[read_name(shape, "element_type")]
    if use.nbytes != wanted:
        raise Refusal(f"has an array of {wanted} bytes in {use.nbytes}")


def _scale(
    name: str, dtype: str, transform: Transform, target: BufferUse, scope: Scope
) -> list[DeviceStep]:
    """Returns the steps that divide a result by its count of points, as XLA does: by a factor."""
    real = np.finfo(dtype).dtype.type
    factor = float(real(1) / real(transform.target_size))
    item_bytes = np.dtype(dtype).itemsize
    count = target.nbytes // item_bytes
    steps = []
    for start in range(0, count, MAX_SCALED):
        length = min(MAX_SCALED, count - start)
        piece = BufferUse(target.buffer, target.offset + start * item_bytes, length * item_bytes)
        scale = Scale(dtype, length, factor)
        operands = {"target": piece} | scope.add_workspace(scale)
        node = LibraryCallNode(name, scale, tuple(operands.items()))
        steps.append(DeviceStep(node, reads=(piece,), writes=node.written))
    return steps
