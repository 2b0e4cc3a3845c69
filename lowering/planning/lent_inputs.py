"""Lent inputs: large arguments that only kernels read have no memory of the graph's own.

Note [Lent inputs]
A replay points kernels at an argument where it is, and never touches the room that the arena has
for it: the weights of a model would be in memory twice. So a large input that only kernels read
has a place behind the end of the arena, where no memory is; the place keeps its bytes apart from
all others. A call that can't be pointed at its argument (an array of NumPy, one at an address that
is not aligned) gets memory for it then, which stays. What else reads an input cannot be pointed
elsewhere: libraries' own graphs, bodies of loops and branches, eager parts. Blocks of `tg.graph`
keep all inputs in their arena, since their graphs may be exported with its addresses.
"""

from __future__ import annotations

import dataclasses

from tracegraph.lowering.device_program import DeviceProgram, DeviceStep, Step
from tracegraph.lowering.request import CaptureRequest, Role
from tracegraph.runtime.nodes import KernelNode

# From here on a device points any number of nodes at an argument.
SMALLEST_BYTES = 1 << 20


def lend_arguments(request: CaptureRequest) -> CaptureRequest:
    """Returns a request whose arguments may be read in the caller's memory."""
    inputs = tuple(
        dataclasses.replace(each, may_be_lent=each.role is Role.COPIED) for each in request.inputs
    )
    return dataclasses.replace(request, inputs=inputs)


def find_lent(program: DeviceProgram) -> frozenset[str]:
    """Returns the names of the inputs that need no memory, see Note [Lent inputs]."""
    found = {
        spec.buffer.name
        for spec in program.inputs
        if spec.may_be_lent and spec.is_kept and not spec.buffer.is_packed
        if spec.buffer.nbytes >= SMALLEST_BYTES
    }
    found -= {spec.buffer.name for spec in program.outputs}
    for step in program.steps if found else ():
        found -= {use.buffer for use in step.writes}
        if not _is_kernel(step):
            found -= {use.buffer for use in step.reads}
    return frozenset(found)


def _is_kernel(step: Step) -> bool:
    return isinstance(step, DeviceStep) and isinstance(step.node, KernelNode)
