"""Drop steps: a program without some of its steps, and without those that compute nothing.

Note [Unread steps]
XLA writes zeros into a stacked result before a loop fills it slice by slice. Once the loop is
unrolled, and each slice is a value of its own, nothing reads these zeros: the step goes, and with
it the memory that they would take.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection

from tracegraph.lowering.device_program import (
    Copy,
    DeviceProgram,
    DeviceStep,
    ExecutableCall,
    Step,
)
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode, KernelNode


def drop_unread(program: DeviceProgram) -> DeviceProgram:
    """Returns the program without the kernels, memcpys and memsets whose results nothing reads.

    Args:
        program: steps in an order that gives the right result.
    """
    kept = {spec.buffer.name for spec in (*program.inputs, *program.outputs)}
    readers: dict[str, set[int]] = defaultdict(set)
    for index, step in enumerate(program.steps):
        for use in step.reads:
            readers[use.buffer].add(index)
    gone: set[int] = set()
    count = -1
    # From the end, so that what only unread steps read is unread too; and again, since what an
    # unread step read may be written later.
    while len(gone) > count:
        count = len(gone)
        for index in reversed(range(len(program.steps))):
            step = program.steps[index]
            if index in gone or not _only_writes(step) or not step.writes:
                continue
            if any(use.buffer in kept or readers[use.buffer] - {index} for use in step.writes):
                continue
            gone.add(index)
            for use in step.reads:
                readers[use.buffer].discard(index)
    if not gone:
        return program
    found = drop_steps(program, gone)
    used = {use.buffer for step in found.steps for use in _list_ranges(step)} | kept
    before = {use.buffer for index in gone for use in _list_ranges(program.steps[index])}
    buffers = tuple(spec for spec in found.buffers if spec.name in used or spec.name not in before)
    return dataclasses.replace(found, buffers=buffers)


def _only_writes(step: Step) -> bool:
    """True for a step that does nothing but write; a call may do more."""
    is_node = isinstance(step, DeviceStep)
    return is_node and isinstance(step.node, KernelNode | CopyNode | FillNode)


def _list_ranges(step: Step) -> tuple[BufferUse, ...]:
    named = () if isinstance(step, ExecutableCall | Copy) else step.ranges
    return (*step.reads, *step.writes, *named)


def drop_steps(program: DeviceProgram, gone: Collection[int]) -> DeviceProgram:
    """Returns the program without some of its steps; what they ordered stays in order.

    Args:
        program: its edges lead from earlier steps to later ones.
        gone: indices of the steps.
    """
    before: dict[int, set[int]] = defaultdict(set)
    after: dict[int, set[int]] = defaultdict(set)
    for first, second in program.edges:
        before[second].add(first)
        after[first].add(second)
    for index in gone:
        for first in before[index]:
            after[first] = (after[first] | after[index]) - {index}
        for second in after[index]:
            before[second] = (before[second] | before[index]) - {index}
        before.pop(index)
        after.pop(index, None)
    dropped = set(gone)
    left = [index for index in range(len(program.steps)) if index not in dropped]
    number = {index: place for place, index in enumerate(left)}
    edges = {(number[first], number[second]) for first in left for second in after[first]}
    steps = tuple(program.steps[index] for index in left)
    return dataclasses.replace(program, steps=steps, edges=tuple(sorted(edges)))
