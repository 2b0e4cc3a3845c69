"""CapturedGraph: one signature of a captured function, ready to be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tracegraph.argument_slots import LeafSlot, Slot, StaticSlot, TreeSlot, is_consumable
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.mismatch import describe_mismatch
from tracegraph.frontend import CheckedGraph, find_donated, list_arguments
from tracegraph.lowering.lower import Lowered
from tracegraph.options import Options
from tracegraph.partition import read_constants
from tracegraph.result_builder import ResultBuilder
from tracegraph.runtime.errors import ReplayError
from tracegraph.runtime.jax_interop import unwrap_key
from tracegraph.runtime.replay import Replay
from tracegraph.signature import BoundCall, Signature, describe_leaf
from tracegraph.verification import VerificationReport

MISS: Any = object()


class CapturedGraph:
    """The replay of one signature with its argument slots and its results.

    Args:
        checked: the traced graph.
        lowered: its device program, plan and definition.
        replay: the instantiated definition.
        options: how it was captured.
        call: the call that it was captured from.
        signature: trees and types that it accepts.
        names: one name per dynamic leaf.
    """

    # Constructed once per signature; each argument is a stage of the way of the data.
    def __init__(
        self,
        *,
        checked: CheckedGraph,
        lowered: Lowered,
        replay: Replay,
        options: Options,
        call: BoundCall,
        signature: Signature,
        names: Sequence[str],
    ) -> None:
        self.checked, self.lowered, self.replay = checked, lowered, replay
        self.signature, self.names, self.name = signature, list(names), options.name
        self.settings = signature.settings
        self._uncounted = 0
        self._clock, self._launch_stages = replay.clock, replay.launch_stages
        self._lock = replay.clock.lock
        self.verification = VerificationReport(skipped="verify=False")
        self._donated = find_donated(options, call)
        avals = [operand.aval for operand in checked.graph.outputs]
        self._results = ResultBuilder(replay, checked.out_tree, avals)
        self._build_result = self._results.build
        self._build_slots(options, call)
        constants = read_constants(checked.graph.constants)
        first = len(names)
        replay.load([(first + i, array) for i, array in enumerate(constants)])

    @property
    def calls(self) -> int:
        """How often it was called; the replay that verified it does not count."""
        return self._clock.generation - self._uncounted

    def try_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays on the arguments, or returns MISS if they have another signature."""
        if kwargs or self._keyword_slots:
            if kwargs.keys() != self._keyword_slots.keys():
                return MISS
            args = (*args, *(kwargs[key] for key in self._keyword_slots))
        if len(args) != self._arity:
            return MISS
        # This is the hot path: few frames, one list, nothing that grows with the leaves.
        with self._lock:
            replay = self.replay
            if replay.pending:
                replay.settle()
            updates: list[tuple[int, Any]] = []
            for index, collect in self._collectors:
                if not collect(args[index], updates):
                    return self._miss()
            try:
                if updates:
                    self._load(updates)
                # As `replay.launch()`, without its frame.
                self._launch_stages()
                self._clock.generation += 1
            except BaseException:
                self._forget()
                raise
            if updates:
                self._consume(updates)
            result = self._build_result()
            for slot, tree in self._resident_slots:
                slot.remember(tree.watch)
            return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays on arguments that must have this graph's signature.

        Raises:
            ReplayError: they have another one; only what differs is shown.
        """
        result = self.try_call(args, kwargs)
        if result is MISS:
            raise self._explain_mismatch(args, kwargs)
        return result

    def replay_once(self, leaves: Sequence[Any]) -> list[Any]:
        """Replays on flat leaves without consuming any, and returns copies of the flat results.

        Args:
            leaves: one value per dynamic leaf.
        """
        with self._lock:
            self._forget()
            self.replay.settle()
            self.replay.load([(i, unwrap_key(value)) for i, value in enumerate(leaves)])
            self.replay.launch()
            self._uncounted += 1
            return self.replay.copy_outputs()

    def _load(self, updates: list[tuple[int, Any]]) -> None:
        """Copies values in."""
        if any(index in self._donated for index, _ in updates):
            # The trees of the old state must not keep leaves alive that are about to be detached.
            for slot, tree in self._resident_slots:
                slot.remember(None)
                tree.forget()
        self.replay.load(updates)

    def _consume(self, updates: list[tuple[int, Any]]) -> None:
        """Deletes what was donated: after the launch, so that a failed one costs nothing."""
        for index, value in updates:
            if index in self._donated and is_consumable(value):
                value.delete()

    def _miss(self) -> Any:
        self._forget()
        return MISS

    def _forget(self) -> None:
        for slot in (*self._slots, *self._keyword_slots.values()):
            slot.forget()

    def _build_slots(self, options: Options, call: BoundCall) -> None:
        slots: dict[int | str, Slot] = {key: StaticSlot(value) for key, value in call.statics}
        keys: list[int | str] = [*call.positions, *sorted(call.kwargs)]
        spans: dict[int, tuple[int, TreeSlot]] = {}
        start = 0
        for key, (is_donated, tree) in zip(keys, list_arguments(options, call), strict=True):
            structure = jax.tree_util.tree_structure(tree)
            leaves = self.signature.leaves[start : start + structure.num_leaves]
            if jax.tree_util.treedef_is_leaf(structure):
                slots[key] = LeafSlot(self.replay, start, leaves[0], is_donated=is_donated)
            else:
                slot = TreeSlot(self.replay, start, structure, leaves, is_donated=is_donated)
                slots[key] = slot
                spans[start] = (structure.num_leaves, slot)
            start += structure.num_leaves
        self._slots = [slots[key] for key in sorted(k for k in slots if isinstance(k, int))]
        self._keyword_slots = {key: slot for key, slot in slots.items() if isinstance(key, str)}
        every_slot = (*self._slots, *self._keyword_slots.values())
        self._arity = len(every_slot)
        self._collectors = tuple(enumerate(slot.collect for slot in every_slot))
        self._resident_slots = self._pair_resident_trees(spans)

    def _pair_resident_trees(self, spans: dict[int, tuple[int, TreeSlot]]) -> list[Any]:
        """Pairs each argument that comes back whole with the tree that it comes back as."""
        source = dict(self.checked.graph.aliases)
        pairs = []
        for tree in self._results.resident_trees:
            inputs = [source[index] for index in tree.indices]
            count, slot = spans.get(inputs[0], (0, None))
            if slot is not None and inputs == list(range(inputs[0], inputs[0] + count)):
                pairs.append((slot, tree))
        return pairs

    def _explain_mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayError:
        """Returns an error that shows wanted and got side by side where they differ."""
        wanted = [
            (name, leaf.shape, leaf.dtype, leaf.weak_type)
            for name, leaf in zip(self.names, self.signature.leaves, strict=True)
        ]
        got = describe_call(self.names, self.signature, args, kwargs)
        return ReplayError(
            f"the graph of `{self.name}` is called with another signature",
            where=f"{locate_caller()}: {describe_mismatch(wanted, got)}",
            why="a graph has static shapes: its kernels and buffers fit one signature only",
            fix=f"pass what it was captured with, or call `{self.name}`, which captures anew",
            anchor="signature",
        )


def describe_call(
    names: Sequence[str], signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, tuple[int, ...], Any, bool]]:
    """Returns path and type of each dynamic leaf of a call; paths as captured where trees agree."""
    static = {key for key, _ in signature.statics}
    dynamic = tuple(value for i, value in enumerate(args) if i not in static)
    rest = {key: value for key, value in kwargs.items() if key not in static}
    leaves, tree = jax.tree_util.tree_flatten((dynamic, rest))
    if tree == signature.tree:
        paths = list(names)
    else:
        with_paths = jax.tree_util.tree_leaves_with_path((dynamic, rest))
        paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
    described = []
    for path, value in zip(paths, leaves, strict=True):
        leaf = describe_leaf(value)
        described.append((path, leaf.shape, leaf.dtype, leaf.weak_type))
    return described
