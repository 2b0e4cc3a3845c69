"""Replay: a captured graph with its memory. Fill the static inputs, launch, return the results.

Note [Fresh outputs]. Where the device does not make a result in memory of its own, it is read from
the graph's static output buffer, which the next replay overwrites. Copying at every call would
waste the copies that are never read, so the copy is deferred: just before a buffer is overwritten,
every result that is still alive takes a private copy.

Note [Resident state]. A donated input that aliases a result never leaves the graph's memory. The
user holds a leaf object for it, which shows the memory until the next replay; passing that object
costs one identity check, and deletes it, see Note [Leaf sets]. Any other value given for the input
is copied in, and the leaf of the old contents, if it is still held, is first detached with a
private copy. So no leaf ever shows another value than the one that it was returned with.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.array import Array, ArrayState
from tracegraph.runtime.device import ReplayDevice
from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.graph import GraphDefinition, ReplayClock, Stage
from tracegraph.runtime.jax_interop import find_sharding
from tracegraph.runtime.leaf_set import LeafSet
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.profiler_ranges import mark_call
from tracegraph.runtime.residence import Donation
from tracegraph.runtime.static_buffer import StaticBuffer


class Replay:
    """An instantiated capture: its arena, its executable graphs and the arrays in its buffers.

    Args:
        definition: what to instantiate.
        device: where.
        pool: allocates the arena, which is freed by `close` or with the last array in it.
        output_state: what results promise, FRESH or STATIC.

    Attributes:
        devices: of JAX that it runs on.
        shown: the leaves that show, or showed, the resident results.
        waits: see `Instance`.
        is_whole: False with eager parts, see `tracegraph/replaying/partial_graph.py`.
        shares_inputs: True where other graphs of the pool may write the bytes of its inputs.
        is_lent: for each static input whether it has no memory of its own.
    """

    def __init__(
        self,
        definition: GraphDefinition,
        device: ReplayDevice,
        pool: PrivatePool,
        output_state: ArrayState,
    ) -> None:
        self.definition = definition
        self.jax_device = device.jax_device
        self.devices = frozenset(find_sharding(self.jax_device).device_set)
        # Eager parts run Python code in the middle of a replay.
        self.is_whole = all(stage.is_captured for stage in definition.stages)
        self.arena = Arena(pool, definition.arena_size, shares_scratch=self.is_whole)
        self.shares_inputs = definition.has_scratch_inputs
        self.clock = ReplayClock(self.arena.lock)
        with self.clock.lock:
            self.buffers = device.bind_buffers(definition, self.arena, self.clock)
        self.inputs = [self.buffers[name] for name in definition.inputs]
        lent = {slot.name for slot in definition.slots if slot.is_lent}
        self.is_lent = [name in lent for name in definition.inputs]
        self.pending: list[weakref.ref[Array]] = []
        self.shown: LeafSet | None = None
        self._output_state = output_state
        residents = {slot.name for slot in definition.slots if slot.is_resident}
        self._resident_inputs = [name if name in residents else "" for name in definition.inputs]
        self.is_resident_output = [name in residents for name in definition.outputs]
        self._outputs = [self.buffers[name] for name in definition.outputs]
        # By name: one buffer may be several results.
        self._residents = {b.name: b for b in self._outputs if b.name in residents}
        self._writes_state = [_writes_one_of(stage, self._residents) for stage in definition.stages]
        fresh = [name for name in definition.outputs if name not in residents]
        instance = device.instantiate(
            definition, self.buffers, fresh if output_state is ArrayState.FRESH else ()
        )
        self.stages, self.takers = instance.stages, instance.takers
        self._consumed, self._lock_free_call = instance.consumed, instance.lock_free_call
        self.waits = instance.waits
        # What `launch` does before it counts; a caller on the fast path does both itself.
        launch = _join_launches([stage.launch for stage in self.stages], self.clock)
        self.launch_stages = mark_call(launch, f"replay {definition.name}")

    def settle(self) -> None:
        """Gives every live result of the last replay a private copy, see Note [Fresh outputs].

        To be called before anything is loaded or launched.
        """
        for reference in self.pending:
            array = reference()
            if array is not None:
                array.settle()
        self.pending.clear()

    def detach_results(self) -> None:
        """Gives every live result and leaf of the last replay a private copy."""
        self.settle()
        if self.shown is not None:
            for name in list(self.shown.leaves):
                self.shown.detach(name)
            self.shown = None

    def load(self, updates: Sequence[tuple[int, Any]]) -> None:
        """Copies values into static inputs; all are read before any buffer is written.

        The results of the last replay must be settled.

        Args:
            updates: pairs (input index, value); a value is an array of the input's shape and dtype
                or a Python scalar.
        """
        values = [(index, self._detach_value(value)) for index, value in updates]
        for index, value in values:
            if self.shown is not None:
                self.shown.detach(self._resident_inputs[index])
            self.inputs[index].write(value)

    def launch(self) -> None:
        """Launches every stage once; the buffers belong to a new generation, even if it fails.

        The results of the last replay must be settled.
        """
        self.clock.generation += 1
        self.launch_stages()

    def restore(self, *, is_state_lost: bool) -> None:
        """Makes the buffers and the leaves of the last results usable after a failed call.

        Args:
            is_state_lost: True when what is in the buffers may be that of a later replay: no leaf
                shows it.
        """
        lost = [buffer.name for buffer in self._consumed if buffer.restore()]
        shown = self.shown
        if shown is None or is_state_lost:
            return
        self.show(shown)
        for name in lost:
            if name in shown.leaves:
                # The call did take it.
                shown.leaves[name].consume(shown.residence.donations.get(name))

    def may_have_changed_state(self, error: BaseException) -> bool:
        """True unless a failed launch is known to have written no resident value.

        Args:
            error: what `launch_stages` raised.
        """
        # Any other kind may come from a signal, after the work was done.
        if not isinstance(error, RuntimeError | ValueError | TracegraphError):
            return True
        failed = self.clock.stage
        stage = self.definition.stages[failed]
        is_atomic = stage.is_captured and len(stage.nodes) == 1
        return any(self._writes_state[:failed]) or (self._writes_state[failed] and not is_atomic)

    def find_lock_free_call(self) -> Callable[..., Any] | None:
        """Returns what computes all results from all inputs without a buffer; None if nothing does.

        Such a graph is one call whose inputs are all rebound and whose results all leave the graph.
        It takes the inputs in their order; its one result comes bare, several come as a tuple.
        """
        call = self._lock_free_call
        return None if call is None else mark_call(call, f"replay {self.definition.name}")

    def copy_outputs(self) -> list[Any]:
        """Returns private copies of all results of the last replay."""
        return [
            self.takers[buffer.name]() if buffer.name in self.takers else buffer.snapshot()
            for buffer in self._outputs
        ]

    def locate_outputs(self) -> list[tuple[int, Callable[[], Any]]]:
        """Returns for each result of the last replay its address and a function that reads it."""
        located: list[tuple[int, Callable[[], Any]]] = []
        for buffer in self._outputs:
            if buffer.name in self.takers:
                array = self.takers[buffer.name]()
                located.append((array.data_ptr(), array.jax))
            else:
                located.append((buffer.address, functools.partial(_read, buffer)))
        return located

    def make_taker(self, index: int) -> Callable[[], jax.Array]:
        """Returns a function that gives one result of the last replay.

        A result that is in the arena is an Array; one that the device made in memory of its own is
        the plain array that it made. Those that are resident are in a `LeafSet`.
        """
        buffer = self._outputs[index]
        if buffer.name in self.takers:
            return self.takers[buffer.name]
        return functools.partial(self._make_array, buffer)

    def _make_array(self, buffer: StaticBuffer) -> Array:
        array = Array(buffer, self.clock.generation, self._output_state)
        if self._output_state is ArrayState.FRESH:
            self.pending.append(weakref.ref(array))
        return array

    def make_leaves(self, donations: Mapping[str, Donation]) -> LeafSet:
        """Returns new leaves for the resident results, see Note [Leaf sets].

        Args:
            donations: what to say of a leaf that a later replay has taken.
        """
        return LeafSet(self._residents.values(), self.clock, donations)

    def show(self, leaves: LeafSet) -> None:
        """Makes these leaves the ones that show the resident results of the last replay."""
        leaves.residence.generation = self.clock.generation
        self.shown = leaves

    def is_leaf_of(self, value: Any, index: int) -> bool:
        """True when the value is the resident leaf that lives in this static input."""
        shown = self.shown
        if shown is None or shown.leaves.get(self._resident_inputs[index]) is not value:
            return False
        return value is not None and not value.is_deleted()

    def _detach_value(self, value: Any) -> Any:
        """Returns a value that no write to this arena can change."""
        if isinstance(value, Array) and value.is_in(self.arena):
            return value.peek().copy()
        return value


def _join_launches(
    launches: Sequence[Callable[[], None]], clock: ReplayClock
) -> Callable[[], None]:
    """Returns one function that launches all stages; it holds nothing else of the replay."""
    if len(launches) == 1:
        return launches[0]

    def launch() -> None:
        for clock.stage, each in enumerate(launches):
            each()

    return launch


def _writes_one_of(stage: Stage, names: Collection[str]) -> bool:
    return any(name in names for node in stage.nodes for name in node.results)


def _read(buffer: StaticBuffer) -> Any:
    return Array(buffer, buffer.clock.generation, ArrayState.RESIDENT).jax()
