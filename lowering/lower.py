"""The whole of lowering in one function: compile, plan, build."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tracegraph.lowering.build_graph import build_graph
from tracegraph.lowering.compile import compile_request
from tracegraph.lowering.device_program import DeviceProgram
from tracegraph.lowering.lifetimes import find_lifetimes
from tracegraph.lowering.memory_plan import MemoryPlan, plan_memory
from tracegraph.lowering.request import CaptureRequest
from tracegraph.runtime.graph import GraphDefinition


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A capture request after lowering: everything is known, nothing is allocated."""

    program: DeviceProgram
    plan: MemoryPlan
    definition: GraphDefinition


def lower_request(
    request: CaptureRequest,
    jax_device: Any,
    *,
    on_region: Callable[[str], None],
    updates_in_place: bool = False,
) -> Lowered:
    """Compiles, plans and builds a request; touches no memory of the device.

    Args:
        request: what to capture.
        jax_device: the device to compile for.
        on_region: called with a region's name before it is compiled.
        updates_in_place: True when the device gives XLA memory that it may overwrite.
    """
    program = compile_request(
        request, jax_device, on_region=on_region, updates_in_place=updates_in_place
    )
    plan = plan_memory(request.name, find_lifetimes(program))
    return Lowered(program, plan, build_graph(program, plan))
