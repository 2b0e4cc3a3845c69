"""Lent inputs: large arguments that can be read where they are have no memory of the graph's own.

Note [Lent inputs]
A replay points kernels at an argument where it is, and never touches the room that the arena has
for it: the weights of a model would be in memory twice. So a large input that only kernels read
has a place behind the end of the arena, where no memory is; the place keeps its bytes apart from
all others. A call that can't be pointed at its argument (an array of NumPy, one at an address that
is not aligned) gets memory for it then, which stays. What else reads an input cannot be pointed
elsewhere: most libraries, bodies of loops and branches, eager parts. Matmuls and calls of cuDNN
can, with few exceptions, for which the device gets memory when it builds the graph: Note [Moved
libraries] in `runtime/cuda/graphs/library_moves.py`. Blocks of `tg.graph`
keep all inputs in their arena, since their graphs may be exported with its addresses.
"""

from __future__ import annotations

import dataclasses

from tracegraph.lowering.device_program import DeviceProgram, DeviceStep
from tracegraph.lowering.request import BufferSpec, CaptureRequest, Role
from tracegraph.runtime.definition.library_nodes import CudnnNode, MatmulNode
from tracegraph.runtime.definition.nodes import KernelNode

# From here on a device points any number of nodes at an argument.
SMALLEST_BYTES = 1 << 20
MOVABLE = (KernelNode, MatmulNode, CudnnNode)


def lend_arguments(request: CaptureRequest) -> CaptureRequest:
    """Returns a request whose arguments may be read in the caller's memory."""
    inputs = tuple(
        dataclasses.replace(each, may_be_lent=each.role is Role.COPIED) for each in request.inputs
    )
    return dataclasses.replace(request, inputs=inputs)


def is_lendable(buffer: BufferSpec) -> bool:
    """True for an argument of a size and type that a call may have read where it is."""
    return not buffer.is_packed and buffer.nbytes >= SMALLEST_BYTES


def find_lent(program: DeviceProgram) -> frozenset[str]:
    """Returns the names of the inputs that need no memory, see Note [Lent inputs]."""
    found = {
        spec.buffer.name
        for spec in program.inputs
        if spec.may_be_lent and spec.is_kept and is_lendable(spec.buffer)
    }
    found -= {spec.buffer.name for spec in program.outputs}
    for step in program.steps if found else ():
        found -= {use.buffer for use in step.writes}
        if not (isinstance(step, DeviceStep) and isinstance(step.node, MOVABLE)):
            found -= {use.buffer for use in step.reads}
    return frozenset(found)
