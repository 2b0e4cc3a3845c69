"""The whole of lowering in one function: compile, plan, build."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from tracegraph.lowering.build_graph import build_graph
from tracegraph.lowering.collector import hold_collector
from tracegraph.lowering.compile import compile_request
from tracegraph.lowering.compiled_region import CompiledRegion
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.device_program import DeviceProgram, ExecutableCall
from tracegraph.lowering.planning.lifetimes import find_lifetimes
from tracegraph.lowering.planning.memory_plan import MemoryPlan, plan_memory
from tracegraph.lowering.planning.stream_order import verify_order
from tracegraph.lowering.request import CaptureRequest
from tracegraph.runtime.definition.collective_nodes import CollectiveNode, JointCollectiveNode
from tracegraph.runtime.definition.cudnn_calls import CompiledGraph, Direction
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.graph_nodes import Node, list_nested
from tracegraph.runtime.definition.library_nodes import CudnnNode, FfiCallNode
from tracegraph.runtime.late_import import import_late

if TYPE_CHECKING:
    from tracegraph.lowering.compile_gpu import CompiledForGpu

# Note [Late imports].
compile_for_gpu: Callable[[CaptureRequest, Compiler], CompiledForGpu] = import_late(
    "tracegraph.lowering.compile_gpu", "compile_for_gpu"
)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A capture request after lowering: everything is known, nothing is allocated.

    Attributes:
        program: the steps.
        plan: the places of its buffers.
        definition: nodes and edges over the planned arena.
        regions: the executables that the steps call, or were made from.
        results: how the regions name each flat result.
        takes_kernels: True when the steps were made from the kernels of the executables.
    """

    program: DeviceProgram
    plan: MemoryPlan
    definition: GraphDefinition
    regions: tuple[CompiledRegion, ...]
    results: tuple[str, ...]
    takes_kernels: bool = False

    @property
    def eager_regions(self) -> tuple[str, ...]:
        """Names of the regions that run eagerly between two graphs."""
        steps = (step for step in self.program.steps if isinstance(step, ExecutableCall))
        return tuple(step.name for step in steps if not step.is_captured)

    @property
    def inexact_causes(self) -> tuple[str, ...]:
        """What XLA leaves to chance: two runs on the same inputs may differ in the last bits."""
        sums = (f"float atomics in {n}" for region in self.regions for n in region.float_atomics)
        eager = (f"library calls in {name}" for name in self.eager_regions if self.takes_kernels)
        nodes = [node for stage in self.definition.stages for node in list_nested(stage.nodes)]
        targets = (node.call.target for node in nodes if isinstance(node, FfiCallNode))
        handlers = (f"the handler {target}" for target in dict.fromkeys(targets))
        calls = (f"cuDNN in {n.name}" for n in nodes if isinstance(n, CudnnNode) and _may_add(n))
        orders = (f"the order of sums in {n.name}" for n in nodes if _adds_in_own_order(n))
        return (*sums, *eager, *handlers, *dict.fromkeys(calls), *orders)


def _may_add(node: CudnnNode) -> bool:
    """True for the calls of cuDNN that have engines which add in an order left to chance."""
    call = node.call
    return isinstance(call, CompiledGraph) or call.direction is not Direction.FORWARD


def _adds_in_own_order(node: Node) -> bool:
    """True for a sum of more than two devices: in another order than in XLA's program."""
    joint = node.members if isinstance(node, JointCollectiveNode) else ()
    members = (node,) if isinstance(node, CollectiveNode) else joint
    exchanges = [member.exchange for member in members]
    return any(each.reduction and len(each.groups[0]) > 2 for each in exchanges)


def lower_request(request: CaptureRequest, compiler: Compiler) -> Lowered:
    """Compiles, plans and builds a request.

    It takes memory of the device only to try out handlers of `jax.ffi`, and frees it again.

    Args:
        request: what to capture.
        compiler: for the device. A region stays one compiled call where the device takes no
            kernels; else it is taken apart into them.

    Raises:
        jax.errors.JaxRuntimeError: XLA cannot compile a region.
        UnsupportedError: XLA's program for a region holds steps that this version cannot lower.
        CaptureError: the streams leave two steps that touch the same bytes unordered.
    """
    results = tuple(output.buffer.name for output in request.outputs)
    if compiler.target.takes_kernels:
        compiled = compile_for_gpu(request, compiler)
        definition = hold_collector(build_graph)(
            compiled.program, compiled.plan, has_two_lanes=compiler.tuning.has_two_lanes
        )
        return Lowered(
            compiled.program,
            compiled.plan,
            definition,
            compiled.regions,
            results,
            takes_kernels=True,
        )
    program, regions = compile_request(request, compiler)
    verify_order(program)
    plan = plan_memory(request.name, find_lifetimes(program))
    return Lowered(program, plan, build_graph(program, plan), regions, results)
