"""Limit the workspace that a program's matmuls hold to what they need.

Note [Workspaces of matmuls]
XLA gives each matmul of cublasLt a workspace of up to 32 MB, all at the same place. Most algorithms
need none, and a matmul with a workspace cannot run beside another one at that place. So cublasLt is
asked what the algorithm that XLA chose needs, and only that is planned. Where it cannot be asked,
what ``CUBLAS_WORKSPACE_CONFIG`` does not permit is still never used, and nothing is planned for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from tracegraph.lowering.device_program import ConditionalStep, DeviceStep, GraphStep
from tracegraph.lowering.xla.program import XlaProgram
from tracegraph.runtime.definition.library_nodes import MatmulNode
from tracegraph.runtime.definition.nodes import BufferUse

# Returns what a matmul needs; None where nothing says it.
FindBytes: TypeAlias = Callable[[MatmulNode], int | None]


def limit_workspaces(
    program: XlaProgram, find_bytes: FindBytes, permitted_bytes: int | None
) -> XlaProgram:
    """Returns the program with each workspace cut down, see Note [Workspaces of matmuls].

    Args:
        program: over XLA's allocations, which keep their sizes.
        find_bytes: see `FindBytes`.
        permitted_bytes: the most that a matmul may use of which that is not known; None for no
            limit.
    """

    def limit(step: GraphStep) -> GraphStep:
        if isinstance(step, ConditionalStep):
            bodies = tuple(tuple(map(limit, body)) for body in step.bodies)
            return dataclasses.replace(step, bodies=bodies)
        if not isinstance(step.node, MatmulNode):
            return step
        needed_bytes = find_bytes(step.node)
        limit_bytes = permitted_bytes if needed_bytes is None else needed_bytes
        return _limit_step(step, step.node, limit_bytes)

    return dataclasses.replace(program, steps=tuple(map(limit, program.steps)))


def _limit_step(step: DeviceStep, matmul: MatmulNode, limit_bytes: int | None) -> DeviceStep:
    workspace = dict(matmul.operands).get("workspace")
    if workspace is None or limit_bytes is None or workspace.nbytes <= limit_bytes:
        return step
    limited = workspace._replace(nbytes=limit_bytes)

    def relocate(use: BufferUse) -> BufferUse:
        return limited if use == workspace else use

    return step.move(relocate)
