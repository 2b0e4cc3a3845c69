"""BranchingGraph: one signature of a function that reads traced values on the host.

Note [Branches]. A call replays the first part, fetches what the function read there, and looks the
value up among those that were read before. If it is known, the part that followed it then is next,
and no Python of the user's runs. If it is not, the user's function runs again from its start, with
the reads of this call so far: `Path`. What it computes up to there is not captured or computed a
second time, only compared with what was traced before.

A break is guarded by what was read, not by the value: ``if x:`` has two branches, whatever x is.
Floats and arrays that are read hardly ever come back: for them a branch is captured when a value is
read for the second time. Where a break has all its branches, or the function all its parts, what
follows another value runs op by op, as JAX runs what is not under `jax.jit`.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tracegraph.breaks.ahead import LoadedNodes, begin_read, drop_parts, load_parts
from tracegraph.breaks.node import MAX_PARTS, LoadedPart, PartNode, Read
from tracegraph.breaks.reads import has_few_values, make_key, read_value
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.kept_graph import KeptGraph, restore_graphs
from tracegraph.randomness.draws import UnboundDrawsSignal
from tracegraph.replaying.argument_order import ArgumentOrder
from tracegraph.replaying.argument_slots import StaticSlot
from tracegraph.replaying.captured_graph import MISS
from tracegraph.replaying.probe_values import ProbeValues
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.device import Device
from tracegraph.runtime.jax_interop import ArrayImpl, PRNGKeyArray, to_plain
from tracegraph.tracing.call_spec import make_call_spec
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import describe_leaf
from tracegraph.tracing.static_leaves import wrap_static_leaves

_ARRAY_TYPES = (ArrayImpl, Array, PRNGKeyArray)
# Objects of JAX's that say the type of one leaf: it shares them between arrays.
_MAX_KNOWN = 16


class CallArguments(NamedTuple):
    """The arguments of one call.

    Attributes:
        leaves: of the dynamic arguments.
        donated: the donated arguments, as the user gave them.
    """

    leaves: Sequence[Any]
    donated: tuple[Any, ...]


class BranchingGraph:
    """The calls of one signature, see Note [Branches].

    Args:
        prepared: the call that it was made from; its values are not kept.
        device: that it is for.
        pool: that the memory of all its graphs comes from.
        run_path: runs the user's function for a call whose path is not known: it takes this graph,
            the call, and the values and reads so far.

    Attributes:
        prepared: the call, without values.
        root: the first part, once there is one.
        part_count: how many parts are captured.
        seconds: of all captures, by phase.
    """

    def __init__(
        self, prepared: PreparedCall, device: Device, pool: FunctionPool, run_path: Any
    ) -> None:
        self.prepared = prepared.drop_values()
        self.device, self.pool = device, pool
        self.signature, self.names = prepared.signature, prepared.names
        self.name, self.settings = prepared.options.name, prepared.signature.settings
        bound = prepared.bound
        slots: dict[int | str, Any] = {key: StaticSlot(value) for key, value in bound.statics}
        call = make_call_spec(prepared)
        slots |= dict.fromkeys(each.key for each in call.arguments)
        self.order = ArgumentOrder(call, slots)
        keys = [*sorted(k for k in slots if isinstance(k, int))]
        names = [key for key in slots if isinstance(key, str)]
        place_of: dict[int | str, int] = {k: i for i, k in enumerate([*keys, *names])}
        self._positions = [place_of[key] for key in bound.positions]
        self._keywords = {key: place_of[key] for key in sorted(bound.kwargs)}
        self._donated = [place_of[each.key] for each in call.arguments if each.is_donated]
        self._known: list[dict[int, Any]] = [{} for _ in self.signature.leaves]
        # Where there is one device only, an array is on it.
        is_alone = len(jax.devices(device.jax_device.platform)) == 1
        self._here = None if is_alone else {device.jax_device}
        self._takes_static_leaves = prepared.options.takes_static_leaves
        self.root: PartNode | None = None
        self.part_count = 0
        self.seconds: dict[str, float] = {}
        self.lock = threading.Lock()
        self._run_path = run_path
        self._probes = ProbeValues(())
        self._calls = 0

    @property
    def calls(self) -> int:
        """How often it was called with success."""
        return self._calls

    def count_calls(self) -> int:
        """Returns how often it was called with success."""
        return self._calls

    def list_probes(self) -> list[ProbeValues]:
        """Returns what the probes of the last call showed; nothing without probes."""
        return [self._probes] if self._probes.turn else []

    def show_probes(self, nodes: Iterable[PartNode]) -> None:
        """Shows the probes of the parts that a call has replayed."""
        parts = [node.part for node in nodes if node.part is not None and node.part.has_probes]
        if parts or self._probes.turn:
            graphs = [part.find() for part in parts]
            self._probes.show(probes for graph in graphs for probes in graph.list_probes())

    def respell(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns a call with the arguments that this signature has; None if it has others."""
        return self.order.respell(args, kwargs)

    def list_nodes(self) -> list[tuple[int, PartNode]]:
        """Returns all nodes with their depth, each before those that follow it."""
        with self.lock:
            return _list_below(self.root)

    def release(self) -> None:
        """Gives the memory of all parts back; the next call makes those that it needs again."""
        for graph in self._list_kept():
            graph.release()

    def restore(self) -> None:
        """Makes all parts again whose memory was given back.

        Raises:
            OutOfMemoryError: the pool cannot hold them; those that are missing stay released.
        """
        restore_graphs(self._list_kept())

    def _list_kept(self) -> list[KeptGraph]:
        parts = [node.part for _, node in self.list_nodes() if node.part is not None]
        return [part.kept for part in parts if part.kept is not None]

    def try_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Calls with the arguments, or returns MISS if they have another signature.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            is_checked: True when `check_arguments` has passed them.
        """
        joined: tuple[Any, ...] | None = args
        if kwargs or len(args) != self.order.arity:
            joined = self.order.join(args, kwargs)
            if joined is None:
                return MISS
        call = self._read_call(joined, is_checked)
        if call is None:
            return MISS
        try:
            result = self._walk(call)
        except UnboundDrawsSignal:
            if is_checked:
                raise
            # The captured function knows what to do, once it has looked at the call.
            return MISS
        with self.lock:
            self._calls += 1
        return result

    def _read_call(self, joined: Sequence[Any], is_checked: bool) -> CallArguments | None:
        for index, slot in enumerate(self.order.slots):
            if slot is not None and not slot.collect(joined[index], []):
                return None
        dynamic = (
            tuple([joined[index] for index in self._positions]),
            {key: joined[index] for key, index in self._keywords.items()},
        )
        leaves, tree = jax.tree_util.tree_flatten(dynamic)
        if tree != self.signature.tree:
            if not self._takes_static_leaves:
                return None
            leaves, tree = jax.tree_util.tree_flatten(wrap_static_leaves(dynamic))
            if tree != self.signature.tree:
                return None
        if not is_checked and not self._fit(leaves):
            return None
        return CallArguments(leaves, tuple([joined[index] for index in self._donated]))

    def _fit(self, leaves: Sequence[Any]) -> bool:
        """True for arrays of the signature's types that are here; what differs is looked at."""
        for leaf, known, expected in zip(leaves, self._known, self.signature.leaves, strict=True):
            if type(leaf) not in _ARRAY_TYPES or leaf.is_deleted():
                return False
            aval = leaf.aval
            if id(aval) not in known:
                if describe_leaf(leaf) != expected:
                    return False
                if len(known) < _MAX_KNOWN:
                    # Held, so that no other object gets the id.
                    known[id(aval)] = aval
            if self._here is not None and leaf.committed and leaf.devices() != self._here:
                return False
        return not self._donated or len(set(map(id, leaves))) == len(leaves)

    def _walk(self, call: CallArguments) -> Any:
        """Replays the parts of a call; runs the user's function where the path is not known."""
        loaded: LoadedNodes = {}
        try:
            return self._follow(call, loaded)
        finally:
            drop_parts(loaded)

    # Not in `_walk`: an interrupt between two turns of a loop passes the handlers around it.
    def _follow(self, call: CallArguments, loaded: LoadedNodes) -> Any:
        levels: list[Sequence[Any]] = [call.leaves]
        reads: list[Any] = []
        nodes: list[PartNode] = []
        node = self.root
        while node is not None:
            nodes.append(node)
            ready = loaded.pop(node, None)
            if node.read is None:
                result = self.run_last(node, levels, call, ready)
                self.show_probes(nodes)
                return result
            part = node.part
            levels.append(part.run(levels, (), ready) if part is not None else ())
            drop_parts(loaded)
            value = begin_read(levels, node.read)
            if value is not None:
                load_parts(loaded, self._rank_branches(node), levels, call.donated, value)
            reads.append(fetch(levels, node.read))
            node = self.find_branch(node, make_key(reads[-1]))
        drop_parts(loaded)
        return self._run_path(self, call, levels, reads)

    def run_last(
        self,
        node: PartNode,
        levels: Sequence[Sequence[Any]],
        call: CallArguments,
        loaded: LoadedPart | None = None,
    ) -> Any:
        """Replays the part that the function ends with; returns what the function returns.

        Args:
            node: with that part.
            levels: the values so far.
            call: the arguments.
            loaded: what the part was loaded with, if it was.
        """
        if node.part is None:
            return node.out_tree.unflatten(())
        return node.part.run(levels, call.donated, loaded)

    def _rank_branches(self, node: PartNode) -> list[PartNode]:
        """Returns what has followed a read, the most frequent first."""
        with self.lock:
            keys = sorted(node.hits, key=lambda key: node.hits[key], reverse=True)
            return [node.branches[key] for key in keys]

    def find_branch(self, node: PartNode, key: Hashable) -> PartNode | None:
        """Returns what follows a read; None if that is not captured."""
        with self.lock:
            if key in node.branches:
                node.hits[key] += 1
            return node.branches.get(key)

    def add_root(self, node: PartNode) -> PartNode:
        """Takes a first part; returns the one of another thread if that was earlier."""
        with self.lock:
            if self.root is None:
                self.root = node
                self.part_count += 1
            return self.root

    def add_branch(self, before: PartNode, read: Any, node: PartNode) -> PartNode:
        """Takes what follows a read; returns that of another thread if it was earlier."""
        key = make_key(read)
        with self.lock:
            if key not in before.branches:
                self.part_count += 1
                before.hits[key] = 1
                before.shown[key] = _show(read)
            return before.branches.setdefault(key, node)

    def peek_branch(self, node: PartNode, key: Hashable) -> PartNode | None:
        """Returns what follows a read, without counting it."""
        with self.lock:
            return node.branches.get(key)

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Adds the seconds of a capture."""
        with self.lock:
            for phase, value in seconds.items():
                self.seconds[phase] = self.seconds.get(phase, 0.0) + value

    def may_capture(self, before: PartNode, read: Any, new_count: int) -> bool:
        """True if what follows a read is to be captured, see Note [Branches].

        Args:
            before: the part that ends with the read.
            read: what was read, for which there is no branch.
            new_count: parts of this path that are not in the tree yet.
        """
        with self.lock:
            is_open = not before.is_full and self.part_count + new_count < MAX_PARTS
            if is_open and (has_few_values(read) or before.is_recurring(make_key(read))):
                return True
            before.uncaptured += 1
            return False


def fetch(levels: Sequence[Sequence[Any]], read: Read) -> Any:
    """Returns what the function reads: the value, converted as the function does."""
    level, place = read.source
    found = levels[level][place]
    if type(found) is Array and read.kind != "array":
        host = found.read_host()
        if host is not None:
            return read_value(host, read.kind)
    value = to_plain(found)
    return read_value(value if isinstance(value, jax.Array) else jnp.asarray(value), read.kind)


def _show(read: Any) -> str:
    if isinstance(read, jax.Array) and read.size != 1:
        return f"an array {jax.typeof(read).str_short()}"
    return str(read)


def _list_below(root: PartNode | None) -> list[tuple[int, PartNode]]:
    stack = [(0, root)] if root is not None else []
    found: list[tuple[int, PartNode]] = []
    while stack:
        depth, node = stack.pop()
        found.append((depth, node))
        stack += [(depth + 1, each) for each in reversed(node.branches.values())]
    return found
