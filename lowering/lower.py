"""The whole of lowering in one function: compile, plan, build."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from tracegraph.lowering.build_graph import build_graph
from tracegraph.lowering.compile import compile_request
from tracegraph.lowering.compile_gpu import CompiledRegion, compile_for_gpu
from tracegraph.lowering.device_program import DeviceProgram
from tracegraph.lowering.lifetimes import find_lifetimes
from tracegraph.lowering.memory_plan import MemoryPlan, plan_memory
from tracegraph.lowering.request import CaptureRequest
from tracegraph.runtime.graph import GraphDefinition


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A capture request after lowering: everything is known, nothing is allocated.

    Attributes:
        program: the steps.
        plan: the places of its buffers.
        definition: nodes and edges over the planned arena.
        regions: for a GPU, the executables that the steps were made from.
    """

    program: DeviceProgram
    plan: MemoryPlan
    definition: GraphDefinition
    regions: tuple[CompiledRegion, ...] = ()


def lower_request(
    request: CaptureRequest,
    jax_device: Any,
    *,
    on_region: Callable[[str], None],
    updates_in_place: bool = False,
    target: Literal["host", "gpu"] = "host",
) -> Lowered:
    """Compiles, plans and builds a request; touches no memory of the device.

    Args:
        request: what to capture.
        jax_device: the device to compile for.
        on_region: called with a region's name before it is compiled.
        updates_in_place: True when the device gives XLA memory that it may overwrite (host only: a
            GPU graph always may).
        target: ``host`` keeps a region one compiled call; ``gpu`` takes it apart into its kernels.

    Raises:
        jax.errors.JaxRuntimeError: XLA cannot compile a region.
        UnsupportedError: XLA's program for a region holds steps that this version cannot lower.
        CaptureError: the streams leave two steps that touch the same bytes unordered.
    """
    if target == "gpu":
        compiled = compile_for_gpu(request, jax_device, on_region=on_region)
        definition = build_graph(compiled.program, compiled.plan)
        return Lowered(compiled.program, compiled.plan, definition, compiled.regions)
    program = compile_request(
        request, jax_device, on_region=on_region, updates_in_place=updates_in_place
    )
    plan = plan_memory(request.name, find_lifetimes(program))
    return Lowered(program, plan, build_graph(program, plan))
