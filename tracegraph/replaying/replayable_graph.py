"""ReplayableGraph: one signature of a captured or loaded function, ready to be replayed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tracegraph.lowering.lower import Lowered
from tracegraph.replaying.argument_order import ArgumentOrder
from tracegraph.replaying.argument_slots import LeafSlot, Slot, StaticSlot, TreeSlot, is_consumable
from tracegraph.replaying.graph_results import build_results
from tracegraph.replaying.lent_state import LentState, Updates
from tracegraph.replaying.loaded_ahead import LoadedAhead
from tracegraph.replaying.private_copies import copy_together, wait_for_arguments
from tracegraph.replaying.probe_values import ProbeValues
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.jax_interop import ArrayImpl, unwrap_key
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.call_spec import CallSpec, ResultSpec
from tracegraph.tracing.signature import is_leaf_tree

MISS: Any = object()


class ReplayableGraph:
    """The replay of one signature with its argument slots and its results.

    What it takes and returns, its definition and its constants are all that it is made from.

    Note [Hot path]. For a small graph each frame and each look-up counts, so `try_call` spells the
    usual call out: arrays of known types, resident trees, nothing to be copied. `_collectors` holds
    what it needs of each slot: the index of the argument, the types and the writer for arrays that
    can be taken at once, and `collect` for all other values.

    Args:
        call: the calls that it takes.
        results: what it returns.
        lowered: its device program, plan and definition.
        replay: the instantiated definition.
        constants: closed-over arrays as their memory holds them, by the names of their inputs;
            others may be among them.
    """

    __slots__ = (
        "__weakref__",
        "_arity",
        "_build_result",
        "_calls",
        "_clock",
        "_collectors",
        "_donated",
        "_donations",
        "_launch_stages",
        "_lent",
        "_lock_free_calls",
        "_lock_free_reads",
        "_pending",
        "_rotation",
        "ahead",
        "call",
        "constants",
        "lock",
        "lock_free_call",
        "lowered",
        "name",
        "names",
        "order",
        "probes",
        "replay",
        "settings",
        "signature",
    )

    # Constructed once per signature; each argument is what one phase of the capture returned.
    def __init__(
        self,
        call: CallSpec,
        results: ResultSpec,
        lowered: Lowered,
        replay: Replay,
        constants: Mapping[str, Any],
    ) -> None:
        self.call, self.lowered, self.replay = call, lowered, replay
        self.name, self.names = call.name, call.names
        self.signature, self.settings = call.signature, call.signature.settings
        self._calls = 0
        self._clock, self.lock = replay.clock, replay.clock.lock
        # Results that may need settling.
        self._pending = replay.pending
        self._launch_stages = replay.launch_stages
        self._donated, self._lent, self.ahead = call.donated, LentState(), LoadedAhead()
        inputs = replay.definition.inputs
        named = zip(inputs, call.names, strict=False)
        self._donations = {buffer: Donation(self.name, argument) for buffer, argument in named}
        built = build_results(self.name, results, replay, self._donations)
        self._build_result, self._rotation = built.build, built.rotation
        self.probes = built.probes
        # Only arrays given one by one: a tree must be flattened, which is the slots' work.
        self.lock_free_call: Callable[..., Any] | None = None
        self._lock_free_calls = itertools.count()
        self._lock_free_reads = 0
        self._pair_resident_trees(self._build_slots(), results)
        if built.is_plain_leaf and all(type(s) is LeafSlot for s in self.order.slots):
            self.lock_free_call = replay.find_lock_free_call()
        first = len(call.names)
        self.constants = [constants[name] for name in inputs[first:]]
        replay.load(list(enumerate(self.constants, start=first)))

    @property
    def calls(self) -> int:
        """How often it was called with success; its verification does not count."""
        return self.count_calls()

    def list_probes(self) -> list[ProbeValues]:
        """Returns what the probes of each instance of the graph show; nothing without probes."""
        return [] if self.probes is None else [self.probes]

    def count_calls(self) -> int:
        """Returns how often this instance was called with success."""
        # Reading a counter counts too; the caller holds the function's lock.
        lock_free = next(self._lock_free_calls) - self._lock_free_reads
        self._lock_free_reads += 1
        return self._calls + lock_free

    # All arguments are positional: CPython calls such a method faster than others.
    def try_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Replays on the arguments, or returns MISS if they have another signature.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            is_checked: True when `check_arguments` has passed them; without it arguments that could
                break one of its rules (values for a donated argument) are a MISS, too.
        """
        # See Note [Hot path].
        if kwargs or len(args) != self._arity:
            joined = self.order.join(args, kwargs)
            if joined is None:
                return MISS
            args = joined
        if self.lock_free_call is not None:
            for index, known, _, _ in self._collectors:
                value = args[index]
                if type(value) is not ArrayImpl or id(value.aval) not in known:
                    break
            else:
                # Nothing is shared between calls, so that no lock is needed.
                try:
                    result = self.lock_free_call(*args)
                except (RuntimeError, ValueError):
                    # What XLA refuses as it is may be copied in below, or is refused there.
                    pass
                else:
                    next(self._lock_free_calls)
                    return result
        copies: dict[int, Any] | None = None
        if self.replay.waits:
            wait_for_arguments(args)
        while True:
            updates: Updates = []
            with self.lock:
                generation = self._clock.generation
                is_launching = False
                try:
                    if self._pending:
                        self.replay.settle()
                    is_loaded = self.ahead.args is not None and self.ahead.take(args, generation)
                    for index, known, write, collect in () if is_loaded else self._collectors:
                        value = args[index]
                        if type(value) is ArrayImpl and id(value.aval) in known:
                            write(value)
                        elif collect(value, updates):
                            continue
                        else:
                            return MISS
                    if not updates or self._load(updates, copies, is_lent=is_checked):
                        # From here on the leaves of the state are deleted.
                        self._clock.generation = generation + 1
                        is_launching = True
                        self._launch_stages()
                        is_launching = False
                        result = self._build_result()
                        if updates:
                            self._consume(updates)
                        self._calls += 1
                        return result
                except BaseException as error:
                    if self._recover(error, args, generation, is_launching):
                        return MISS
                    raise
            if not is_checked and not self._is_harmless(updates):
                return MISS
            wait_for_arguments(args)
            copies = copy_together(value for _, value in updates if isinstance(value, Array))

    def load_ahead(self, args: tuple[Any, ...]) -> bool:
        """Takes the arguments of a call that may follow; True if `try_call` need not load them.

        It has to be given the very same tuple, see `LoadedAhead`.
        """
        if self.replay.waits or len(args) != self._arity:
            return False
        updates: Updates = []
        with self.lock:
            generation = self._clock.generation
            try:
                if self._pending:
                    self.replay.settle()
                is_loaded = all(
                    collect(args[index], updates) for index, _, _, collect in self._collectors
                )
            except BaseException as error:
                if self._recover(error, args, generation, is_launching=False):
                    # The call itself says what is wrong with them.
                    return False
                raise
            if is_loaded and not updates:
                self.ahead.keep(args, generation)
            return is_loaded and not updates

    def respell(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns a call with the arguments that this graph takes; None if it has others."""
        return self.order.respell(args, kwargs)

    def _recover(
        self, error: BaseException, args: tuple[Any, ...], generation: int, is_launching: bool
    ) -> bool:
        """Makes the next call possible after an error; True if the arguments were at fault.

        Args:
            error: what was raised.
            args: of the call.
            generation: number of the last replay when the call began.
            is_launching: True when the launch had begun and not returned.
        """
        self._lent.give_back()
        was_begun = self._clock.generation != generation
        is_changed = not is_launching or self.replay.may_have_changed_state(error)
        # Values that stood in the buffers may be gone; resident trees must be looked at again.
        self._clock.generation += 1
        self.replay.restore(is_state_lost=was_begun and is_changed)
        self._forget()
        # Leaves of the state were here when the call began; the failed launch may have taken them.
        state = list(self.replay.shown.leaves.values()) if self.replay.shown else []
        arrays = [
            leaf
            for leaf in jax.tree_util.tree_leaves(args)
            if isinstance(leaf, jax.Array) and not any(leaf is each for each in state)
        ]
        return isinstance(error, RuntimeError | ValueError) and not all(map(self._is_here, arrays))

    def replay_once(self, leaves: Sequence[Any], *, is_rebound: bool) -> list[Any]:
        """Replays on flat leaves without consuming any, and returns copies of the flat results.

        Args:
            leaves: one value per dynamic leaf.
            is_rebound: take plain arrays as a call would, without a copy where possible.
        """
        with self.reserve():
            self._replay_leaves([unwrap_key(value) for value in leaves], is_rebound=is_rebound)
            return self.replay.copy_outputs()

    def reserve(self) -> contextlib.AbstractContextManager[object]:
        """Returns what keeps calls off: here the lock, since no user code runs in a replay."""
        return self.lock

    def hold_back(self) -> contextlib.AbstractContextManager[object]:
        """Returns what keeps calls off while the graph is verified: nothing, none can have it."""
        return contextlib.nullcontext()

    def replay_arrays(
        self, arrays: Sequence[jax.Array], *, is_rebound: bool
    ) -> list[tuple[int, Callable[[], Any]]]:
        """Replays on plain arrays of the device, for a comparison; the caller has reserved it.

        Args:
            arrays: one per dynamic leaf.
            is_rebound: take them as a call would, without a copy where possible.

        Returns:
            For each flat result its address and a function that reads it.
        """
        self._replay_leaves(arrays, is_rebound=is_rebound)
        return self.replay.locate_outputs()

    def load_arrays(self, arrays: Sequence[Any], *, is_rebound: bool = True) -> None:
        """Takes plain arrays, as `replay_arrays` does, without a launch.

        Where they are not to be rebound, all are copied in.
        """
        self._load_leaves(arrays, is_rebound=is_rebound, lends=is_rebound)

    def launch_loaded(self) -> None:
        """Launches what is loaded; it does not count as a call."""
        self.replay.launch()

    def _replay_leaves(self, leaves: Sequence[Any], *, is_rebound: bool) -> None:
        self._load_leaves(leaves, is_rebound=is_rebound)
        self.launch_loaded()

    def _load_leaves(self, leaves: Sequence[Any], *, is_rebound: bool, lends: bool = True) -> None:
        self._forget()
        self.replay.settle()
        writers = [buffer.make_writer() for buffer in self.replay.inputs[: len(leaves)]]
        is_written = [
            (is_rebound or (lends and self.replay.is_lent[index])) and index not in self._donated
            for index in range(len(leaves))
        ]
        for index, leaf in enumerate(leaves):
            if is_written[index]:
                writers[index](leaf)
        self.replay.load([(i, leaf) for i, leaf in enumerate(leaves) if not is_written[i]])

    def _load(self, updates: Updates, copies: Any, *, is_lent: bool = False) -> bool:
        """Copies values in; False if arrays must be copied before, see Note [Two graphs]."""
        pairs: Updates | None = updates
        if copies is None:
            pairs = self._lent.take(self.replay, updates, self._donated, is_lent=is_lent)
            if pairs is None:
                return False
            copies = {}
        if self._rotation is not None and any(index in self._donated for index, _ in updates):
            # The old trees must not keep leaves alive that are about to be detached.
            self._rotation.forget()
        self.replay.load([(index, copies.get(id(value), value)) for index, value in pairs])
        return True

    def _consume(self, updates: Updates) -> None:
        """Deletes what was donated: after the launch, so that a failed one takes nothing."""
        self._lent.give_back()
        for index, value in updates:
            if index not in self._donated or not is_consumable(value):
                continue
            array = unwrap_key(value)
            if type(array) is Array:
                array.consume(self._donations[self.replay.definition.inputs[index]])
            else:
                array.delete()

    def _is_here(self, array: jax.Array) -> bool:
        """True for an array that is alive on this graph's device."""
        return not array.is_deleted() and array.devices() == self.replay.devices

    def _is_harmless(self, updates: Updates) -> bool:
        """True when no value is given up, and none is a leaf that this graph is about to change."""
        return not any(
            index in self._donated or (isinstance(value, Array) and self.replay.holds(value))
            for index, value in updates
        )

    def _forget(self) -> None:
        self.ahead.args = None
        for slot in self.order.slots:
            slot.forget()

    def _build_slots(self) -> dict[int, tuple[int, TreeSlot]]:
        """Makes the slots; returns those of trees with their leaves, by the first leaf's index."""
        slots: dict[int | str, Slot] = {k: StaticSlot(value) for k, value in self.signature.statics}
        spans: dict[int, tuple[int, TreeSlot]] = {}
        start = 0
        for each in self.call.arguments:
            stop = start + each.tree.num_leaves
            leaves, is_donated = self.signature.leaves[start:stop], each.is_donated
            if is_leaf_tree(each.tree):
                slot = LeafSlot(self.replay, start, leaves[0], is_donated=is_donated)
            else:
                slot = TreeSlot(self.replay, start, each.tree, leaves, is_donated=is_donated)
                spans[start] = (len(leaves), slot)
            slots[each.key] = slot
            start = stop
        self.order = ArgumentOrder(self.call, slots)
        self._arity = self.order.arity
        self._collectors = tuple(
            (index, slot.known, slot.write, slot.collect)
            for index, slot in enumerate(self.order.slots)
        )
        return spans

    def _pair_resident_trees(
        self, spans: dict[int, tuple[int, TreeSlot]], results: ResultSpec
    ) -> None:
        """Tells each tree that is an argument come back whole which slot it belongs to."""
        source = dict(results.aliases)
        for tree in self._rotation.trees if self._rotation is not None else ():
            inputs = [source[index] for index in tree.indices]
            count, slot = spans.get(inputs[0], (0, None))
            # Another structure of the same leaves is another signature.
            if slot is None or slot.structure != tree.structure:
                continue
            if inputs == list(range(inputs[0], inputs[0] + count)):
                # A graph that joins a home shares what the others have seen.
                tree.seen = slot.seen = tree.seen or slot.seen
