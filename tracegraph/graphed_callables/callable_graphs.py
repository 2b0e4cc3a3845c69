"""CallableGraphs: the graphs of one callable, which take one signature."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.capturing.kept_graph import KeptGraph
from tracegraph.graphed_callables.callable_errors import make_signature_error
from tracegraph.graphed_callables.graph_pair import GraphPair, Recipe
from tracegraph.graphed_callables.module_function import ModuleFunction
from tracegraph.graphed_callables.object_function import ObjectFunction
from tracegraph.graphed_callables.residuals import ForwardFunction
from tracegraph.jax_internals import InvalidFloatSignal, read_settings
from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.replaying.float_checks import raise_float_error
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.spellings import read_spellings


class CallableGraphs:
    """The graphs of one callable: one that computes results only, and pairs that differentiate.

    Args:
        function: the callable.
        name: in reports and errors.
        recipe: how its graphs are captured.
        sample: a call that all others must be like.

    Attributes:
        function: what is captured.
        name: of its graphs.
        captures: forward graphs with residuals that were captured so far.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, recipe: Recipe, sample: PreparedCall
    ) -> None:
        self.function, self.name, self._recipe = function, name, recipe
        # Values are not kept.
        self._sample = sample.drop_values()
        self._spellings = read_spellings(function, sample.options)
        # By JAX's settings; pairs by the differentiated leaves, too.
        self._plain: dict[Any, KeptGraph] = {}
        self._pairs: dict[Any, GraphPair] = {}
        self.captures = 0
        self._lock = threading.RLock()

    def __deepcopy__(self, _memo: dict[int, Any]) -> CallableGraphs:
        # A copy of a module has arrays of its own, and the same graphs.
        return self

    @property
    def user_function(self) -> Callable[..., Any]:
        """The callable as the user calls it, with a module as its first argument."""
        function = self.function
        is_ours = isinstance(function, ObjectFunction | ModuleFunction)
        return function.function if is_ours else function

    def count_graphs(self) -> int:
        """Returns how many graphs are captured."""
        with self._lock:
            backward = sum(pair.backward is not None for pair in self._pairs.values())
            return len(self._plain) + len(self._pairs) + backward

    def count_pairs(self) -> int:
        """Returns how many pairs of graphs are kept."""
        with self._lock:
            return len(self._pairs)

    def list_pairs(self) -> list[tuple[tuple[int, ...], GraphPair]]:
        """Returns the pairs that are kept, each after the indices of what it differentiates."""
        with self._lock:
            return [(wanted, pair) for (wanted, _), pair in self._pairs.items()]

    def normalize(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a call with what can be given by position given so."""
        return self._spellings.normalize(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays the graph that computes results only; captures it at its first call."""
        graph = self._plain.get(settings := read_settings())
        if graph is None:
            with self._lock:
                graph = self._plain.get(settings)
                if graph is None:
                    prepared = self._prepare(self.function, args, kwargs)
                    graph = self._plain[settings] = self._recipe.capture(prepared)
        return self._replay(graph.find(), args, kwargs)

    def call_forward(
        self, tree: Any, leaves: Sequence[Any], wanted: tuple[int, ...]
    ) -> tuple[list[Any], list[Any], GraphPair]:
        """Replays a forward graph; captures it at the first call that differentiates these leaves.

        Args:
            tree: of the arguments.
            leaves: the flat arguments, none of them traced.
            wanted: the indices of those that are differentiated.

        Returns:
            The flat results, the residuals, and the pair whose backward graph takes them.
        """
        # A NumPy array may change before the pullback reads it.
        leaves = [jax.numpy.array(x) if isinstance(x, np.ndarray) else x for x in leaves]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        pair = self._find_pair(args, kwargs, wanted)
        results, fresh, _statics = self._replay(pair.forward.find(), args, kwargs)
        return results, pair.pullback.join_residuals(leaves, results, fresh), pair

    def reset(self) -> None:
        """Drops all graphs; the next calls capture again."""
        with self._lock:
            self._plain.clear()
            self._pairs.clear()
            self._recipe.leave_empty_pool()

    def list_graphs(self) -> list[KeptGraph]:
        """Returns all graphs that are captured, released ones among them."""
        with self._lock:
            plain, pairs = list(self._plain.values()), list(self._pairs.values())
        return [*plain, *(graph for pair in pairs for graph in pair.list_graphs())]

    def share_pool(self) -> PoolId:
        """Returns the id of the pool, which other captures may join from now on."""
        return self._recipe.share_pool()

    def _find_pair(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: tuple[int, ...]
    ) -> GraphPair:
        key = (wanted, read_settings())
        pair = self._pairs.get(key)
        if pair is not None:
            return pair
        with self._lock:
            pair = self._pairs.get(key)
            if pair is None:
                function = ForwardFunction(self.function, wanted)
                forward = self._recipe.capture(self._prepare(function, args, kwargs))
                pair = GraphPair(self._recipe, self.name, forward, function.pullback)
                self._pairs[key] = pair
                self.captures += 1
            return pair

    def _prepare(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PreparedCall:
        """Binds and checks a call, which must have the signature of the sample."""
        prepared = self._recipe.prepare(function, self.name, args, kwargs)
        wanted, got = self._sample.signature, prepared.signature
        if (wanted.tree, wanted.leaves) != (got.tree, got.leaves):
            raise make_signature_error(self._sample, prepared)
        return prepared

    def _replay(self, graph: CapturedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            result = graph.try_call(args, kwargs, False)
        except InvalidFloatSignal as signal:
            raise_float_error(signal, self.function, args, kwargs)
        if result is not MISS:
            return result
        self._prepare(self.function, args, kwargs)
        return graph(*args, **kwargs)
