"""Detach results: a result that the graph could not write elsewhere gets memory of its own.

Note [Detached results]
A fresh result that the user still holds keeps its memory, and the next replay writes elsewhere: the
nodes that touch the result are given another address, half a microsecond each. Nodes of libraries
and those inside of branches and loops cannot be given one, and of many nodes it costs too much.
Then the replay would copy the old value away first, by a call of XLA: 47 microseconds on the host.
So such a result is computed in a temporary, and the graph's last step copies it to where the user
gets it: one node, which takes about a microsecond and can be given another address. Where XLA's
kernels wait it does, too, and starts early: Note [Kernels that wait].

A large result is not detached, unless the arguments and results are larger by far: it would take
its memory twice.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from tracegraph.lowering.device_program import (
    Copy,
    DeviceProgram,
    DeviceStep,
    ExecutableCall,
    Step,
    index_users,
    move_step,
)
from tracegraph.lowering.kernels.loops.conditions import COUNTER_BYTES
from tracegraph.lowering.kernels.loops.slices import MovingUse, copy_slice
from tracegraph.lowering.kernels.loops.waits import add_waits
from tracegraph.lowering.request import BufferSpec
from tracegraph.runtime.definition.event_nodes import EventNode
from tracegraph.runtime.definition.graph import MAX_PATCHED_NODES
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode, KernelNode

# So much more memory may always be taken, and this share of what the program keeps anyway.
DETACHED_BYTES, DETACHED_SHARE = 1 << 16, 64


def detach_results(program: DeviceProgram) -> DeviceProgram:
    """Returns the program with a temporary and a copy for each result that nodes cannot move with.

    Args:
        program: steps in an order that gives the right result; one that calls regions is returned
            as it is.
    """
    if any(isinstance(step, ExecutableCall) for step in program.steps):
        return program
    users = index_users(program.steps)
    counts = Counter(output.buffer.name for output in program.outputs)
    inputs = {spec.buffer.name for spec in program.inputs}
    kept = {spec.buffer for spec in (*program.inputs, *program.outputs)}
    limit = max(DETACHED_BYTES, sum(spec.nbytes for spec in kept) // DETACHED_SHARE)
    found = {
        name: dataclasses.replace(output.buffer, name=f"{name}.detached")
        for name, output in ((each.buffer.name, each) for each in program.outputs)
        if output.alias is None
        and not output.is_static
        and name not in inputs
        and 0 < output.buffer.nbytes <= limit
        # A value that is two results is copied for each of them anyway.
        and counts[name] == 1
        and not _can_be_patched([program.steps[each] for each in users[name]])
    }
    return _detach(program, found, users) if found else program


def _can_be_patched(users: Sequence[Step]) -> bool:
    return len(users) <= MAX_PATCHED_NODES and all(map(_is_patchable, users))


def _is_patchable(step: Step) -> bool:
    if isinstance(step, DeviceStep):
        # An event has no address.
        return isinstance(step.node, KernelNode | CopyNode | FillNode | EventNode)
    return isinstance(step, Copy)


def _detach(
    program: DeviceProgram, found: Mapping[str, BufferSpec], users: Mapping[str, Sequence[int]]
) -> DeviceProgram:
    def relocate(use: BufferUse) -> BufferUse:
        temporary = found.get(use.buffer)
        return use if temporary is None else BufferUse(temporary.name, use.offset, use.nbytes)

    steps = [move_step(step, relocate) for step in program.steps]
    edges = [*program.edges]
    for name, temporary in found.items():
        edges += [(user, len(steps)) for user in users[name]]
        whole = BufferUse(name, 0, temporary.nbytes)
        copy = _make_copy(f"copy_{name}", relocate(whole), whole)
        steps.append(dataclasses.replace(copy, stream=steps[users[name][-1]].stream))
    return dataclasses.replace(
        program,
        buffers=(*program.buffers, *found.values()),
        steps=add_waits(steps),
        edges=tuple(sorted(edges)),
    )


def _make_copy(name: str, source: BufferUse, target: BufferUse) -> DeviceStep | Copy:
    """Returns a kernel: it takes another address faster than a memcpy, and memory of any origin."""
    if source.nbytes < COUNTER_BYTES:
        return Copy(name, source, target)
    # The pieces do not move, so any four bytes do as a counter.
    counter = BufferUse(source.buffer, source.offset, COUNTER_BYTES)
    whole = MovingUse(source, source.nbytes, 0), MovingUse(target, target.nbytes, 0)
    return copy_slice(name, *whole, counter)
