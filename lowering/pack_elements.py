"""Pack elements: on a GPU, arguments and results of less than a byte per element lie as in JAX.

On the host every element has a byte: there arrays pass through NumPy, which knows nothing smaller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tracegraph.lowering.request import BufferSpec, CaptureRequest
from tracegraph.runtime.definition.packing import is_packable
from tracegraph.runtime.errors import UnsupportedError

# XLA computes with a byte for each of these, and JAX's arrays have a bit.
REFUSED = ("int1", "uint1")


def pack_elements(request: CaptureRequest) -> CaptureRequest:
    """Returns the request with the buffers marked whose elements share bytes.

    Args:
        request: what to capture, for a GPU.

    Raises:
        UnsupportedError: an argument or a result is of a dtype that JAX itself cannot compute with.
    """
    specs = list(_list_specs(request))
    # A model has hundreds of arrays of a few dtypes, whose names NumPy computes each time.
    dtypes = {spec.dtype for spec in specs}
    refused = {dtype for dtype in dtypes if dtype.name in REFUSED}
    for spec in specs if refused else ():
        if spec.dtype in refused:
            raise _make_bit_error(spec, request)
    if not any(map(is_packable, dtypes)):
        return request
    regions = tuple(
        dataclasses.replace(
            region,
            inputs=tuple(map(_pack_spec, region.inputs)),
            outputs=tuple(map(_pack_spec, region.outputs)),
        )
        for region in request.regions
    )
    return dataclasses.replace(
        request,
        regions=regions,
        inputs=tuple(
            dataclasses.replace(spec, buffer=_pack_spec(spec.buffer)) for spec in request.inputs
        ),
        outputs=tuple(
            dataclasses.replace(spec, buffer=_pack_spec(spec.buffer)) for spec in request.outputs
        ),
    )


def _list_specs(request: CaptureRequest) -> Iterator[BufferSpec]:
    for region in request.regions:
        yield from region.inputs
        yield from region.outputs
    for spec in (*request.inputs, *request.outputs):
        yield spec.buffer


def _pack_spec(spec: BufferSpec) -> BufferSpec:
    return dataclasses.replace(spec, is_packed=True) if is_packable(spec.dtype) else spec


def _make_bit_error(spec: BufferSpec, request: CaptureRequest) -> UnsupportedError:
    return UnsupportedError(
        f"`{spec.name}` is {spec.dtype.name}{list(spec.shape)}, of one bit per element",
        where=f"argument or result of `{request.name}`",
        why="XLA has a byte for each, JAX eight in a byte: jax.jit refuses it, too",
        fix="convert it to bool or to int2 outside of the captured function",
        anchor="unsupported",
    )
