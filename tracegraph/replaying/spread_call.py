"""SpreadCall: one signature of a captured function whose arrays are spread over several devices.

Note [Spread calls]
On the host device a region stays one call of XLA's. Here the function is one region, and its call
runs on all devices at once, the collectives inside. Arguments are read where they are, so nothing
is copied per call; a donated leaf is updated in place by each device, at the address where it was,
and comes back as a new plain array, as `jax.jit` returns it. No pool holds any of it: each device's
part belongs to JAX.

Two threads that started collectives in different orders on two devices would wait for each other,
so calls of all spread programs follow one another while they are enqueued. XLA orders collectives
of one thread only on the host device, so a call of another thread first waits for the last one. It
knows that by a weak reference, since no state may be kept for it: a call whose results are dropped
at once is not waited for, nor is one of `jax.jit`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegraph.constraints.frames import hides_own_frames
from tracegraph.lowering.compile_spread import SpreadProgram
from tracegraph.replaying.argument_order import ArgumentOrder
from tracegraph.replaying.argument_slots import StaticSlot
from tracegraph.replaying.captured_graph import MISS
from tracegraph.replaying.invalid_floats import (
    InvalidResultsSignal,
    check_finite,
    make_invalid_error,
)
from tracegraph.replaying.mismatch_error import make_mismatch_error
from tracegraph.replaying.probe_values import ProbeValues
from tracegraph.replaying.spread_slots import SpreadSlot, consume_leaves, read_leaves
from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.environment import read_launch_blocking
from tracegraph.runtime.jax_interop import get_quick_call
from tracegraph.tracing.call_spec import CallSpec, make_call_spec
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall, prepare_call
from tracegraph.tracing.signature import is_leaf_tree


class _Enqueued:
    # See Note [Spread calls]; all but the lock is of the last call, and guarded by it.
    lock = threading.Lock()
    thread = 0
    result: Any = None


class SpreadCall:
    """The calls of one signature on several devices.

    Args:
        prepared: the call that it was captured from; its values are not kept.
        checked: the traced graph.
        program: compiled for all devices.
    """

    def __init__(
        self, prepared: PreparedCall, checked: CheckedGraph, program: SpreadProgram
    ) -> None:
        self._spec = make_call_spec(prepared)
        self.signature, self.names = prepared.signature, prepared.names
        self.name, self.settings = prepared.options.name, prepared.signature.settings
        self.checked, self.lowered = checked, program
        self._function, self._options = prepared.function, prepared.options
        self._call = get_quick_call(program.executable)
        self._is_blocking = read_launch_blocking()
        self._out_tree = checked.out_tree
        self._is_plain = is_leaf_tree(self._out_tree)
        self.probes = ProbeValues(checked.probes) if checked.probes else None
        self._donated = sorted(prepared.donated)
        self._donations = [Donation(self.name, prepared.names[index]) for index in self._donated]
        self._lock = threading.Lock()
        self._calls = 0
        self._order = _make_order(self._spec, wraps=prepared.options.takes_static_leaves)

    @property
    def calls(self) -> int:
        """How often it was called with success; its verification does not count."""
        return self._calls

    def try_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Calls with the arguments, or returns MISS if they have another signature.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            is_checked: True when `check_arguments` has passed them; without it arguments that XLA
                refuses are a MISS, too.
        """
        joined: tuple[Any, ...] | None = args
        if kwargs or len(args) != self._order.arity:
            joined = self._order.join(args, kwargs)
            if joined is None:
                return MISS
        leaves: list[Any] = []
        pairs = zip(self._order.slots, joined, strict=True)
        if not all(slot.collect(value, leaves) for slot, value in pairs):
            return MISS
        if self._donated and not is_checked and self._gives_up_another(leaves):
            return MISS
        donated = [leaves[index] for index in self._donated]
        try:
            results = self.run(leaves)
        except (RuntimeError, ValueError, TypeError):
            # XLA refuses other shardings before it runs.
            if is_checked or any(map(_is_deleted, donated)):
                raise
            return MISS
        consume_leaves(donated, self._donations)
        with self._lock:
            self._calls += 1
        if self.probes is not None:
            count = self._out_tree.num_leaves
            self.probes.keep_leaves(results[count:])
            results = results[:count]
        if self._options.debug_nans:
            check_finite(results, self.checked)
        return results[0] if self._is_plain else self._out_tree.unflatten(results)

    def list_probes(self) -> list[ProbeValues]:
        """Returns what its probes show; nothing without probes."""
        return [] if self.probes is None else [self.probes]

    def run(self, leaves: list[Any]) -> Sequence[Any]:
        """Runs the program on flat leaves, which may be donated; returns its flat results."""
        values = read_leaves(leaves)
        thread = threading.get_ident()
        with _Enqueued.lock:
            if thread != _Enqueued.thread:
                _wait_for_last()
            results = self._call(*values)
            _Enqueued.thread = thread
            _Enqueued.result = weakref.ref(results[0]) if results else None
        return jax.block_until_ready(results) if self._is_blocking else results

    def respell(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns a call with the arguments that this signature has; None if it has others."""
        return self._order.respell(args, kwargs)

    @hides_own_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls with arguments that must have this signature.

        Raises:
            CaptureError: an argument was donated before, or devices are mixed.
            ReplayError: they have another signature; only what differs is shown.
        """
        try:
            return self._call_checked(args, kwargs)
        except InvalidResultsSignal as signal:
            leaves = self._prepare(args, kwargs).leaves
            raise make_invalid_error(signal, leaves, self.names) from None

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedCall:
        return prepare_call(
            self._function,
            self._options,
            args,
            kwargs,
            device=self.lowered.devices[0],
            has_values=True,
            takes_spread=True,
        )

    def _call_checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls with arguments, or says what is wrong with them."""
        result = self.try_call(args, kwargs, False)
        if result is not MISS:
            return result
        found = self._prepare(args, kwargs)
        result = self.try_call(args, kwargs, True)
        if result is MISS:
            raise make_mismatch_error(self._spec, found)
        return result

    def _gives_up_another(self, leaves: Sequence[Any]) -> bool:
        """True when a donated leaf is another argument, too."""
        ids = [*map(id, leaves)]
        if len({*ids}) == len(ids):
            return False
        return any(ids.count(ids[index]) > 1 for index in self._donated)


def _wait_for_last() -> None:
    last = _Enqueued.result() if _Enqueued.result is not None else None
    # A program that has failed says so to those who read its results; donated ones are gone.
    with contextlib.suppress(RuntimeError):
        jax.block_until_ready(last)


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _make_order(call: CallSpec, *, wraps: bool) -> ArgumentOrder:
    leaves, statics = call.signature.leaves, call.signature.statics
    slots: dict[int | str, Any] = {key: StaticSlot(value) for key, value in statics}
    start = 0
    for each in call.arguments:
        stop = start + each.tree.num_leaves
        has_static = wraps and bool(call.statics)
        slots[each.key] = SpreadSlot(each.tree, leaves[start:stop], wraps=has_static)
        start = stop
    return ArgumentOrder(call, slots)


def make_flat(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function under the captured function's name, for XLA's program."""

    def run(*leaves: Any) -> Any:
        return function(*leaves)

    run.__name__ = name if name.isidentifier() else "captured"
    return run
