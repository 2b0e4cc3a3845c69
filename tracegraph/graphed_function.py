"""GraphedFunction: what `capture` returns. Finds the graph of a call, or captures a new one.

This file is past 400 lines because each public method carries its documentation with an example.
"""

from __future__ import annotations

import copy
import functools
import os
import pathlib
import threading
import types
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax

from tracegraph.cache_info import CacheInfo
from tracegraph.captured_pickles import list_given, reduce_captured
from tracegraph.capturing.capture_cache import CaptureCache
from tracegraph.capturing.capture_underway import CaptureUnderway
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.capturing.pipeline import Capture, CapturePipeline
from tracegraph.capturing.progress import Progress
from tracegraph.constraints.frames import hide_own_frames, hides_own_frames
from tracegraph.constraints.mismatch import make_refusal_error
from tracegraph.graph_pictures.dump import describe_graph, find_drawer
from tracegraph.graph_pictures.records import GraphData
from tracegraph.jax_internals import (
    InvalidFloatSignal,
    drop_unit_axes,
    eval_trace,
    read_settings,
    trace_state,
)
from tracegraph.objects.graph_objects import has_objects
from tracegraph.objects.object_calls import STATE, ObjectCalls
from tracegraph.options import Options, read_options
from tracegraph.randomness.draws import UnboundDrawsSignal
from tracegraph.randomness.random_calls import RandomCalls, retries_draws
from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.replaying.float_checks import adapt_donation, raise_float_error
from tracegraph.replaying.jit_call import JitCall
from tracegraph.reports.explain import explain_capture
from tracegraph.reports.recaptures import RecaptureLog
from tracegraph.reports.report import Report, read_parts, take_show
from tracegraph.runtime.default_device import find_device
from tracegraph.runtime.device import Device
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.errors import CaptureError
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.stream import is_tracing
from tracegraph.tracing.checked_graph import CheckedGraph, trace_and_check
from tracegraph.tracing.inner_call import InnerCall
from tracegraph.tracing.prepared_call import PreparedCall, prepare_call
from tracegraph.tracing.signature import Signature
from tracegraph.user_memory.live_plans import watch_plan

P = ParamSpec("P")
R = TypeVar("R")
Instance = TypeVar("Instance")
Rest = ParamSpec("Rest")


class GraphedFunction(Generic[P, R]):
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
        self._function = function
        self._options: Options = read_options(function, given)
        self._given = list_given(self._options, given)
        self._inner = InnerCall(function, self._options)
        self._pool = FunctionPool(self._options.pool)
        self._cache = CaptureCache()
        # A CapturedGraph or a JitCall.
        self._latest: Any = None
        # Once it is called with objects of nnx.
        self._objects: ObjectCalls | None = None
        # Once it draws keys from generators.
        self._random: RandomCalls | None = None
        self._takes_states = False
        self._lock = threading.RLock()
        self._recaptures = RecaptureLog(self._options.name)
        self._underway: dict[Signature, CaptureUnderway] = {}
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
        except Exception as error:
            hide_own_frames(error)
            raise

    def _call_generally(
        self, latest: CapturedGraph | JitCall | None, args: tuple[Any, ...], kwargs: dict[str, Any]
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

    def _use(self, captured: CapturedGraph | JitCall) -> None:
        """Makes a graph the one that was used last."""
        with self._lock:
            if self._cache.use(captured):
                self._latest = captured

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
            return trace_and_check(prepared)

    @hides_own_frames
    @retries_draws
    def lower(self, *args: Any, **kwargs: Any) -> LoweredCapture:
        """Returns the compiled and planned capture; takes no memory from the pool.

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
    @retries_draws
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
        target, args, kwargs = self._find_target(args, kwargs)
        if target is not self:
            return target.explain(*args, **kwargs).show(",".join(parts))
        prepared = self._prepare(args, kwargs)
        with self._lock:
            kept = self._find_capture(prepared, args, kwargs)
            recapture = self._recaptures.latest
        progress = Progress(f"explaining `{self._options.name}`")
        with drop_unit_axes(prepared.leaves), progress:
            pipeline = self._make_pipeline(prepared, progress)
            report = explain_capture(prepared, self._device, pipeline, kept, recapture)
        return report.show(",".join(parts))

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
        capture = kept.graph if kept is not None else self.lower(*args, **kwargs)
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

    def cache_info(self) -> CacheInfo:
        """Returns the counts of hits and misses, and of the signatures that are kept."""
        with self._lock:
            info = self._cache.read_info()
            for each in self._list_inner():
                info = info.join(each.cache_info())
            return info

    def reset(self) -> None:
        """Drops all graphs: the next call captures again. Arrays that they returned stay valid."""
        with self._lock:
            self._cache.clear()
            self._latest = None
            self._recaptures.forget()
            self._pool.leave()
            for each in self._list_inner():
                self._cache.add_counts(each.cache_info())
            self._objects = self._random = None

    def clear_cache(self) -> None:
        """Does what `reset` does, and drops what JAX traced for calls inside other programs."""
        self.reset()
        self._inner.clear()

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

    def pool(self) -> PoolId:
        """Returns the id of the private pool; another capture shares it by ``pool=``.

        A function that was called on several devices has a pool on each: it is that of the current
        device, if there is one.

        Example:
            >>> first = tg.capture(jnp.sin)
            >>> second = tg.capture(jnp.cos, pool=first.pool())
            >>> second.pool() == first.pool()
            True
        """
        return self._pool.share(self._device)

    def timings(self) -> dict[str, float]:
        """Returns the seconds that each phase of the latest graph's capture took.

        The phases are ``trace`` (JAX runs the function on abstract values), ``check`` (the graph,
        its passes, the constraints, and what is left of the second trace when XLA is done),
        ``compile`` (JAX and XLA lower and compile the regions, with the second trace beside),
        ``lower`` (cut into regions, read XLA's program, plan, build), ``instantiate``,
        ``verify`` and, with eager parts, ``compare``. They follow one another. `jax.jit` needs
        ``trace`` and ``compile``, too. The dict is empty before the first capture.
        """
        with self._lock:
            latest = next(iter(self._cache.list_latest()), None)
            inner = self._list_inner() if latest is None else []
        if inner:
            return inner[0].timings()
        return dict(latest.seconds) if latest is not None else {}

    @property
    def pool_bytes(self) -> int:
        """Bytes that the private pool holds, on every device that the function was called on."""
        return self._pool.count_bytes()

    def _list_inner(self) -> list[GraphedFunction[..., Any]]:
        """Returns the captured functions that stand for this one in calls of a certain kind."""
        return [each.captured for each in (self._objects, self._random) if each is not None]

    def _find_target(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GraphedFunction[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Returns what captures a call, and its arguments there: objects of nnx as arrays."""
        if not has_objects((args, kwargs)):
            random = self._random
            if random is None:
                return self, args, kwargs
            return random.captured, args, random.add_states(kwargs)
        objects = self._join_objects()
        call = objects.split(args, kwargs)
        return objects.captured, call.args, call.kwargs | {STATE: call.state}

    def _join_objects(self) -> ObjectCalls:
        with self._lock:
            if self._objects is None:
                self._objects = ObjectCalls(self._function, self._options, GraphedFunction)
                # One pool per device, whichever of the two has graphs there.
                self._objects.captured._pool = self._pool
            return self._objects

    def _join_random(self, signal: UnboundDrawsSignal, before: RandomCalls | None) -> None:
        """Makes the states that a call draws from arguments of the function."""
        if self._takes_states:
            # The function that the user has captured knows what to do.
            raise signal
        with self._lock:
            if self._random is not before:
                return
            states = signal.states if before is None else before.extend(signal)
            self._random = RandomCalls(self._function, self._options, GraphedFunction, states)
            self._random.captured._pool = self._pool
            self._random.captured._takes_states = True
            if before is not None:
                self._cache.add_counts(before.captured.cache_info())

    def _call_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function as a part of what JAX traces or computes op by op."""
        # JAX knows objects as trees only: inside another function they are updated directly.
        if has_objects((args, kwargs)):
            return self._function(*args, **kwargs)
        return self._inner(args, kwargs)

    def _call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Looks the signature up, and captures on a miss."""
        # Without jit JAX has other settings, so that no graph has taken the call.
        if is_tracing() or jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self._call_inside(args, kwargs)
        if has_objects((args, kwargs)):
            return self._join_objects()(args, kwargs)
        while True:
            random = self._random
            try:
                call = self._call_plainly if random is None else random
                return call(args, kwargs)
            except UnboundDrawsSignal as signal:
                self._join_random(signal, random)

    def _call_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function with arrays, for its own graphs."""
        prepared = self._prepare(args, kwargs, has_values=True)
        captured, is_new = self._find_graph(prepared, args, kwargs)
        result = captured.try_call(args, kwargs, True)
        if result is MISS:
            raise make_refusal_error(self._options.name)
        with self._lock:
            self._cache.first_calls += is_new
        return result

    def _find_graph(
        self, prepared: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CapturedGraph | JitCall, bool]:
        """Returns the graph of a signature, and whether it was captured for this call.

        Note [Captures at once]. The lock is not held while a signature is captured: verification
        runs eager parts, and what these call may need a graph of this function. Another call of the
        signature waits for the capture, but not for the verification of eager parts, which may wait
        for that very call: it takes another instance of the graph.
        """
        signature = prepared.signature
        while True:
            mine = CaptureUnderway()
            try:
                with self._lock:
                    capture = self._find_capture(prepared, args, kwargs)
                    if capture is not None:
                        self._use(capture.graph)
                        return capture.graph, False
                    underway = self._underway.get(signature)
                    if underway is None or underway.is_abandoned:
                        underway = self._underway[signature] = mine
                if underway is mine:
                    return self._capture(prepared, mine), True
            finally:
                mine.end()
                with self._lock:
                    if self._underway.get(signature) is mine:
                        del self._underway[signature]
            graph = underway.wait()
            if graph is not None:
                return graph, False

    def _find_capture(
        self, prepared: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Capture | None:
        """Returns the capture of a signature, or of one with the same arguments, if there is one.

        The caller holds the lock. See Note [Spellings] for what the same arguments are.
        """
        if (capture := self._cache.find(prepared.signature)) is not None:
            return capture
        for capture in self._cache.list_latest():
            respelled = capture.graph.respell(args, kwargs)
            if respelled is None:
                continue
            try:
                found = self._prepare(*respelled)
            except CaptureError:
                continue  # The default that was left out is no argument of a graph.
            if found.signature == capture.graph.signature:
                return capture
        return None

    def _capture(
        self, prepared: PreparedCall, underway: CaptureUnderway
    ) -> CapturedGraph | JitCall:
        with self._lock:
            calls, is_full = self._cache.count_calls(), self._cache.is_full
            graphs = [each.graph for each in reversed(self._cache.list_latest())]
            recapture = self._recaptures.explain(prepared, graphs, calls=calls, is_full=is_full)
        progress = Progress(f"capturing `{self._options.name}`")
        with drop_unit_axes(prepared.leaves), progress:
            capture = self._make_pipeline(prepared, progress).capture(underway.announce)
        if isinstance(capture.graph, CapturedGraph):
            watch_plan(capture.graph.lowered.plan, capture.graph.replay)
        with self._lock:
            if isinstance(capture.graph, JitCall) and not any(
                isinstance(each, CapturedGraph) for each in graphs
            ):
                # Nothing is left in it.
                self._pool.leave_unshared()
            self._cache.add(capture)
            self._use(capture.graph)
            self._recaptures.add(recapture, calls)
        return capture.graph

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_values: bool = False
    ) -> PreparedCall:
        """Binds, checks and flattens a call; types may replace arrays unless it has values."""
        return prepare_call(
            self._function,
            adapt_donation(self._options),
            args,
            kwargs,
            device=self._device.jax_device,
            has_values=has_values,
        )

    def _make_pipeline(self, prepared: PreparedCall, progress: Progress) -> CapturePipeline:
        return CapturePipeline(prepared, self._device, self._pool, progress)

    # JAX's default device, which is a part of every signature, so that each has a graph of its own.
    @property
    def _device(self) -> Device:
        return find_device(is_checking=read_check_replay())
