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
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.arrays.leaf_set import LeafSet
from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.arrays.state_home import StateHome
from tracegraph.runtime.arrays.static_buffer import StaticBuffer
from tracegraph.runtime.definition.graph import GraphDefinition, ReplayClock, Stage
from tracegraph.runtime.device import ReplayDevice
from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.jax_interop import find_sharding
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.profiler_ranges import mark_call


class Replay:
    """An instantiated capture: its arena, its executable graphs and the arrays in its buffers.

    Args:
        definition: what to instantiate.
        device: where.
        pool: allocates the arena, which is freed by `close` or with the last array in it.
        output_state: what results promise, FRESH or STATIC.
        home: of state that it shares with other graphs; None for one of its own. It has one of its
            own, too, where it can't hold the lock of the given one.

    Attributes:
        devices: of JAX that it runs on.
        home: of its state.
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
        home: StateHome | None = None,
    ) -> None:
        self.definition = definition
        self.jax_device = device.jax_device
        self.devices = frozenset(find_sharding(self.jax_device).device_set)
        # Eager parts run Python code in the middle of a replay.
        self.is_whole = all(stage.is_captured for stage in definition.stages)
        residents = {slot.name for slot in definition.slots if slot.is_resident}
        if home is not None and (home.clock.lock is not pool.replay_lock or not self.is_whole):
            home = None
        absent = range(0) if home is None else _find_absent(definition, home)
        self.arena = Arena(pool, definition.arena_size, shares_scratch=self.is_whole, absent=absent)
        if self.is_whole and not residents.isdisjoint(definition.outputs):
            # Other graphs may join its state.
            self.arena.lock = pool.replay_lock
        self.shares_inputs = definition.has_scratch_inputs
        if home is None:
            home = StateHome(ReplayClock(self.arena.lock))
        self.home, self.clock = home, home.clock
        with self.clock.lock:
            bound = device.bind_buffers(definition, self.arena, self.clock)
        self.buffers = {**bound, **home.buffers}
        self._arenas = (self.arena, *{buffer.arena for buffer in home.buffers.values()})
        self.inputs = [self.buffers[name] for name in definition.inputs]
        lent = {slot.name for slot in definition.slots if slot.is_lent}
        self.is_lent = [name in lent for name in definition.inputs]
        self.pending = home.pending
        self._output_state = output_state
        self._resident_inputs = [name if name in residents else "" for name in definition.inputs]
        self.is_resident_output = [name in residents for name in definition.outputs]
        self._outputs = [self.buffers[name] for name in definition.outputs]
        # By name: one buffer may be several results.
        self._residents = {b.name: b for b in self._outputs if b.name in residents}
        home.buffers = self._residents
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
        self.home.settle()

    @property
    def shown(self) -> LeafSet | None:
        """The leaves that show, or showed, the resident results."""
        return self.home.shown

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
        self.home.shown = leaves

    def is_leaf_of(self, value: Any, index: int) -> bool:
        """True when the value is the resident leaf that lives in this static input."""
        shown = self.shown
        if shown is None or shown.leaves.get(self._resident_inputs[index]) is not value:
            return False
        return value is not None and not value.is_deleted()

    def holds(self, array: Array) -> bool:
        """True for an array in the memory that the graph writes."""
        return any(array.is_in(arena) for arena in self._arenas)

    def _detach_value(self, value: Any) -> Any:
        """Returns a value that no write of this graph can change."""
        if isinstance(value, Array) and self.holds(value):
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


def _find_absent(definition: GraphDefinition, home: StateHome) -> range:
    """Returns the offsets of the state that is at home, if it is in one piece."""
    state = [slot for slot in definition.slots if slot.name in home.buffers and slot.nbytes]
    others = [slot for slot in definition.slots if slot.name not in home.buffers and slot.nbytes]
    kept_bytes = definition.arena_size.kept_bytes
    start = min((slot.offset for slot in state), default=0)
    end = max((slot.offset + slot.nbytes for slot in state), default=0)
    behind = [slot.offset for slot in others if end <= slot.offset < kept_bytes]
    stop = min(behind, default=kept_bytes)
    if any(start < slot.offset + slot.nbytes and slot.offset < stop for slot in others):
        return range(0)
    return range(start, stop)


def _writes_one_of(stage: Stage, names: Collection[str]) -> bool:
    return any(name in names for node in stage.nodes for name in node.results)


def _read(buffer: StaticBuffer) -> Any:
    return Array(buffer, buffer.clock.generation, ArrayState.RESIDENT).jax()
