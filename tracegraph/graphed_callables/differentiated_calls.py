"""DifferentiatedCalls: calls of a captured function in code that an eager `jax.vjp` differentiates.

Note [Differentiated calls]. There a captured function is a graphed callable: a forward and a
backward graph for each signature and each set of differentiated arguments, captured at the first
such call, and everything else as Note [Differentiation] says. These graphs take nothing over and
return fresh arrays, whatever is donated and `outputs=` says, because a pullback reads arguments and
results later. Static arguments belong to the signature.

Where a graph would not be right, the function is traced into the gradient: when none of its
arguments is differentiated (it may close over what is), when it takes objects of nnx or draws keys
from generators, whose state each call changes, when it may be cut (`mode="partial"`) or is watched
(`debug_nans=True`), when an array is spread over several devices, and when it cannot be captured.
What was refused is remembered by signature.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from tracegraph.cache_info import CacheInfo
from tracegraph.capturing.capture_cache import MAX_SIGNATURES
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.kept_graph import KeptGraph, restore_graphs
from tracegraph.constraints.leaf_kinds import is_array
from tracegraph.graphed_callables.callable_graphs import CallableGraphs
from tracegraph.graphed_callables.graph_pair import Recipe
from tracegraph.graphed_callables.primitives import call_differentiated
from tracegraph.options import Options
from tracegraph.randomness.draws import UnboundDrawsSignal
from tracegraph.replaying.captured_graph import MISS
from tracegraph.reports.explain_gpu import count_nodes
from tracegraph.runtime.errors import CaptureError, UnsupportedError
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import Signature, bind_call, make_signature, name_leaves
from tracegraph.tracing.static_leaves import wrap_static_leaves

REFUSED = (CaptureError, UnsupportedError, UnboundDrawsSignal)
DRAWS, OBJECTS = "it draws keys from generators", "it takes objects of flax.nnx"
_KEPT_OPTIONS = ("stream", "verify", "static_leaves", "control_flow")


class DynamicFunction:
    """A captured function with its static arguments, as a function of the others.

    Args:
        call: of the captured function, without values.
        names: of its dynamic leaves.

    Attributes:
        names: the same.
    """

    def __init__(self, call: PreparedCall, names: Sequence[str]) -> None:
        self._call, self.names = call, names
        functools.update_wrapper(self, call.function, updated=())
        # Its own parameters, not those of the function.
        del self.__dict__["__wrapped__"]

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Calls the function; static leaves of its results are wrapped."""
        return self._call.apply(args, kwargs)


class DifferentiatedCalls:
    """Calls of one captured function as Note [Differentiated calls] says.

    Args:
        function: the user's function.
        options: how it is captured.
        pool: of the captured function.
    """

    def __init__(self, function: Callable[..., Any], options: Options, pool: FunctionPool) -> None:
        self._function, self._options = function, options
        self._recipe = Recipe(
            pool, {name: getattr(options, name) for name in _KEPT_OPTIONS}, traces_refused=True
        )
        # The reason for a signature that is traced; the one that was used last at the end.
        self._graphs: collections.OrderedDict[Signature, CallableGraphs | str] = (
            collections.OrderedDict()
        )
        # How many calls were traced, by the reason.
        self._traced: collections.Counter[str] = collections.Counter()
        self._calls = self._retired_captures = 0
        self._lock = threading.Lock()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays the forward graph of a call; the first one captures it.

        Args:
            args: positional arguments.
            kwargs: keyword arguments; arrays of both may be differentiated.

        Returns:
            The results, or MISS where the function is to be traced.
        """
        if self._options.mode != "whole":
            return self.trace(f"mode={self._options.mode!r} may cut it")
        if self._options.debug_nans:
            return self.trace("debug_nans=True watches its ops")
        call = self._bind(args, kwargs)
        if isinstance(call, str):
            return self.trace(call)
        graphs = self._find_graphs(call)
        if isinstance(graphs, str):
            return self.trace(graphs)
        # In this tree static leaves are leaves.
        dynamic = jax.tree.unflatten(call.signature.tree, call.leaves)
        try:
            result = call_differentiated(graphs, dynamic, {})
        except REFUSED as error:
            reason = DRAWS if isinstance(error, UnboundDrawsSignal) else error.what
            with self._lock:
                self._graphs[call.signature] = reason
            return self.trace(reason)
        with self._lock:
            self._calls += 1
        return result

    def trace(self, reason: str) -> Any:
        """Notes that a call is traced into the gradient; returns MISS.

        Args:
            reason: why.
        """
        with self._lock:
            self._traced[reason] += 1
        return MISS

    def describe(self) -> list[str]:
        """Returns what graphs there are, and why calls were traced; the first line sums up."""
        with self._lock:
            found = list(self._graphs.values())
            traced, calls = self._traced.most_common(), self._calls
        kept = [graphs for graphs in found if not isinstance(graphs, str)]
        pairs = [line for graphs in kept for line in _describe_pairs(graphs)]
        count = sum(graphs.count_pairs() for graphs in kept)
        if not calls and not traced:
            return []
        head = f"gradients: pairs of graphs {count}, calls {calls}"
        if traced:
            head += f"; traced {sum(count for _, count in traced)}: {traced[0][0]}"
        return [head, *pairs, *(f"traced {count}: {reason}" for reason, count in traced)]

    def release(self) -> None:
        """Gives the memory of all pairs back; each graph is made again when it is used."""
        for graph in self._list_graphs():
            graph.release()

    def restore(self) -> None:
        """Makes all graphs again that were released.

        Raises:
            OutOfMemoryError: the pool cannot hold them; those that are missing stay released.
        """
        restore_graphs(self._list_graphs())

    def _list_graphs(self) -> list[KeptGraph]:
        with self._lock:
            found = list(self._graphs.values())
        graphs = [each for each in found if not isinstance(each, str)]
        return [graph for each in graphs for graph in each.list_graphs()]

    def cache_info(self) -> CacheInfo:
        """Returns the counts of calls; a forward graph and its backward graph count as one."""
        with self._lock:
            size, captures = _count(self._graphs.values())
            captures += self._retired_captures
            return CacheInfo(self._calls - captures, captures, MAX_SIGNATURES, size)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedCall | str:
        """Binds and flattens a call; returns why not, if no graph can differentiate it."""
        try:
            bound = bind_call(self._function, self._options, args, kwargs)
        except CaptureError as error:
            return error.what  # JAX says what is wrong with it.
        tree: Any = (bound.args, bound.kwargs)
        if self._options.takes_static_leaves:
            tree = wrap_static_leaves(tree)
        leaves, structure = jax.tree.flatten(tree)
        if not any(isinstance(leaf, Tracer) for leaf in leaves):
            return "no argument of it is differentiated"
        if not all(isinstance(leaf, Tracer) or is_array(leaf) for leaf in leaves):
            return "an argument of it is no array"
        signature = make_signature(bound, leaves, structure)
        return PreparedCall(self._function, self._options, bound, signature, tuple(leaves), ())

    def _find_graphs(self, call: PreparedCall) -> CallableGraphs | str:
        """Returns the graphs of a signature, without any at first; why it is traced, if it is."""
        signature = call.signature
        with self._lock:
            if signature in self._graphs:
                self._graphs.move_to_end(signature)
                return self._graphs[signature]
            args, kwargs = jax.tree.unflatten(signature.tree, call.leaves)
            bound = dataclasses.replace(call.bound, args=args, kwargs=kwargs)
            names, _ = name_leaves(self._function, self._options, bound)
            function, name = DynamicFunction(call.drop_values(), names), self._options.name
            sample = self._recipe.prepare(
                function, name, call.make_abstract_arguments(), {}, has_values=False
            )
            graphs = CallableGraphs(function, name, self._recipe, sample)
            self._graphs[signature] = graphs
            if len(self._graphs) > MAX_SIGNATURES:
                _, dropped = self._graphs.popitem(last=False)
                self._retired_captures += 0 if isinstance(dropped, str) else dropped.captures
            return graphs


def _count(graphs: Iterable[CallableGraphs | str]) -> tuple[int, int]:
    """Returns how many pairs there are, and how many were captured."""
    kept = [each for each in graphs if not isinstance(each, str)]
    return sum(each.count_pairs() for each in kept), sum(each.captures for each in kept)


def _describe_pairs(graphs: CallableGraphs) -> list[str]:
    """Returns a line for each pair: what it differentiates, and its nodes."""
    function: Any = graphs.function
    lines = []
    for wanted, pair in graphs.list_pairs():
        names = ", ".join(f"`{function.names[index]}`" for index in wanted)
        backward = "traced" if pair.is_traced else "not captured yet"
        if pair.backward is not None:
            backward = count_nodes(pair.backward.lowered)
        lines += [
            f"of {names}",
            f"  forward: {count_nodes(pair.forward.lowered)}",
            f"  backward: {backward}",
        ]
    return lines
