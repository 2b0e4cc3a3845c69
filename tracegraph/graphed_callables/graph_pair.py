"""GraphPair: the forward graph of a callable that returns residuals, and its backward graph."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.kept_graph import KeptGraph
from tracegraph.capturing.pipeline import CapturePipeline
from tracegraph.capturing.progress import Progress
from tracegraph.graphed_callables.residuals import BackwardFunction, Pullback
from tracegraph.jax_internals import drop_unit_axes
from tracegraph.options import read_options
from tracegraph.runtime.default_device import find_device
from tracegraph.runtime.device import Device
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.errors import CaptureError, InternalError, UnsupportedError
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.tracing.prepared_call import PreparedCall, prepare_call

_GIVEN = {
    "static_argnums": (),
    "static_argnames": (),
    "donate_argnums": (),
    "donate_argnames": (),
    "mode": "whole",
    "outputs": "fresh",
    "pool": None,
    "stream": None,
    "verify": True,
    "static_leaves": "auto",
    "control_flow": "allow",
    "prefer": "graph",
    "numerics": "xla",
    "debug_nans": False,
    "warm": True,
}
_NONE_GIVEN: Mapping[str, Any] = types.MappingProxyType({})


class Recipe:
    """How the graphs of one captured function, or of one `tg.make_graphed_callables`, are captured.

    Args:
        pool: that they are in.
        options: of the captured function; the others are as `capture` has them by default.
        traces_refused: a backward function that cannot be captured is traced, and is no error.

    Attributes:
        traces_refused: the same.
    """

    def __init__(
        self,
        pool: FunctionPool,
        options: Mapping[str, Any] = _NONE_GIVEN,
        *,
        traces_refused: bool = False,
    ) -> None:
        self._pool, self._given = pool, {**_GIVEN, **options}
        self.traces_refused = traces_refused
        self._graphs: weakref.WeakSet[KeptGraph] = weakref.WeakSet()

    def share_pool(self) -> PoolId:
        """Returns the id of the pool, which other captures may join from now on."""
        return self._pool.share(_find_device())

    def leave_empty_pool(self) -> None:
        """Drops the pool if no graph is in it."""
        if not self._graphs:
            self._pool.leave()

    def prepare(
        self,
        function: Callable[..., Any],
        name: str,
        args: Any,
        kwargs: Any,
        *,
        has_values: bool = True,
    ) -> PreparedCall:
        """Binds, checks and flattens a call; types may replace arrays unless it has values."""
        options = read_options(function, {**self._given, "name": name})
        device = _find_device().jax_device
        return prepare_call(function, options, args, kwargs, device=device, has_values=has_values)

    def capture(self, prepared: PreparedCall) -> KeptGraph:
        """Captures and verifies a graph."""
        progress = Progress(f"capturing `{prepared.options.name}`")
        with drop_unit_axes(prepared.leaves), progress:
            pipeline = CapturePipeline(prepared, _find_device(), self._pool, progress)
            capture = pipeline.capture(_ignore)
        if capture.recipe is None:
            raise InternalError(
                f"the graph of `{prepared.options.name}` has no recipe",
                where="tracegraph/graphed_callables/graph_pair.py",
                why="a callable is captured as a whole, on one device",
            )
        kept = KeptGraph(capture.graph, capture.recipe)
        self._graphs.add(kept)
        return kept


class PulledBack:
    """What the pullbacks of a pair refer to; it holds no graph and no device memory.

    JAX keeps the parameters of ops in caches, long after the ops themselves have gone. So this
    refers to the pair weakly. A pullback that outlives its pair is computed by `jax.jit`.

    Args:
        function: the pullback as a function.
        pair: that has the graph of it.
    """

    def __init__(self, function: BackwardFunction, pair: GraphPair) -> None:
        self._function, self._find_pair = function, weakref.ref(pair)

    def __repr__(self) -> str:
        return f"<PulledBack {self._function.__name__}>"

    def replay(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the gradients of the wanted arguments, as fresh arrays."""
        pair = self._find_pair()
        if pair is None or pair.is_traced:
            return self.trace(residuals, cotangents)
        try:
            return pair.replay_backward(residuals, cotangents)
        except (CaptureError, UnsupportedError):
            if not pair.allow_trace():
                raise
            return self.trace(residuals, cotangents)

    def trace(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the same where a residual or a cotangent is traced."""
        return self._jitted(list(residuals), list(cotangents))

    # Most pullbacks are replayed only.
    @functools.cached_property
    def _jitted(self) -> Any:
        return jax.jit(self._function)


class GraphPair:
    """The forward graph of a callable that returns residuals, and its backward graph.

    Args:
        recipe: of the callable.
        name: of the callable.
        forward: the graph.
        pullback: of the forward function.

    Attributes:
        backward: the backward graph; None until it is captured.
        pulled_back: what pullbacks refer to.
        is_traced: True when the backward function cannot be captured, and is traced instead.
    """

    def __init__(self, recipe: Recipe, name: str, forward: KeptGraph, pullback: Pullback) -> None:
        self.forward, self.pullback = forward, pullback
        self.backward: KeptGraph | None = None
        self.is_traced = False
        self._recipe = recipe
        # Constants are among the residuals, and may be large.
        self._function = BackwardFunction(
            dataclasses.replace(pullback, constants=()), f"{name}.backward"
        )
        self.pulled_back = PulledBack(self._function, self)
        self._lock = threading.Lock()
        self._tangent_types: tuple[Any, ...] | None = None

    def __repr__(self) -> str:
        return f"<GraphPair {self._function.__name__.removesuffix('.backward')}>"

    def find_tangent_types(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the types of the results' tangents; those of all calls are the same."""
        if self._tangent_types is None:
            self._tangent_types = tuple(jax.typeof(each).to_tangent_aval() for each in results)
        return self._tangent_types

    def allow_trace(self) -> bool:
        """Lets JAX trace the backward function from now on; returns False where that is no way."""
        self.is_traced = self._recipe.traces_refused
        return self.is_traced

    def replay_backward(
        self, residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Returns the gradients of the wanted arguments; captures the graph at the first call."""
        args = (list(residuals), list(cotangents))
        if self.backward is None:
            with self._lock:
                if self.backward is None:
                    name = self._function.__name__
                    prepared = self._recipe.prepare(self._function, name, args, {})
                    self.backward = self._recipe.capture(prepared)
        return self.backward.find()(*args)

    def list_graphs(self) -> list[KeptGraph]:
        """Returns the graphs that are captured."""
        return [self.forward] if self.backward is None else [self.forward, self.backward]


def _find_device() -> Device:
    return find_device(is_checking=read_check_replay())


# No other call waits for a capture here.
def _ignore(_graph: object) -> None:
    return
