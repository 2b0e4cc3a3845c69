"""Arrays of several devices, added up on one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.communication.buffers import (
    DEFAULT_BYTES,
    check_buffer_size,
    join_buffers,
    plan_buffers,
    split_buffers,
)
from tracegraph.communication.operands import (
    CopyOperand,
    check_alike,
    describe_type,
    list_items,
    make_argument_error,
    read_arrays,
)
from tracegraph.runtime.default_device import find_jax_device


def reduce_add(inputs: Iterable[Any], destination: Any = None) -> jax.Array:
    """Adds arrays up on one device, in their order.

    Args:
        inputs: arrays of one shape and dtype, on any devices.
        destination: a JAX device, the index of one, or None for the current one.

    Returns:
        The sum, of the shape and dtype of each.

    Raises:
        ConfigError: an argument is no list of arrays that are alike, or no device.
        CaptureError: a function is being traced.

    Example:
        >>> print(tg.comm.reduce_add([jnp.ones(3), jnp.arange(3.0)]))
        [1. 2. 3.]
    """
    arrays = read_arrays(inputs, "inputs", "reduce_add")
    _check_numbers({f"inputs[{i}]": array for i, array in enumerate(arrays)}, "reduce_add")
    return _add_up(arrays, find_jax_device(destination, "destination"))


def reduce_add_coalesced(
    inputs: Iterable[Iterable[Any]], destination: Any = None, buffer_size: int = DEFAULT_BYTES
) -> tuple[jax.Array, ...]:
    """Adds lists of arrays up on one device, small ones of one dtype joined in buffers.

    Args:
        inputs: one list per device, as the gradients of each; the lists have the same shapes and
            dtypes in the same order.
        destination: a JAX device, the index of one, or None for the current one.
        buffer_size: most bytes of a buffer of more than one array.

    Returns:
        The sums, in the order of each list.

    Raises:
        ConfigError: the lists are not alike, or another argument is wrong.
        CaptureError: a function is being traced.

    Example:
        >>> first, second = [jnp.ones(2), jnp.ones(1)], [jnp.ones(2), jnp.zeros(1)]
        >>> [x.tolist() for x in tg.comm.reduce_add_coalesced([first, second])]
        [[2.0, 2.0], [1.0]]
    """
    call = "reduce_add_coalesced"
    found = enumerate(list_items(inputs, "inputs", call))
    sources = [read_arrays(each, f"inputs[{i}]", call) for i, each in found]
    _check_lengths(sources, call)
    for index, arrays in enumerate(zip(*sources, strict=True)):
        _check_numbers({f"inputs[{i}][{index}]": each for i, each in enumerate(arrays)}, call)
    target = find_jax_device(destination, "destination")
    buffers = plan_buffers(sources, check_buffer_size(buffer_size, call))
    joined = [join_buffers(arrays, buffers) for arrays in sources]
    sums = [_add_up(each, target) for each in zip(*joined, strict=True)]
    return split_buffers(sums, sources[0], buffers)


def _add_up(arrays: Sequence[CopyOperand], device: Any) -> jax.Array:
    # One at a time: the destination holds the sum and one more.
    total = jax.device_put(arrays[0], device)
    for array in arrays[1:]:
        total = total + jax.device_put(array, device)
    return total


def _check_lengths(sources: Sequence[Sequence[CopyOperand]], call: str) -> None:
    for index, arrays in enumerate(sources):
        if len(arrays) == len(sources[0]):
            continue
        raise make_argument_error(
            f"`inputs[{index}]` has {len(arrays)} arrays, and `inputs[0]` has {len(sources[0])}",
            f"argument `inputs` of {call}()",
            "the first arrays of all lists are added up, then the second ones, and so on",
            "pass lists of one length",
        )


def _check_numbers(arrays: Mapping[str, CopyOperand], call: str) -> None:
    check_alike(arrays, call)
    name, first = next(iter(arrays.items()))
    dtype = describe_type(first)[1]
    if not isinstance(dtype, np.dtype):
        raise make_argument_error(
            f"`{name}` is of dtype {dtype}",
            f"argument `{name}` of {call}()",
            "typed keys cannot be added",
            "pass arrays of numbers",
        )
