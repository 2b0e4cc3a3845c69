"""Elements of less than a byte, as XLA compiles them for an H200: packed, as JAX has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.deviceless import building, pipeline
from tracegraph.lowering.lower import Lowered
from tracegraph.runtime.definition.packing import PACKED_BITS, pack


def lower(function: Callable[..., Any], device: Any, *arguments: Any) -> Lowered:
    request = pipeline.make_capture_request(function, arguments)
    lowered = pipeline.lower_for_gpu(request, device)
    building.check_built(lowered.definition)
    assert not building.find_faults(lowered.definition)
    return lowered


@pytest.mark.parametrize("name", PACKED_BITS)
def test_arguments_results_and_constants(name: str, h200: Any) -> None:
    dtype = np.dtype(getattr(jnp, name))
    table = (np.arange(9) % 3).astype(dtype)

    def run(x: Any, i: Any) -> Any:
        return x[::-1], (x.astype(jnp.float32) * 2).astype(dtype), jnp.asarray(table)[i]

    x = np.zeros(7, dtype)
    definition = lower(run, h200, x, np.zeros(3, np.int32)).definition
    slots = {slot.name: slot for slot in definition.slots}
    size = pack(x).nbytes
    assert slots[definition.inputs[0]].nbytes == size
    assert [slots[each].nbytes for each in definition.outputs] == [size, size, pack(x[:3]).nbytes]
    contents = [slot.content for slot in definition.slots if slot.content is not None]
    assert contents == [pack(table).tobytes()]


def test_axes_are_those_of_jax(h200: Any) -> None:
    definition = lower(lambda x: x.T, h200, np.zeros((3, 5), jnp.int4)).definition
    slots = {slot.name: slot for slot in definition.slots}
    assert [slots[each].nbytes for each in (*definition.inputs, *definition.outputs)] == [8, 8]
