"""Waits: kernels of our own that begin with a wait, as those that XLA writes for newer GPUs do.

Note [Kernels that wait]
XLA's kernels begin with a wait where the GPU has one (compute capability 9.0 and later), so that a
graph may start them early: Note [Programmatic edges] in `lowering/build_graph.py`. A kernel of ours
between them would be started only when those before it have completed, which a turn of a loop pays
at its end and at each slice. So in a program with such kernels ours wait, too. Where XLA's do not,
the GPU may have no such instruction, and the text stays one that every GPU takes.

What sets a condition waits as well, although nothing starts it early: the driver compiles each
text, and so a program needs one of each of our kernels, and not two.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TypeVar

from tracegraph.lowering.device_program import (
    ConditionalStep,
    DeviceStep,
    Step,
    list_device_steps,
)
from tracegraph.lowering.kernels.loops.conditions import FIRST_LINES
from tracegraph.runtime.definition.nodes import KernelCode, KernelNode

StepT = TypeVar("StepT", bound=Step)

_WAITING_LINES = b".version 7.8\n.target sm_90\n"
_ENTRY = re.compile(rb"\.visible \.entry \w+\([^)]*\)\s*\{")


def add_waits(steps: Sequence[StepT]) -> tuple[StepT, ...]:
    """Returns the steps, those of our own kernels with a wait if XLA's kernels have one.

    See Note [Kernels that wait].

    Args:
        steps: of a program, in any order.
    """
    own = [step for step in steps if isinstance(step, DeviceStep | ConditionalStep)]
    if not any(_waits(step) for step in list_device_steps(own)):
        return tuple(steps)
    return tuple(_add_wait(step) for step in steps)


def _waits(step: DeviceStep) -> bool:
    return isinstance(step.node, KernelNode) and step.node.begins_with_wait


def _add_wait(step: StepT) -> StepT:
    if isinstance(step, ConditionalStep):
        bodies = tuple(tuple(_add_wait(each) for each in body) for body in step.bodies)
        return dataclasses.replace(step, bodies=bodies, setter=_add_wait(step.setter))
    if not isinstance(step, DeviceStep):
        return step
    node = step.node
    if not isinstance(node, KernelNode) or not node.code.cubin.startswith(FIRST_LINES):
        return step
    waiting = dataclasses.replace(node, code=write_wait(node.code), begins_with_wait=True)
    return dataclasses.replace(step, node=waiting)


@functools.lru_cache(maxsize=64)
def write_wait(code: KernelCode) -> KernelCode:
    """Returns a kernel of ours with a wait as its first instruction."""
    text = _WAITING_LINES + code.cubin.removeprefix(FIRST_LINES)
    return KernelCode(code.symbol, _ENTRY.sub(rb"\g<0>\n    griddepcontrol.wait;", text))
