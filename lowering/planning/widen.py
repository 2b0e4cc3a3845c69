"""Widen: an order of the steps in which more of them may run side by side.

Note [Levels]
XLA's serial order is one for a device that runs a step at a time: a buffer may take the bytes of
another as soon as the steps that use it are over *in that order*. In a graph each such reuse is an
edge, often from a step that no other waits for to one on the longest chain, and makes the chain
longer. So the steps are put into levels: a step is in a later level than all that it depends
on. Buffers share bytes only if the uses of one lie in earlier levels than those of the other. Then
no edge of reuse goes within a level, and the graph's longest chain is no longer than the number of
levels.

More steps side by side need more memory at once, so a step is in the first level in which it is
*due*: the longest chain of what is left begins with it, or XLA has it ahead of such a step. A step
after which no more bytes are alive than before is always due. So what `jax.checkpoint` computes
again waits until its layer's turn comes, beside the layer behind it; as early as possible, all
layers' would be kept at once. A step that does not fit into the budget waits for a later level; if
nothing fits, the step that comes first in XLA's order runs alone.

A level ends when its longest step does, but a step of the longest chain would not wait for the
others, if it did not write where they read. So bytes rest for a level, if there is room for that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tracegraph.lowering.device_program import DeviceProgram, ExecutableCall
from tracegraph.lowering.planning.byte_edges import find_edges, lay_apart
from tracegraph.lowering.planning.memory_plan import align

# Every step of a level is declared to come after every step of the level before.
MAX_WIDTH = 32


class Wide(NamedTuple):
    """A program in levels, see Note [Levels].

    Attributes:
        roomy: bytes rest for a level before others take them.
        dense: each level is ordered after the one before.
    """

    roomy: DeviceProgram
    dense: DeviceProgram


def widen(program: DeviceProgram, budget_bytes: int) -> Wide:
    """Returns the program with its steps in levels, in both orders.

    Args:
        program: steps in an order that gives the right result; one that calls regions is returned
            as it is.
        budget_bytes: what all buffers may take at one time, where that is possible.
    """
    if any(isinstance(step, ExecutableCall) for step in program.steps):
        return Wide(program, program)
    # What the values need, when no two buffers share bytes.
    needed = find_edges(program.steps, lay_apart(program.buffers))
    levels = _fill_levels(program, needed, budget_bytes)
    order = [index for level in levels for index in level]
    position = {index: number for number, index in enumerate(order)}
    steps = tuple(program.steps[index] for index in order)

    def declare(edges: Iterable[tuple[int, int]]) -> DeviceProgram:
        moved = sorted((position[first], position[second]) for first, second in edges)
        return dataclasses.replace(program, steps=steps, edges=tuple(moved))

    roomy = declare({*needed, *_join(levels, levels[2:])})
    return Wide(roomy, declare(_join(levels, levels[1:])))


def _join(
    levels: Iterable[Sequence[int]], later: Iterable[Sequence[int]]
) -> Iterator[tuple[int, int]]:
    for before, after in zip(levels, later, strict=False):
        yield from itertools.product(before, after)


def _fill_levels(
    program: DeviceProgram, edges: Sequence[tuple[int, int]], budget_bytes: int
) -> list[list[int]]:
    """Returns the steps of each level."""
    count = len(program.steps)
    followers: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for first, second in edges:
        followers[first].append(second)
        missing[second] += 1
    # Steps of the longest chain that begins with each.
    rest = [1] * count
    for index in reversed(range(count)):
        rest[index] += max((rest[each] for each in followers[index]), default=0)
    ready = {index for index in range(count) if not missing[index]}
    memory, reached = _Memory(program), -1
    levels: list[list[int]] = []
    while ready:
        listed = sorted(ready, key=lambda index: (-rest[index], index))
        longest = rest[listed[0]]
        wanted = [
            index
            for index in listed
            if rest[index] == longest or index < reached or memory.find_growth(index) <= 0
        ]
        level = _pick_level(wanted, memory, budget_bytes)
        if not level:
            level.append(min(ready))
            memory.take(level[0])
        levels.append(level)
        memory.release(level)
        reached = max([reached, *(index for index in level if rest[index] == longest)])
        ready.difference_update(level)
        for follower in (each for index in level for each in followers[index]):
            missing[follower] -= 1
            if not missing[follower]:
                ready.add(follower)
    return levels


def _pick_level(wanted: Sequence[int], memory: _Memory, budget_bytes: int) -> list[int]:
    level: list[int] = []
    for index in wanted:
        if len(level) < MAX_WIDTH and memory.find_need(index) <= budget_bytes:
            memory.take(index)
            level.append(index)
    return level


class _Memory:
    """The bytes that are alive while levels are filled."""

    def __init__(self, program: DeviceProgram) -> None:
        inputs = {spec.buffer.name for spec in program.inputs}
        sizes = {buffer.name: align(buffer.nbytes) for buffer in program.buffers}
        fixed = {b.name for b in program.buffers if b.name in inputs or b.content is not None}
        self._live_bytes = sum(sizes[name] for name in fixed)
        self._unborn = {name: size for name, size in sizes.items() if name not in fixed}
        self._sizes = dict(self._unborn)
        self._names = [
            {use.buffer for use in (*step.reads, *step.writes)} - fixed for step in program.steps
        ]
        self._uses_left = Counter(name for names in self._names for name in names)
        # A result is read after the last step.
        self._uses_left.update(spec.buffer.name for spec in program.outputs)

    def find_need(self, index: int) -> int:
        """Returns the bytes that are alive when a step joins the level that is being filled."""
        unborn = self._unborn
        return self._live_bytes + sum([unborn.get(name, 0) for name in self._names[index]])

    def find_growth(self, index: int) -> int:
        """Returns how many more bytes are alive behind a step, if it runs now, than before it."""
        names, left, sizes = self._names[index], self._uses_left, self._sizes
        born = sum([self._unborn.get(name, 0) for name in names])
        return born - sum([sizes[name] for name in names if left[name] == 1])

    def take(self, index: int) -> None:
        """Makes a step part of the level that is being filled."""
        self._live_bytes = self.find_need(index)
        for name in self._names[index]:
            self._unborn.pop(name, None)

    def release(self, level: Sequence[int]) -> None:
        """Ends the level that is being filled: what only its steps still used is dead."""
        for name in (name for index in level for name in self._names[index]):
            self._uses_left[name] -= 1
            if not self._uses_left[name]:
                self._live_bytes -= self._sizes[name]
