"""Rename values: what only passes through the memory of an argument or a result gets its own.

Note [Passing values]
XLA uses the memory of a donated argument for temporaries, between the last step that reads the
argument and the one that writes the result in its place. So a gradient may lie where another leaf's
new value will be, and must be used before that is written: steps that have nothing to do with each
other are in order. A value that another one overwrites without having been read by it, and that
nothing needs afterwards, is a temporary like any other, and can be one of ours.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from tracegraph.lowering.device_program import DeviceProgram, DeviceStep, Step, list_uses
from tracegraph.lowering.request import BYTE, BufferSpec
from tracegraph.runtime.definition.nodes import BufferUse


def rename_passing_values(program: DeviceProgram, limit_bytes: int) -> DeviceProgram:
    """Returns the program with passing values in buffers of their own.

    Args:
        program: steps in an order that gives the right result.
        limit_bytes: larger values stay where they are.
    """
    fixed = {spec.buffer.name for spec in (*program.inputs, *program.outputs)}
    users: defaultdict[str, list[int]] = defaultdict(list)
    for index, step in enumerate(program.steps):
        for buffer in {use.buffer for use in list_uses(step)} & fixed:
            users[buffer].append(index)
    steps, buffers = list(program.steps), list(program.buffers)
    for name, indices in users.items():
        # From the end: what a small value overwrites is free when that one has gone.
        for place, first in reversed(list(enumerate(indices))):
            for value in dict.fromkeys(steps[first].writes):
                if value.buffer != name or not 0 < value.nbytes <= limit_bytes:
                    continue
                holders = _find_holders(value, indices[place:], steps)
                if not holders:
                    continue
                new = f"{name}.passing.{first}.{value.offset}"
                buffers.append(BufferSpec(new, (value.nbytes,), BYTE))
                for index in holders:
                    steps[index] = _move(steps[index], value, new)
    return dataclasses.replace(program, buffers=tuple(buffers), steps=tuple(steps))


def _find_holders(value: BufferUse, indices: Sequence[int], steps: Sequence[Step]) -> list[int]:
    """Returns the step that writes a value and those that read it; none unless it passes.

    Args:
        value: what the first of the steps writes.
        indices: of the steps that touch its buffer, from the one that writes it on.
        steps: of the program.
    """
    writer, *others = indices
    if not _is_within(steps[writer], value) or _overlaps(steps[writer].reads, value):
        return []
    holders = [writer]
    for index in others:
        step = steps[index]
        if _overlaps(step.writes, value):
            is_covered = any(use.contains(value) for use in step.writes)
            return holders if is_covered and not _overlaps(step.reads, value) else []
        if _overlaps(step.reads, value):
            if not _is_within(step, value):
                return []
            holders.append(index)
    return []


def _is_within(step: Step, value: BufferUse) -> bool:
    """True for a node of the device that touches nothing else of the value's buffer."""
    uses = [use for use in list_uses(step) if use.buffer == value.buffer]
    return isinstance(step, DeviceStep) and all(value.contains(use) for use in uses)


def _overlaps(uses: Sequence[BufferUse], value: BufferUse) -> bool:
    return any(use.overlaps(value) for use in uses)


def _move(step: Step, value: BufferUse, new: str) -> Step:
    assert isinstance(step, DeviceStep)

    def relocate(use: BufferUse) -> BufferUse:
        if use.buffer != value.buffer:
            return use
        return BufferUse(new, use.offset - value.offset, use.nbytes)

    return step.move(relocate)
