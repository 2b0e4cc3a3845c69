"""Machine code for our own kernels: Note [Kernels inside of XLA's program]."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tracegraph.lowering.device_program import ConditionalStep, GraphStep
from tracegraph.lowering.kernels.collectives import write_collective
from tracegraph.lowering.kernels.own_kernel import OPTIONS, read_listing
from tracegraph.runtime.definition.code_target import CompileKernel
from tracegraph.runtime.definition.collective_nodes import CollectiveNode
from tracegraph.runtime.definition.nodes import KernelCode, KernelNode


def compile_own_kernels(
    steps: Sequence[GraphStep], compile_kernel: CompileKernel
) -> tuple[GraphStep, ...]:
    """Returns the steps, with machine code in the place of the PTX of our own kernels.

    Args:
        steps: of a program, as XLA wrote it.
        compile_kernel: of the device.

    Raises:
        UnsupportedError: there is a kernel of ours, and no compiler.
    """
    return tuple(_compile_step(step, compile_kernel) for step in steps)


def _compile_step(step: GraphStep, compile_kernel: CompileKernel) -> GraphStep:
    if isinstance(step, ConditionalStep):
        bodies = tuple(compile_own_kernels(body, compile_kernel) for body in step.bodies)
        return dataclasses.replace(step, bodies=bodies)
    node = step.node
    if isinstance(node, CollectiveNode):
        exchange = write_collective(node.exchange)
        cubin = compile_kernel(exchange.source, OPTIONS).cubin
        code = KernelCode(exchange.symbol, cubin)
        return dataclasses.replace(
            step, node=dataclasses.replace(node, code=code, shape=exchange.shape)
        )
    if not isinstance(node, KernelNode):
        return step
    kernel = read_listing(node.code.cubin, node.code.symbol, node.shape)
    if kernel is None:
        return step
    cubin = compile_kernel(kernel.source, OPTIONS).cubin
    code = KernelCode(kernel.symbol, cubin, kernel.early)
    compiled = dataclasses.replace(node, code=code, begins_with_wait=True)
    return dataclasses.replace(step, node=compiled)
