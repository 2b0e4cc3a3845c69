"""Widen: an order of the steps in which more of them may run side by side.

Note [Levels]
XLA's serial order is one for a device that runs a step at a time: a buffer may take the bytes of
another as soon as the steps that use it are over *in that order*. In a graph each such reuse is an
edge, often from a step that no other waits for to one on the longest chain, and makes the chain
longer. So the steps are put into levels: a step is in a later level than all that it depends
on, and as early as the memory allows. Buffers share bytes only if the uses of one lie in earlier
levels than those of the other. Then no edge of reuse goes within a level, and the graph's longest
chain is no longer than the number of levels.

More steps side by side need more memory at once. A step that does not fit into the budget waits for
a later level; if nothing fits, the step that comes first in XLA's order runs alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

from tracegraph.lowering.device_program import DeviceProgram, ExecutableCall
from tracegraph.lowering.planning.byte_edges import find_edges, lay_apart
from tracegraph.lowering.planning.memory_plan import align

# Every step of a level is declared to come after every step of the level before.
MAX_WIDTH = 32


def widen(program: DeviceProgram, budget_bytes: int) -> DeviceProgram:
    """Returns the program with its steps in levels; each level is ordered after the one before.

    Args:
        program: steps in an order that gives the right result; one that calls regions is returned
            as it is.
        budget_bytes: what all buffers may take at one time, where that is possible.
    """
    if any(isinstance(step, ExecutableCall) for step in program.steps):
        return program
    # What the values need, when no two buffers share bytes.
    needed = find_edges(program.steps, lay_apart(program.buffers))
    levels = _fill_levels(program, needed, budget_bytes)
    order = [index for level in levels for index in level]
    position = {index: number for number, index in enumerate(order)}
    edges = [
        (position[first], position[second])
        for before, after in itertools.pairwise(levels)
        for first in before
        for second in after
    ]
    steps = tuple(program.steps[index] for index in order)
    return dataclasses.replace(program, steps=steps, edges=tuple(sorted(edges)))


def _fill_levels(
    program: DeviceProgram, edges: Sequence[tuple[int, int]], budget_bytes: int
) -> list[list[int]]:
    """Returns the steps of each level."""
    count = len(program.steps)
    followers: list[list[int]] = [[] for _ in range(count)]
    missing, depth = [0] * count, [0] * count
    # Sorted by their ends, so that a step's depth is final before its followers read it.
    for first, second in sorted(edges, key=lambda edge: edge[1]):
        followers[first].append(second)
        missing[second] += 1
        depth[second] = max(depth[second], depth[first] + 1)
    ready = [(depth[index], index) for index in range(count) if not missing[index]]
    memory = _Memory(program)
    levels: list[list[int]] = []
    while ready:
        ready.sort()
        level = _pick_level([index for _, index in ready], memory, budget_bytes)
        levels.append(level)
        memory.release(level)
        followed = [second for first in level for second in followers[first]]
        for second in followed:
            missing[second] -= 1
        picked = {*level}
        ready = [each for each in ready if each[1] not in picked]
        ready += [(depth[each], each) for each in dict.fromkeys(followed) if not missing[each]]
    return levels


def _pick_level(ready: Sequence[int], memory: _Memory, budget_bytes: int) -> list[int]:
    level: list[int] = []
    for index in ready:
        if len(level) < MAX_WIDTH and memory.find_need(index) <= budget_bytes:
            memory.take(index)
            level.append(index)
    if not level:
        level.append(min(ready))
        memory.take(level[0])
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
