"""Limit the workspace that a program's matmuls hold to what the user permits.

XLA gives each matmul of cublasLt a workspace of a size of its own choice. What
``CUBLAS_WORKSPACE_CONFIG`` does not permit is never used, so nothing is planned for it.
"""

from __future__ import annotations

import dataclasses

from tracegraph.lowering.device_program import ConditionalStep, DeviceStep, GraphStep
from tracegraph.lowering.xla.program import XlaProgram
from tracegraph.runtime.library_nodes import MatmulNode
from tracegraph.runtime.nodes import BufferUse


def limit_workspaces(program: XlaProgram, permitted_bytes: int | None) -> XlaProgram:
    """Returns the program with each workspace cut down to the permitted size.

    Args:
        program: over XLA's allocations, which keep their sizes.
        permitted_bytes: the most that one matmul may use; None for no limit.
    """
    if permitted_bytes is None:
        return program
    steps = tuple(_limit_step(step, permitted_bytes) for step in program.steps)
    return dataclasses.replace(program, steps=steps)


def _limit_step(step: GraphStep, permitted_bytes: int) -> GraphStep:
    if isinstance(step, ConditionalStep):
        bodies = tuple(tuple(_limit_step(s, permitted_bytes) for s in b) for b in step.bodies)
        return dataclasses.replace(step, bodies=bodies)
    return _limit_node(step, permitted_bytes)


def _limit_node(step: DeviceStep, permitted_bytes: int) -> DeviceStep:
    if not isinstance(step.node, MatmulNode):
        return step
    workspace = dict(step.node.operands).get("workspace")
    if workspace is None or workspace.nbytes <= permitted_bytes:
        return step
    limited = workspace._replace(nbytes=permitted_bytes)

    def relocate(use: BufferUse) -> BufferUse:
        return limited if use == workspace else use

    return step.move(relocate)
