"""Checking mode of the host device: vary what the declared order leaves open, poison what is dead.

A CUDA graph runs its nodes in any order that its edges allow, and a private pool reuses memory as
soon as a lifetime ends. A missing wait or a stale read therefore shows on a GPU once in a while.
In checking mode each launch picks another order that the edges allow, memory that no later node may
read is overwritten with ``0xFF`` bytes (NaN, -1, True), and so a wrong order gives a wrong result
on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from tracegraph.runtime.definition.graph import GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import Node
from tracegraph.runtime.host.buffer import HostBuffer
from tracegraph.runtime.host.graph import Detours, bind_stage
from tracegraph.runtime.host.owned_buffer import OwnedBuffer

POISON = 0xFF


class CheckingGraph:
    """Like HostGraph, but launches in a random allowed order and poisons dead buffers.

    Args:
        definition: the whole capture.
        stage_index: which of its stages this graph is.
        buffers: every buffer of the arena, by name.
        seed: of the orders; the same seed gives the same sequence of orders.
    """

    handles = None

    def __init__(
        self,
        definition: GraphDefinition,
        stage_index: int,
        buffers: Mapping[str, HostBuffer | OwnedBuffer],
        seed: int = 0,
    ) -> None:
        stage = definition.stages[stage_index]
        self._stage = stage
        self._random = random.Random(seed)
        # Everything goes through the arena, where a stale read shows.
        self._launches = bind_stage(stage, buffers, Detours())
        scratch = find_scratch(definition)
        later = _names_used(definition.stages[stage_index + 1 :])
        self._mortal = {
            name: buffers[name] for name in scratch if name not in later and buffers[name].nbytes
        }
        # Results as well: those of the last replay would pass for those of this one.
        self._poisoned_first = [
            buffers[slot.name]
            for slot in definition.slots
            if stage_index == 0 and slot.name not in definition.inputs
        ]

    def launch(self) -> None:
        """Runs every node once, in an order that the edges allow."""
        for buffer in self._poisoned_first:
            buffer.fill_bytes(POISON)
        order = draw_order(len(self._launches), self._stage.edges, self._random)
        for position, index in enumerate(order):
            self._launches[index]()
            self._poison_dead(order, position)

    def _poison_dead(self, order: Sequence[int], position: int) -> None:
        nodes = self._stage.nodes
        still_used = _names_used_by(nodes[index] for index in order[position + 1 :])
        node = nodes[order[position]]
        for name in {*node.arguments, *node.results} - still_used:
            if name in self._mortal:
                self._mortal[name].fill_bytes(POISON)


def draw_order(count: int, edges: Sequence[tuple[int, int]], generator: random.Random) -> list[int]:
    """Returns a random topological order of ``count`` nodes."""
    waits = [0] * count
    for _, second in edges:
        waits[second] += 1
    ready = [index for index in range(count) if waits[index] == 0]
    order = []
    while ready:
        index = ready.pop(generator.randrange(len(ready)))
        order.append(index)
        for first, second in edges:
            if first != index:
                continue
            waits[second] -= 1
            if waits[second] == 0:
                ready.append(second)
    return order


def find_scratch(definition: GraphDefinition) -> list[str]:
    """Returns the buffers that hold nothing before a replay and nothing that is read after it."""
    kept = {*definition.inputs, *definition.outputs}
    return [slot.name for slot in definition.slots if slot.name not in kept]


def _names_used(stages: Sequence[Stage]) -> set[str]:
    return {name for stage in stages for name in _names_used_by(stage.nodes)}


def _names_used_by(nodes: Iterable[Node]) -> set[str]:
    return {name for node in nodes for name in (*node.arguments, *node.results)}
