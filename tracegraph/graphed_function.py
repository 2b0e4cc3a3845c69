"""GraphedFunction: what `capture` returns."""

from __future__ import annotations

import copy
import functools
import os
import pathlib
import types
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from tracegraph.breaks.branching_graph import BranchingGraph
from tracegraph.call_kinds import CallKinds
from tracegraph.captured_pickles import list_given, reduce_captured
from tracegraph.capturing.capture_cache import Replayable
from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.capturing.progress import Progress
from tracegraph.constraints.frames import hide_own_frames, hides_own_frames
from tracegraph.constraints.spread_errors import make_no_nodes_error
from tracegraph.graph_pictures.dump import describe_graph, find_drawer
from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.jax_internals import (
    InvalidFloatSignal,
    drop_unit_axes,
    eval_trace,
    read_settings,
    trace_state,
)
from tracegraph.lowering.compile_spread import SpreadProgram
from tracegraph.profiling.profile import Profile
from tracegraph.profiling.profile_graph import find_profiled, profile_graph
from tracegraph.randomness.random_calls import retries_draws
from tracegraph.replaying.captured_graph import MISS
from tracegraph.replaying.float_checks import raise_float_error
from tracegraph.replaying.invalid_floats import InvalidResultsSignal, make_invalid_error
from tracegraph.reports.explain import explain_capture
from tracegraph.reports.report import Report, read_parts, take_show
from tracegraph.reports.summary import list_recapture
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.outer_values import find_stale

P = ParamSpec("P")
R = TypeVar("R")
Instance = TypeVar("Instance")
Rest = ParamSpec("Rest")


class GraphedFunction(CallKinds, Generic[P, R]):
    """A function that is captured at its first call and replayed from then on.

    Made by `tg.capture`; type checkers see the parameters P and the result R of the function. Safe
    to call from several threads: replays of one graph follow one another.

    Example:
        >>> step = tg.capture(lambda x: x + 1, name="step")
        >>> step
        <GraphedFunction step, 0 signatures>
        >>> print(step(jnp.zeros(2)), step(jnp.ones(2)))
        [1. 1.] [2. 2.]
        >>> step.cache_info().captures
        1
    """

    __wrapped__: Callable[P, R]
    __name__: str

    def __init__(self, function: Callable[P, R], given: dict[str, Any]) -> None:
        super().__init__(function, given)
        self._given = list_given(self._options, given)
        functools.update_wrapper(self, function, updated=())
        # `jax.grad` and others put what a captured function holds into the function they return.
        held = getattr(function, "__dict__", {})
        vars(self).update({name: held[name] for name in held if not name.startswith("_")})

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Replays the graph of these arguments; captures it first if there is none.

        Args:
            *args: as the function takes them: trees of arrays, and static arguments.
            **kwargs: the same.

        Returns:
            What the function returns, with a `jax.Array` for every array.

        Raises:
            CaptureError: the function cannot be captured; all reasons are named.
            VerificationError: the new graph differs from `jax.jit`.
            OutOfMemoryError: the pool cannot hold the graph.
            InvalidFloatError: with ``debug_nans=True``, a result has a NaN or an infinity.
        """
        # Nothing is spelled out here that is not needed to find the graph, see Note [Hot path].
        latest = self._latest
        try:
            if (
                latest is not None
                and latest.settings == read_settings()
                and trace_state.value is eval_trace
            ):
                result = latest.try_call(args, kwargs, False)
                if result is not MISS:
                    return result
            return self._call_generally(latest, args, kwargs)
        except InvalidFloatSignal as signal:
            raise_float_error(signal, self._function, args, kwargs)
        except InvalidResultsSignal as signal:
            found = self._prepare(args, kwargs, has_values=True)
            raise make_invalid_error(signal, found.leaves, found.names) from None
        except Exception as error:
            hide_own_frames(error)
            raise

    def _call_generally(
        self, latest: Replayable | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Tries other graphs that were used lately, then looks the signature up or captures it."""
        if trace_state.value is not eval_trace:
            return self._call_inside(args, kwargs)
        if latest is None:
            return self._call_slowly(args, kwargs)
        settings = read_settings()
        with self._lock:
            recent = self._cache.list_recent_graphs()
        for captured in recent:
            if captured is latest or captured.settings != settings:
                continue
            result = captured.try_call(args, kwargs, False)
            if result is not MISS:
                self._use(captured)
                return result
        return self._call_slowly(args, kwargs)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> GraphedFunction[P, R]: ...
    @overload
    def __get__(
        self: GraphedFunction[Concatenate[Instance, Rest], R],
        instance: Instance,
        owner: type | None = None,
    ) -> Callable[Rest, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds like a function, so that a method can be captured."""
        return self if instance is None else types.MethodType(self, instance)

    def __copy__(self) -> GraphedFunction[P, R]:
        return type(self)(self._function, self._given)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedFunction[P, R]:
        # Known before its function is copied, which may be a method of an object that holds it.
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__((copy.deepcopy(self._function, memo), self._given))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_captured(self, self._function, self._given)

    def __setstate__(self, state: tuple[Callable[P, R], dict[str, Any]]) -> None:
        GraphedFunction.__init__(self, *state)

    def __repr__(self) -> str:
        return f"<GraphedFunction {self._options.name}, {len(self._cache)} signatures>"

    @hides_own_frames
    @retries_draws
    def trace(self, *args: Any, **kwargs: Any) -> CheckedGraph:
        """Returns the traced, checked and optimised graph, which prints as the IR.

        Args:
            *args: arrays, or `jax.ShapeDtypeStruct` where only the type matters.
            **kwargs: the same.

        Raises:
            CaptureError: the function cannot be captured; all reasons are named.

        Example:
            >>> double = tg.capture(lambda x: x * 2, name="double")
            >>> print(double.trace(jnp.zeros(3)))  # doctest: +ELLIPSIS
            graph double(%0: f32[3]):
              %1: f32[3] = mul %0, 2.0:f32[]  # ...
              return %1
            <BLANKLINE>
        """
        target, args, kwargs = self._find_target(args, kwargs)
        prepared = target._prepare(args, kwargs)
        with drop_unit_axes(prepared.leaves):
            return target._check(prepared)

    @hides_own_frames
    @retries_draws
    def lower(self, *args: Any, **kwargs: Any) -> LoweredCapture:
        """Returns the compiled and planned capture; takes no memory from the pool.

        Over several devices nothing is planned: it is XLA's program, with the other attributes.

        Args:
            *args: arrays, or `jax.ShapeDtypeStruct` where only the type matters.
            **kwargs: the same.

        Raises:
            CaptureError: the function cannot be captured; all reasons are named.

        Example:
            >>> double = tg.capture(lambda x: x * 2)
            >>> double.lower(jax.ShapeDtypeStruct((256,), jnp.float32)).pool_bytes
            2048
        """
        target, args, kwargs = self._find_target(args, kwargs)
        prepared = target._prepare(args, kwargs)
        progress = Progress(f"capturing `{self._options.name}`")
        with drop_unit_axes(prepared.leaves), progress:
            return target._make_pipeline(prepared.drop_values(), progress).run_to_lowered()

    @hides_own_frames
    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Returns a report: what is captured, its cuts, nodes, memory, copies, times and checks.

        The summary has at most 40 lines and says why the function was last captured anew, too. A
        graph that is captured already is reported as it is; else the function is traced and
        compiled for the report alone. One that cannot be captured is explained by its violations.

        Args:
            *args: arrays, or `jax.ShapeDtypeStruct` where only the type matters.
            **kwargs: the same. ``show``, as in ``show="ir,plan,nodes"``, names the parts that
                follow the summary, unless the function itself takes a keyword ``show``; then
                ``explain(...).show("ir,plan,nodes")`` does the same.

        Returns:
            A text, with the parts as attributes.

        Raises:
            ConfigError: ``show`` names no part of a report.

        Example:
            >>> double = tg.capture(lambda x: x * 2, name="double")
            >>> report = double.explain(jnp.zeros(3))
            >>> print(report.splitlines()[0])
            `double` can be captured (mode='whole', outputs='fresh')
            >>> print(report.ir)  # doctest: +ELLIPSIS
            graph double(%0: f32[3]):
              %1: f32[3] = mul %0, 2.0:f32[]  # ...
              return %1
        """
        show, kwargs = take_show(self._function, kwargs)
        parts = read_parts(show)
        gradients = self._differentiated.describe() if self._differentiated is not None else []
        return self._explain(args, kwargs, gradients).show(",".join(parts))

    @retries_draws
    def _explain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: Sequence[str]
    ) -> Report:
        target, args, kwargs = self._find_target(args, kwargs)
        if target is not self:
            return target._explain(args, kwargs, gradients)
        prepared = self._prepare(args, kwargs)
        with self._lock:
            kept = self._find_capture(prepared, args, kwargs)
            history = list_recapture(self._recaptures.latest)
        if kept is not None and kept.recipe is not None:
            history += [f"stale: {s}" for s in find_stale(kept.recipe.outer, self._function)]
        if kept is None and self._queue is not None:
            history += filter(None, [self._queue.describe(prepared.signature)])
        progress = Progress(f"explaining `{self._options.name}`")
        with drop_unit_axes(prepared.leaves), progress:
            pipeline = self._make_pipeline(prepared, progress)
            return explain_capture(prepared, self._device, pipeline, kept, history, gradients)

    @hides_own_frames
    @retries_draws
    def get_graph_data(self, *args: Any, **kwargs: Any) -> GraphData:
        """Returns the nodes, edges and buffers of a call's graph as records; nothing is launched.

        A graph that is captured already is read as it is; else the function is traced and compiled
        for this alone. It holds no memory of the device and no executable.

        Args:
            *args: arrays, or `jax.ShapeDtypeStruct` where only the type matters.
            **kwargs: the same.

        Raises:
            CaptureError: the function cannot be captured; all reasons are named.

        Example:
            >>> double = tg.capture(lambda x: x * 2, name="double")
            >>> data = double.get_graph_data(jnp.zeros(3))
            >>> [node.kind for node in data.nodes], data.critical_path()
            (['call'], (0,))
        """
        target, args, kwargs = self._find_target(args, kwargs)
        if target is not self:
            return target.get_graph_data(*args, **kwargs)
        prepared = self._prepare(args, kwargs)
        with self._lock:
            kept = self._find_capture(prepared, args, kwargs)
        if kept is None or isinstance(kept.graph, BranchingGraph):
            # Of several graphs it says why they are not one.
            capture = self.lower(*args, **kwargs)
        else:
            capture = kept.graph
        if isinstance(capture.lowered, SpreadProgram):
            raise make_no_nodes_error(self._options.name, capture.lowered)
        return describe_graph(capture.checked, capture.lowered)

    @hides_own_frames
    def debug_dump(self, path: str | os.PathLike[str], /, *args: Any, **kwargs: Any) -> None:
        """Writes a call's graph as a file: a picture, or DOT text for Graphviz.

        The picture has one row per level, nodes that may run side by side beside each other, and
        the critical path in red. It needs no other file and no program but a browser.

        Args:
            path: ends in ``.svg`` or ``.dot``; a file of this name is replaced.
            *args: arrays, or `jax.ShapeDtypeStruct` where only the type matters.
            **kwargs: the same.

        Raises:
            CaptureError: the function cannot be captured; all reasons are named.
            ConfigError: the path ends in something else.

        Example:
            >>> tg.capture(lambda x: x * 2).debug_dump(path.with_suffix(".svg"), jnp.zeros(3))
            >>> path.with_suffix(".svg").read_text()[:5]
            '<svg '
        """
        draw = find_drawer(path)
        text = draw(self.get_graph_data(*args, **kwargs))
        pathlib.Path(path).write_text(text, encoding="utf-8")

    @hides_own_frames
    @retries_draws
    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Returns the time of every node of a call's graph, and its critical path.

        Each node is timed alone on the device, again and again, at its place in a replay. The
        graph itself is not launched: it is done in a second instance with memory of its own, so
        that state, donated leaves, results and random numbers are as before. Only what Python
        code of eager parts does is done a few times more.

        Args:
            *args: arrays, as for a call; none is donated.
            **kwargs: the same.

        Returns:
            A record that prints as a report by your lines; `Profile.save` writes a picture.

        Raises:
            ReplayError: the arguments have no graph: call the function first.
            OutOfMemoryError: there is no memory for the second instance.

        Example:
            >>> double = tg.capture(lambda x: x * 2, name="double")
            >>> y = double(jnp.zeros(3))
            >>> profile = double.profile(jnp.zeros(3))
            >>> profile.critical_path(), profile.whole_us > 0, profile.nodes[0].warm_us > 0
            ((0,), True, True)
        """
        target, args, kwargs = self._find_target(args, kwargs)
        if target is not self:
            return target.profile(*args, **kwargs)
        prepared = self._prepare(args, kwargs, has_values=True)
        with self._lock:
            kept = self._find_capture(prepared, args, kwargs)
        graph = find_profiled(self._options.name, None if kept is None else kept.graph)
        respelled = graph.respell(args, kwargs)
        if graph.signature != prepared.signature and respelled is not None:
            prepared = self._prepare(*respelled, has_values=True)
        return profile_graph(graph, prepared.leaves, self._device)

    @hides_own_frames
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the types of the results without capturing, as `jax.eval_shape` does.

        Args:
            *args: arrays, or `jax.ShapeDtypeStruct` where only the type matters.
            **kwargs: the same.

        Example:
            >>> tg.capture(lambda x: x * 2).eval_shape(jnp.zeros(3))
            ShapeDtypeStruct(shape=(3,), dtype=float32)
        """
        return self._inner.eval_shape(args, kwargs)
