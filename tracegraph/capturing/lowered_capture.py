"""LoweredCapture: a function lowered for one signature, before any memory is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from tracegraph.capturing.capture_stage import CaptureStage
from tracegraph.capturing.compiled_capture import CompiledCapture
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.lowering.collector import hold_collector
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.planning.memory_plan import MemoryPlan
from tracegraph.replaying.block_replay import BlockReplay
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.replaying.partial_graph import PartialGraph
from tracegraph.replaying.watched_graph import WatchedGraph
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.device import Device
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.outer_values import OuterValues
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.user_memory.live_plans import watch_plan


@dataclasses.dataclass(frozen=True)
class LoweredCapture(CaptureStage):
    """A function lowered for one signature: everything is known, nothing is allocated.

    Attributes:
        prepared: the call that it was lowered for.
        checked: the traced and optimised graph.
        lowered: device program, memory plan and graph definition.
        device: that it was lowered for.
        pool: that the memory of its graphs comes from.
        outer: what the function read from around it when it was traced.
    """

    prepared: PreparedCall = dataclasses.field(repr=False)
    checked: CheckedGraph = dataclasses.field(repr=False)
    lowered: Lowered
    device: Device
    pool: FunctionPool
    outer: OuterValues = dataclasses.field(default_factory=dict, repr=False)

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan."""
        return self.lowered.plan

    @property
    def pool_bytes(self) -> int:
        """Bytes that the graph takes from the device, known before the first run.

        That is what a pool of its own reserves, to the byte. In a shared pool it is less where a
        part finds room: scratch in that of another graph, or anything in what dropped graphs left.
        Allocators without a cache do not round.
        """
        return self.lowered.definition.arena_size.reserved_bytes

    def as_text(self) -> str:
        """Returns the traced graph, its nodes and its memory plan."""
        return f"{self.checked}\n\n{self}"

    def compile(self) -> CompiledCapture:
        """Allocates the arena and returns the graph with what `jax.stages.Compiled` offers.

        Raises:
            OutOfMemoryError: the pool cannot hold the arena.
        """
        graph = self.instantiate()
        watch_plan(self.lowered.plan, graph.replay)
        return CompiledCapture(
            self.prepared.drop_values(), self.checked, self.lowered, self.device, graph
        )

    @hold_collector
    def instantiate(self) -> CapturedGraph:
        """Allocates the arena and returns the graph; it is called like the function.

        Raises:
            OutOfMemoryError: the pool cannot hold the arena.
        """
        state = ArrayState(self.prepared.options.outputs)
        replay = self._make_replay(state)
        if replay.is_whole and state is ArrayState.LIVE:
            return BlockReplay(self.prepared, self.checked, self.lowered, replay)
        if replay.is_whole and read_check_replay():
            return WatchedGraph(self.prepared, self.checked, self.lowered, replay, self.outer)
        if replay.is_whole:
            return CapturedGraph(self.prepared, self.checked, self.lowered, replay)
        again = dataclasses.replace(self, prepared=self.prepared.drop_values())
        # An instance of a graph with eager parts is one, too.
        make_instance: Any = again.instantiate
        return PartialGraph(self.prepared, self.checked, self.lowered, replay, make_instance)

    def _make_replay(self, state: ArrayState) -> Replay:
        definition, pool = self.lowered.definition, self.pool.join(self.device)
        key = self._find_state_key()
        if key is None or state is ArrayState.LIVE:
            return Replay(definition, self.device, pool, state)
        home = self.pool.homes.find(key)
        if home is not None:
            home.vacate()
        replay = Replay(definition, self.device, pool, state, home)
        self.pool.homes.keep(key, replay.home)
        return replay

    def _find_state_key(self) -> Hashable:
        """Returns what graphs have in common that may share their state; None for no such graph."""
        definition, outputs = self.lowered.definition, set(self.lowered.definition.outputs)
        state = {
            slot.name: (slot.name, slot.shape, slot.dtype, slot.weak_type)
            for slot in definition.slots
            if slot.is_resident and slot.name in outputs
        }
        is_whole = all(stage.is_captured for stage in definition.stages)
        # The host device updates such state in memory of XLA's, which one graph owns.
        if not state or not is_whole or not self.device.takes_kernels:
            return None
        places = tuple(name if name in state else "" for name in definition.outputs)
        return self.checked.out_tree, places, tuple(state.values())

    def __str__(self) -> str:
        return f"{self.lowered.definition}\n\n{self.lowered.plan}"
