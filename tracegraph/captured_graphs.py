"""CapturedGraphs: the graphs of one function, one for each signature."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tracegraph.breaks.branching_graph import BranchingGraph
from tracegraph.breaks.make_branching import find_read_violation, make_branching_capture
from tracegraph.capturing.capture_cache import CaptureCache, Replayable
from tracegraph.capturing.capture_queue import CaptureQueue
from tracegraph.capturing.capture_underway import CaptureUnderway
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.lazy_call import LazyCall, compile_lazily, hold_values
from tracegraph.capturing.pipeline import Capture, CapturePipeline
from tracegraph.capturing.progress import Progress
from tracegraph.jax_internals import drop_unit_axes
from tracegraph.options import Options, read_options
from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.replaying.float_checks import adapt_donation
from tracegraph.replaying.jit_call import JitCall
from tracegraph.replaying.released_results import detach_results
from tracegraph.reports.recaptures import Recapture, RecaptureLog
from tracegraph.runtime.default_device import find_device
from tracegraph.runtime.device import Device
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.errors import CaptureError
from tracegraph.tracing.checked_graph import CheckedGraph, trace_and_check
from tracegraph.tracing.prepared_call import PreparedCall, prepare_call
from tracegraph.tracing.signature import Signature
from tracegraph.user_memory.live_plans import watch_plan


class CapturedGraphs:
    """Finds the graph of a call among those of one function, or captures it.

    Args:
        function: that is captured.
        given: the keywords of `capture`.
    """

    def __init__(self, function: Callable[..., Any], given: dict[str, Any]) -> None:
        self._function = function
        self._options: Options = read_options(function, given)
        self._pool = FunctionPool(self._options.pool)
        self._cache = CaptureCache()
        # A CapturedGraph or a JitCall.
        self._latest: Any = None
        self._lock = threading.RLock()
        self._recaptures = RecaptureLog(self._options.name)
        self._underway: dict[Signature, CaptureUnderway] = {}
        self._queue: CaptureQueue | None = None
        if not self._options.warm:
            # Weak: no cycle keeps the function's memory.
            keep = weakref.WeakMethod(self._keep_lazily)
            self._queue = CaptureQueue(self._options.name, keep)

    def _find_graph(
        self, prepared: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Replayable, bool]:
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
                    capture = capture or self._restore_graph(signature)
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

    def _call_lazily(
        self, prepared: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls as `jax.jit` while there is no graph, see Note [Lazy captures]; else a MISS."""
        queue, signature = self._queue, prepared.signature
        if queue is None:
            return MISS
        # In this order: what leaves the queue is in the cache already.
        call = queue.find(signature)
        if call is None:
            with self._lock:
                is_captured = self._find_capture(prepared, args, kwargs) is not None
                if is_captured or self._cache.is_released(signature):
                    return MISS
            call = queue.add(signature)
        with call.lock:
            if call.program is None:
                try:
                    self._begin_lazily(prepared, call)
                except BaseException as error:
                    queue.drop(signature)
                    if not isinstance(error, CaptureError):
                        raise
                    if find_read_violation(error, self._options) is None:
                        raise
                    # `jax.jit` cannot run what reads values: it is captured at once.
                    return MISS
            program = call.program
        if call.wants_values:
            values = hold_values(prepared, copies_all=call.has_lost_values)
            queue.submit(call, values, self._device, self._pool)
        assert program is not None
        return program.call(prepared)

    def _begin_lazily(self, prepared: PreparedCall, call: LazyCall) -> None:
        """Makes what calls of a signature run until it has its graph."""
        recapture, calls = self._explain_recapture(prepared)
        progress = Progress(f"compiling `{self._options.name}`")
        call.program = compile_lazily(prepared, self._device, self._pool, progress)
        with self._lock:
            self._recaptures.add(recapture, calls)

    def _keep_lazily(self, call: LazyCall, capture: Capture) -> None:
        """Adds a graph that was captured in a thread beside, unless it was dropped meanwhile."""
        with self._lock:
            if self._queue is not None and self._queue.is_wanted(call):
                self._keep(capture)

    def _explain_recapture(self, prepared: PreparedCall) -> tuple[Recapture | None, int]:
        """Returns why a call needs a capture, and how many calls there were before it."""
        with self._lock:
            calls, is_full = self._cache.count_calls(), self._cache.is_full
            graphs = [each.graph for each in reversed(self._cache.list_latest())]
            return self._recaptures.explain(prepared, graphs, calls=calls, is_full=is_full), calls

    def _keep(self, capture: Capture) -> None:
        """Adds a capture to the graphs of this function."""
        if isinstance(capture.graph, CapturedGraph):
            watch_plan(capture.graph.lowered.plan, capture.graph.replay)
        with self._lock:
            graphs = [each.graph for each in self._cache.list_latest()]
            if isinstance(capture.graph, JitCall) and not any(map(_holds_memory, graphs)):
                # Nothing is left in it.
                self._pool.leave_unshared()
            self._cache.add(capture)
            self._use(capture.graph)

    def _capture(self, prepared: PreparedCall, underway: CaptureUnderway) -> Replayable:
        recapture, calls = self._explain_recapture(prepared)
        progress = self._make_progress()
        try:
            with drop_unit_axes(prepared.leaves), progress:
                capture = self._make_pipeline(prepared, progress).capture(underway.announce)
        except CaptureError as error:
            if find_read_violation(error, self._options) is None:
                raise
            # Its frames refer to it, and to this function.
            error.__traceback__ = error.__context__ = None
            capture = make_branching_capture(prepared, self._device, self._pool)
        with self._lock:
            self._keep(capture)
            self._recaptures.add(recapture, calls)
        return capture.graph

    def _use(self, captured: Replayable) -> None:
        """Makes a graph the one that was used last."""
        with self._lock:
            if self._cache.use(captured):
                self._latest = captured

    def _release_graphs(self, captures: Sequence[Capture]) -> None:
        """Drops graphs, which are made again when they are called; the caller holds the lock."""
        for capture in captures:
            if isinstance(capture.graph, CapturedGraph):
                detach_results(capture.graph)
                self._cache.release(capture)
            elif isinstance(capture.graph, BranchingGraph):
                capture.graph.release()
        self._latest = None

    def _restore_graph(self, signature: Signature) -> Capture | None:
        """Makes a released graph again, if there is one; the caller holds the lock."""
        capture = self._cache.restore(signature)
        if capture is not None:
            watch_plan(capture.graph.lowered.plan, capture.graph.replay)
        return capture

    def _make_progress(self) -> Progress:
        return Progress(f"capturing `{self._options.name}`")

    def _check(self, prepared: PreparedCall) -> CheckedGraph:
        return trace_and_check(prepared)

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
            takes_spread=self._may_spread(),
        )

    def _make_pipeline(self, prepared: PreparedCall, progress: Progress) -> CapturePipeline:
        pipeline = CapturePipeline(prepared, self._device, self._pool, progress)
        pipeline.takes_spread = self._may_spread()
        return pipeline

    def _may_spread(self) -> bool:
        """True where a call may run on several devices."""
        return True

    # JAX's default device, which is a part of every signature, so that each has a graph of its own.
    @property
    def _device(self) -> Device:
        return find_device(is_checking=read_check_replay())


def _holds_memory(graph: Replayable) -> bool:
    return isinstance(graph, CapturedGraph | BranchingGraph)
