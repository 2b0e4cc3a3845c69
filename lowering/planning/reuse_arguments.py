"""Reuse arguments: values lie in donated arguments that are read early and updated late.

Note [Idle arguments]
Between the last step that reads a donated argument and the first that writes its new value, other
values may lie in its memory, which is kept anyway. XLA does so. But a kernel that reads an argument
in one order and writes its new value in another cannot work in place: XLA copies such an argument,
mostly as the program's first step, and lays values where it was. The copy then takes memory for
nearly the whole program, while arguments that no step needs after their first reader stay idle: in
a train step of ResNet-18, 28 MB of copies beside 28 MB of idle arguments.

So where XLA copies a large argument, large arguments are left to their old and new values. Copies
of them move to the first step that needs the copy. Then the largest value at the step where the
most bytes are alive is laid into an argument that is idle meanwhile, until no such value fits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tracegraph.lowering.device_program import (
    DeviceProgram,
    DeviceStep,
    ExecutableCall,
    Step,
    index_users,
    list_uses,
    move_step,
)
from tracegraph.lowering.planning.lifetimes import Lifetime, find_lifetimes
from tracegraph.lowering.planning.memory_plan import align
from tracegraph.lowering.planning.split_temporaries import Part, Split, split_allocations
from tracegraph.lowering.planning.step_order import is_chain
from tracegraph.lowering.request import BYTE, BufferSpec
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode

# The share of all arguments that makes one of them, or a value, large.
LARGE_SHARE = 64


class _Gap(NamedTuple):
    """Steps between which an argument is idle: the first and the last, inclusive."""

    argument: str
    nbytes: int
    first: int
    last: int

    @property
    def size(self) -> tuple[int, int]:
        """By which the tightest gap is chosen."""
        return self.nbytes, self.last - self.first

    def holds(self, value: Lifetime) -> bool:
        """True where a value fits."""
        is_meanwhile = self.first <= value.first and value.last <= self.last
        return is_meanwhile and value.nbytes <= self.nbytes


def reuse_arguments(program: DeviceProgram) -> DeviceProgram:
    """Returns the program with other values in its large arguments, see Note [Idle arguments].

    Args:
        program: steps in an order that gives the right result; one whose steps do not follow one
            another, that calls regions, or that copies no large argument is returned as it is.
    """
    if not is_chain(len(program.steps), program.edges):
        return program
    if any(isinstance(step, ExecutableCall) for step in program.steps):
        return program
    least = sum(spec.buffer.nbytes for spec in program.inputs) // LARGE_SHARE
    large = _list_large(program, least)
    if all(_find_copied(step) not in large for step in program.steps):
        return program
    freed, updates = _free_arguments(program, large)
    found, most_bytes = _lay_values(*_delay_copies(freed, updates), least)
    before = _count_alive(_list_values(program), len(program.steps))
    return found if most_bytes < before.max() else program


def _list_large(program: DeviceProgram, least: int) -> frozenset[BufferUse]:
    """Returns the donated arguments of more bytes that a new value replaces."""
    updated = {spec.buffer.name for spec in program.outputs if spec.alias == spec.buffer.name}
    arguments = [spec.buffer for spec in program.inputs if spec.buffer.name in updated]
    return frozenset(
        BufferUse(spec.name, 0, spec.nbytes) for spec in arguments if spec.nbytes > least
    )


def _find_copied(step: Step) -> BufferUse | None:
    """Returns what a memcpy of XLA's program copies."""
    is_copy = isinstance(step, DeviceStep) and isinstance(step.node, CopyNode)
    return step.reads[0] if is_copy else None


def _free_arguments(
    program: DeviceProgram, large: frozenset[BufferUse]
) -> tuple[DeviceProgram, dict[BufferUse, int]]:
    """Returns the program with what else lies in arguments in temporaries.

    Returns:
        The program, and each of these arguments with the first step of its new value, behind which
        no step needs the old one.
    """
    steps, buffers = list(program.steps), list(program.buffers)
    users = index_users(steps)
    updates: dict[BufferUse, int] = {}
    for whole in sorted(large):
        indices = users[whole.buffer]
        split = _split_argument(whole, [steps[index] for index in indices])
        if split is None:
            continue
        held = dict(zip(indices, split.steps[1:], strict=True))
        old, new = split.steps[0][whole], split.results[whole]
        read = max((each for each in indices if old in held[each].values()), default=-1)
        written = min((each for each in indices if new in held[each].values()), default=-1)
        if read >= written:
            continue
        updates[whole] = written
        names = {
            part: f"{whole.buffer}.value.{part}"
            for part in range(len(split.parts))
            if part not in (old, new)
        }
        buffers += [BufferSpec(names[part], (split.parts[part].nbytes,), BYTE) for part in names]
        for index in indices:
            relocate = functools.partial(_relocate, held[index], split.parts, names)
            steps[index] = move_step(steps[index], relocate)
    return dataclasses.replace(program, buffers=tuple(buffers), steps=tuple(steps)), updates


def _split_argument(whole: BufferUse, steps: Sequence[Step]) -> Split | None:
    """Returns the values that lie in an argument one after another, its old value before them.

    None where a step names bytes that it neither reads nor writes.
    """
    filling = DeviceStep(FillNode(f"fill_{whole.buffer}", whole), (), (whole,))
    split = split_allocations([filling, *steps], {whole.buffer}, [whole])
    for step, held in zip(steps, split.steps[1:], strict=True):
        if any(use.buffer == whole.buffer and use not in held for use in list_uses(step)):
            return None
    return split


def _relocate(
    held: Mapping[BufferUse, int], parts: Sequence[Part], names: Mapping[int, str], use: BufferUse
) -> BufferUse:
    """Returns where a byte range of a step lies once the parts with names are buffers."""
    part = held.get(use, -1)
    if part not in names:
        return use
    return BufferUse(names[part], use.offset - parts[part].offset, use.nbytes)


def _delay_copies(
    program: DeviceProgram, updates: Mapping[BufferUse, int]
) -> tuple[DeviceProgram, dict[BufferUse, int]]:
    """Returns the program with copies of arguments right before the first steps that need them."""
    sizes = {spec.name: spec.nbytes for spec in program.buffers}
    kept = {spec.buffer.name for spec in (*program.inputs, *program.outputs)}
    users = index_users(program.steps)
    places = list(range(len(program.steps)))
    for index, step in enumerate(program.steps):
        source = _find_copied(step)
        if source is None or source not in updates:
            continue
        (target,) = step.writes
        is_whole = target == (target.buffer, 0, sizes[target.buffer])
        first, *others = users[target.buffer]
        if target.buffer not in kept and is_whole and first == index and others:
            # The old value may be updated in place before the new one is written.
            later = [each for each in users[source.buffer] if each > index]
            updating = [each for each in later if _writes(program.steps[each], source)]
            places[index] = min([others[0], *updating])
    order = sorted(range(len(places)), key=lambda index: (places[index], places[index] == index))
    position = {index: number for number, index in enumerate(order)}
    steps = tuple(program.steps[index] for index in order)
    moved = {whole: position[written] for whole, written in updates.items()}
    return dataclasses.replace(program, steps=steps), moved


def _lay_values(
    program: DeviceProgram, updates: Mapping[BufferUse, int], least: int
) -> tuple[DeviceProgram, int]:
    """Returns the program with large values in idle arguments, and the most bytes of the others."""
    users = index_users(program.steps)
    gaps: list[_Gap] = []
    for (name, _, nbytes), written in updates.items():
        read = max((each for each in users[name] if each < written), default=-1)
        gaps.append(_Gap(name, nbytes, read + 1, written - 1))
    values = _list_values(program)
    alive = _count_alive(values, len(program.steps))
    large = [each for each in values if each.nbytes > least]
    laid: dict[str, str] = {}
    while found := _find_fit(large, gaps, int(alive.argmax())):
        value, gap = found
        laid[value.name] = gap.argument
        alive[value.first : value.last + 1] -= align(value.nbytes)
        large.remove(value)
        gaps.remove(gap)
        gaps += [gap._replace(last=value.first - 1), gap._replace(first=value.last + 1)]

    def relocate(use: BufferUse) -> BufferUse:
        return use._replace(buffer=laid[use.buffer]) if use.buffer in laid else use

    steps = list(program.steps)
    for index in {index for name in laid for index in users[name]}:
        steps[index] = move_step(steps[index], relocate)
    buffers = tuple(spec for spec in program.buffers if spec.name not in laid)
    found_program = dataclasses.replace(program, buffers=buffers, steps=tuple(steps))
    return found_program, int(alive.max())


def _find_fit(
    large: Sequence[Lifetime], gaps: Sequence[_Gap], peak: int
) -> tuple[Lifetime, _Gap] | None:
    """Returns the largest value at a step for which an argument is idle, and the tightest gap."""
    there = [each for each in large if each.first <= peak <= each.last]
    fits = [(value, gap) for value in there for gap in gaps if gap.holds(value)]
    return min(fits, key=lambda fit: (-fit[0].nbytes, *fit[1].size), default=None)


def _list_values(program: DeviceProgram) -> list[Lifetime]:
    return [each for each in find_lifetimes(program) if not each.is_kept]


def _count_alive(values: Iterable[Lifetime], count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the bytes that are alive at each of so many steps."""
    changes = np.zeros(count + 1, np.int64)
    for each in values:
        changes[each.first] += align(each.nbytes)
        changes[each.last + 1] -= align(each.nbytes)
    return changes.cumsum()[:count]


def _writes(step: Step, whole: BufferUse) -> bool:
    return any(use.overlaps(whole) for use in step.writes)
