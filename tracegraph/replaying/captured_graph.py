"""CapturedGraph: one signature of a captured function, ready to be replayed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegraph.jax_internals import InvalidFloatSignal, to_physical
from tracegraph.lowering.lower import Lowered
from tracegraph.options import LIVE_OUTPUTS
from tracegraph.replaying.argument_order import ArgumentOrder
from tracegraph.replaying.argument_slots import LeafSlot, Slot, StaticSlot, TreeSlot, is_consumable
from tracegraph.replaying.float_checks import check_results, is_checking_floats, raise_float_error
from tracegraph.replaying.mismatch_error import make_mismatch_error
from tracegraph.replaying.private_copies import copy_together, is_late, wait_for_arguments
from tracegraph.replaying.result_builder import ResultBuilder
from tracegraph.runtime.array import Array
from tracegraph.runtime.jax_interop import ArrayImpl, unwrap_key
from tracegraph.runtime.replay import Replay
from tracegraph.runtime.residence import Donation
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall, prepare_call
from tracegraph.tracing.signature import is_leaf_tree

MISS: Any = object()


class CapturedGraph:
    """The replay of one signature with its argument slots and its results.

    Note [Hot path]. For a small graph each frame and each look-up counts, so `try_call` spells the
    usual call out: arrays of known types, resident trees, nothing to be copied. `_collectors` holds
    what it needs of each slot: the index of the argument, the types and the writer for arrays that
    can be taken at once, and `collect` for all other values.

    Args:
        prepared: the call that it was captured from; its values are not kept.
        checked: the traced graph.
        lowered: its device program, plan and definition.
        replay: the instantiated definition.
    """

    __slots__ = (
        "__weakref__",
        "_arity",
        "_build_result",
        "_clock",
        "_collectors",
        "_donated",
        "_donations",
        "_function",
        "_launch_stages",
        "_lock_free_calls",
        "_lock_free_reads",
        "_options",
        "_pending",
        "_rotation",
        "_statics",
        "_uncounted",
        "checked",
        "constants",
        "lock",
        "lock_free_call",
        "lowered",
        "name",
        "names",
        "order",
        "replay",
        "settings",
        "signature",
    )

    # Constructed once per signature; each argument is what one phase of the capture returned.
    def __init__(
        self,
        prepared: PreparedCall,
        checked: CheckedGraph,
        lowered: Lowered,
        replay: Replay,
    ) -> None:
        self.checked, self.lowered, self.replay = checked, lowered, replay
        self.signature, self.names = prepared.signature, prepared.names
        self.name, self.settings = prepared.options.name, prepared.signature.settings
        self._function, self._options = prepared.function, prepared.options
        self._statics = prepared.list_static_values()
        self._uncounted = 0
        self._clock, self.lock = replay.clock, replay.clock.lock
        # Results that may need settling.
        self._pending = replay.pending
        self._launch_stages = replay.launch_stages
        self._donated = prepared.donated
        avals = [operand.aval for operand in checked.graph.outputs]
        inputs = zip(replay.definition.inputs, prepared.names, strict=False)
        self._donations = {buffer: Donation(self.name, argument) for buffer, argument in inputs}
        tree = checked.out_tree
        is_live = self._options.outputs == LIVE_OUTPUTS
        if is_live:
            # The others are shown by arrays of the block, which are there already.
            tree, _ = tree.children()
        results = ResultBuilder(replay, tree, avals[: tree.num_leaves], self._donations)
        self._build_result, self._rotation = results.build, results.rotation
        if is_checking_floats() and not is_live:
            self._build_result = check_results(results.build, self.name)
        # Only arrays given one by one: a tree must be flattened, which is the slots' work.
        self.lock_free_call: Callable[..., Any] | None = None
        self._lock_free_calls = itertools.count()
        self._lock_free_reads = 0
        self._build_slots(prepared)
        if results.is_plain_leaf and all(type(s) is LeafSlot for s in self.order.slots):
            self.lock_free_call = replay.find_lock_free_call()
        first = len(prepared.names)
        constants = {f"%{each.name}": each for each in checked.graph.constants}
        held = [constants[name] for name in replay.definition.inputs[first:]]
        self.constants = [to_physical(each.array, each.value.aval) for each in held]
        replay.load([(first + i, array) for i, array in enumerate(self.constants)])

    @property
    def calls(self) -> int:
        """How often it was called with success; its verification does not count."""
        return self.count_calls()

    def count_calls(self) -> int:
        """Returns how often this instance was called with success."""
        # Reading a counter counts too; the caller holds the function's lock.
        lock_free = next(self._lock_free_calls) - self._lock_free_reads
        self._lock_free_reads += 1
        return self._clock.generation - self._uncounted + lock_free

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
            updates: list[tuple[int, Any]] = []
            with self.lock:
                generation = self._clock.generation
                is_launching = False
                try:
                    if self._pending:
                        self.replay.settle()
                    for index, known, write, collect in self._collectors:
                        value = args[index]
                        if type(value) is ArrayImpl and id(value.aval) in known:
                            write(value)
                        elif collect(value, updates):
                            continue
                        else:
                            return MISS
                    if not updates or self._load(updates, copies):
                        # From here on the leaves of the state are deleted.
                        self._clock.generation = generation + 1
                        is_launching = True
                        self._launch_stages()
                        is_launching = False
                        result = self._build_result()
                        if updates:
                            self._consume(updates)
                        return result
                except BaseException as error:
                    if self._recover(error, args, generation, is_launching):
                        return MISS
                    raise
            if not is_checked and not self._is_harmless(updates):
                return MISS
            wait_for_arguments(args)
            copies = copy_together(value for _, value in updates if isinstance(value, Array))

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
        was_begun = self._clock.generation != generation
        is_changed = not is_launching or self.replay.may_have_changed_state(error)
        # Values that stood in the buffers may be gone; resident trees must be looked at again.
        self._clock.generation += 1
        self._uncounted += self._clock.generation - generation
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays on arguments that must have this graph's signature.

        Raises:
            CaptureError: an argument was donated before, or is donated twice.
            ReplayError: they have another signature; only what differs is shown.
        """
        try:
            return self._call_checked(args, kwargs)
        except InvalidFloatSignal as signal:
            raise_float_error(signal, self._function, args, kwargs)

    def _call_checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays on arguments, or says what is wrong with them."""
        result = self.try_call(args, kwargs, False)
        if result is not MISS:
            return result
        # What is wrong with the arguments themselves comes before what is wrong for this graph.
        found = prepare_call(
            self._function,
            self._options,
            args,
            kwargs,
            device=self.replay.jax_device,
            has_values=True,
        )
        result = self.try_call(args, kwargs, True)
        if result is MISS:
            raise make_mismatch_error(self.name, self.signature, self.names, self._statics, found)
        return result

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
        """Takes plain arrays, as `replay_arrays` does, without a launch."""
        self._load_leaves(arrays, is_rebound=is_rebound)

    def launch_loaded(self) -> None:
        """Launches what is loaded; it does not count as a call."""
        self.replay.launch()
        self._uncounted += 1

    def _replay_leaves(self, leaves: Sequence[Any], *, is_rebound: bool) -> None:
        self._load_leaves(leaves, is_rebound=is_rebound)
        self.launch_loaded()

    def _load_leaves(self, leaves: Sequence[Any], *, is_rebound: bool) -> None:
        self._forget()
        self.replay.settle()
        writers = [buffer.make_writer() for buffer in self.replay.inputs[: len(leaves)]]
        is_written = [is_rebound and index not in self._donated for index in range(len(leaves))]
        for index, leaf in enumerate(leaves):
            if is_written[index]:
                writers[index](leaf)
        self.replay.load([(i, leaf) for i, leaf in enumerate(leaves) if not is_written[i]])

    def _load(self, updates: list[tuple[int, Any]], copies: dict[int, Any] | None) -> bool:
        """Copies values in; False if arrays in a graph's pool must be copied before.

        Note [Two graphs]. Another graph may be replaying while its arrays are read here. Holding
        both locks at once could deadlock, so the arrays are copied under their own lock, all of one
        graph together, while this graph's lock is not held.
        """
        if copies is None:
            if any(i in self._donated or type(v) is Array or is_late(v) for i, v in updates):
                return False
            copies = {}
        if self._rotation is not None and any(index in self._donated for index, _ in updates):
            # The old trees must not keep leaves alive that are about to be detached.
            self._rotation.forget()
        self.replay.load([(index, copies.get(id(value), value)) for index, value in updates])
        return True

    def _consume(self, updates: list[tuple[int, Any]]) -> None:
        """Deletes what was donated: after the launch, so that a failed one takes nothing."""
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
        return not array.is_deleted() and array.devices() == {self.replay.jax_device}

    def _is_harmless(self, updates: list[tuple[int, Any]]) -> bool:
        """True when no value is given up, and none is a leaf that this graph is about to change."""
        arena = self.replay.arena
        return not any(
            index in self._donated or (isinstance(value, Array) and value.is_in(arena))
            for index, value in updates
        )

    def _forget(self) -> None:
        for slot in self.order.slots:
            slot.forget()

    def _build_slots(self, prepared: PreparedCall) -> None:
        bound = prepared.bound
        slots: dict[int | str, Slot] = {key: StaticSlot(value) for key, value in bound.statics}
        keys: list[int | str] = [*bound.positions, *sorted(bound.kwargs)]
        spans: dict[int, tuple[int, TreeSlot]] = {}
        start = 0
        for key, (is_donated, structure) in zip(keys, prepared.list_arguments(), strict=True):
            leaves = self.signature.leaves[start : start + structure.num_leaves]
            if is_leaf_tree(structure):
                slots[key] = LeafSlot(self.replay, start, leaves[0], is_donated=is_donated)
            else:
                slot = TreeSlot(self.replay, start, structure, leaves, is_donated=is_donated)
                slots[key] = slot
                spans[start] = (structure.num_leaves, slot)
            start += structure.num_leaves
        self.order = ArgumentOrder(prepared, slots)
        self._arity = self.order.arity
        self._collectors = tuple(
            (index, slot.known, slot.write, slot.collect)
            for index, slot in enumerate(self.order.slots)
        )
        self._pair_resident_trees(spans)

    def _pair_resident_trees(self, spans: dict[int, tuple[int, TreeSlot]]) -> None:
        """Tells each tree that is an argument come back whole which slot it belongs to."""
        source = dict(self.checked.graph.aliases)
        for tree in self._rotation.trees if self._rotation is not None else ():
            inputs = [source[index] for index in tree.indices]
            count, slot = spans.get(inputs[0], (0, None))
            # Another structure of the same leaves is another signature.
            if slot is None or slot.structure != tree.structure:
                continue
            if inputs == list(range(inputs[0], inputs[0] + count)):
                tree.slot = slot
