"""JitCall: one signature of a captured function that runs as `jax.jit` would, since it is faster.

It takes the place of a graph with eager parts, has its signature, and holds no memory of a pool.
Arguments and results are those of `jax.jit`: plain arrays, donated leaves are deleted.

Note [Other signatures under jit]
`jax.jit` would trace the function anew for other types. Here that is a call for another graph. So
the function that it is given can be traced once: JAX comes back to it only for what is new to it,
and then the call is a MISS. Where JAX has dropped its caches, a call whose signature was checked
gets a new function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tracegraph.jax_internals import make_function
from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.environment import read_launch_blocking
from tracegraph.runtime.jax_interop import to_plain, unwrap_key
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import is_leaf_tree
from tracegraph.tracing.static_leaves import wrap_static_leaves
from tracegraph.tracing.trace import LostTraceError

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
# Of a signed 32-bit integer, what a Python number becomes; larger ones may be refused.
_INT_BITS = 31


class JitCall:
    """The calls of one signature through `jax.jit`.

    Args:
        prepared: the call that it was captured from; its values are not kept.
        jaxpr: what JAX traced, with the precision flags in it.
        graph: what it takes the place of; only what is known of the arguments is kept.
    """

    def __init__(self, prepared: PreparedCall, jaxpr: Any, graph: CapturedGraph) -> None:
        self.signature, self.names = graph.signature, graph.names
        self.name, self.settings = graph.name, graph.settings
        self.checked, self.lowered = graph.checked, graph.lowered
        self._order = graph.order.keep_statics()
        self._jaxpr = jaxpr
        self._device = graph.replay.jax_device
        self._calls = itertools.count()
        self._reads = 0
        self._statics = [
            (index, slot) for index, slot in enumerate(self._order.slots) if slot is not None
        ]
        self._dynamic = [index for index, slot in enumerate(self._order.slots) if slot is None]
        self._donated = [
            place for place, each in enumerate(prepared.list_arguments()) if each.is_donated
        ]
        self._donations = [
            Donation(self.name, prepared.names[index]) for index in sorted(prepared.donated)
        ]
        self._wraps = prepared.options.takes_static_leaves and bool(prepared.list_static_values())
        self._out_tree = graph.checked.out_tree
        self._is_plain = is_leaf_tree(self._out_tree)
        # On several devices `jax.jit` follows its arguments, a captured function does not.
        self._looks_at_devices = len(jax.devices(self._device.platform)) > 1
        self._run = self._make_run()

    @property
    def calls(self) -> int:
        """How often it was called with success."""
        return self.count_calls()

    def count_calls(self) -> int:
        """Returns how often it was called with success; the caller holds the function's lock."""
        # Reading a counter counts, too.
        count = next(self._calls) - self._reads
        self._reads += 1
        return count

    def list_probes(self) -> list[Any]:
        """Returns nothing: a function with probes stays a graph."""
        return []

    def try_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Calls with the arguments, or returns MISS if they have another signature.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            is_checked: True when `check_arguments` has passed them.
        """
        joined: tuple[Any, ...] | None = args
        if kwargs or len(args) != self._order.arity:
            joined = self._order.join(args, kwargs)
            if joined is None:
                return MISS
        if not all(slot.collect(joined[index], []) for index, slot in self._statics):
            return MISS
        values = [joined[index] for index in self._dynamic]
        if self._looks_at_devices and not is_checked and not self._are_here(values):
            return MISS
        donated = [jax.tree_util.tree_leaves(values[place]) for place in self._donated]
        if not is_checked and any(_is_deleted(leaf) for leaves in donated for leaf in leaves):
            return MISS
        taken = self._find_taken(values, donated)
        if taken and not is_checked:
            return MISS
        result = self._call(values, is_checked)
        if result is MISS:
            return MISS
        for array, donation in taken:
            array.consume(donation)
        next(self._calls)
        return result

    def respell(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns a call with the arguments that this signature has; None if it has others."""
        return self._order.respell(args, kwargs)

    def run(self, values: list[Any]) -> Any:
        """Calls the compiled function on dynamic arguments, in the order of the slots.

        Raises:
            LostTraceError: JAX would trace, since it compiled for another signature.
        """
        if self._wraps:
            values = [wrap_static_leaves(value) for value in values]
        results = self._run(*values)
        return results[0] if self._is_plain else self._out_tree.unflatten(results)

    def _call(self, values: list[Any], is_checked: bool) -> Any:
        try:
            return self.run(values)
        except LostTraceError:
            if not is_checked:
                return MISS
        except (RuntimeError, ValueError, TypeError, OverflowError):
            # A callback raises the same types: the arguments tell.
            if is_checked or not self._are_at_fault(values):
                raise
            return MISS
        self._run = self._make_run()
        return self.run(values)

    def _find_taken(
        self, values: list[Any], donated: list[list[Any]]
    ) -> list[tuple[Array, Donation]]:
        """Returns the donated leaves that are in a graph: `jax.jit` cannot delete these."""
        leaves = [unwrap_key(leaf) for each in donated for leaf in each]
        pairs = zip(leaves, self._donations, strict=False)
        taken = [pair for pair in pairs if type(pair[0]) is Array]
        for place in self._donated if taken else ():
            values[place] = jax.tree_util.tree_map(_copy_if_taken, values[place])
        return taken

    def _are_at_fault(self, values: list[Any]) -> bool:
        """True for arguments that `jax.jit` refuses before anything runs."""
        seen: set[int] = set()
        for place, value in enumerate(values):
            for leaf in jax.tree_util.tree_leaves(value):
                if not isinstance(leaf, _ARRAYS):
                    return True
                if isinstance(leaf, jax.Array):
                    # Donated ones were there before the call.
                    if place not in self._donated and leaf.is_deleted():
                        return True
                    if self._donated and id(leaf) in seen:
                        return True
                    seen.add(id(leaf))
                elif isinstance(leaf, int) and leaf.bit_length() > _INT_BITS:
                    return True
        return False

    def _are_here(self, values: list[Any]) -> bool:
        here = {self._device}
        return all(
            leaf.devices() == here
            for leaf in jax.tree_util.tree_leaves(values)
            if isinstance(leaf, jax.Array) and not leaf.is_deleted() and leaf.committed
        )

    def _make_run(self) -> Callable[..., Any]:
        """Returns what `jax.jit` compiles, see Note [Other signatures under jit]."""
        run = jax.jit(_make_flat(make_function(self._jaxpr)), donate_argnums=self._donated)
        return _make_blocking(run) if read_launch_blocking() else run


def _make_blocking(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: jax.block_until_ready(function(*values))


def _make_flat(function: Callable[..., Any]) -> Callable[..., Any]:
    is_traced = False

    def run(*values: Any) -> Any:
        nonlocal is_traced
        if is_traced:
            raise LostTraceError
        is_traced = True
        # JAX has made trees of the user's own again.
        return function(*jax.tree_util.tree_leaves(wrap_static_leaves(values)))

    return run


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _copy_if_taken(leaf: Any) -> Any:
    return jax.numpy.copy(to_plain(leaf)) if type(leaf) is Array else leaf
