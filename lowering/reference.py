"""The reference: the regions of a capture run by XLA, on arrays of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from tracegraph.lowering.compiled_region import CompiledRegion
from tracegraph.runtime.definition.packing import is_packable
from tracegraph.runtime.jax_interop import uncommit


def run_regions(regions: Sequence[CompiledRegion], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the executables that a graph was made from, in program order.

    Args:
        regions: in program order.
        inputs: an array for every static input of the request, by name. They are used up.

    Returns:
        All values by name: the inputs that are left and what the regions define.
    """
    values = dict(inputs)
    for number, region in enumerate(regions):
        later = {name for other in regions[number + 1 :] for name in other.inputs}
        arguments = [_release(values[name]) for name in region.inputs]
        for index in range(region.in_place):
            if region.inputs[index] in later:
                arguments[index] = jnp.copy(arguments[index])
        results = region.executable(*arguments)
        results = results if len(region.outputs) != 1 else (results,)
        values |= zip(region.outputs, results, strict=True)
    return values


def _release(array: Any) -> Any:
    """Returns an array that JAX passes to an executable whatever it thinks of its layout.

    JAX 0.10 compares the layout of arrays that are committed to their device, and those of elements
    of less than a byte never have the one that it has compiled for.
    """
    return uncommit(array) if is_packable(array.dtype) and array.committed else array
