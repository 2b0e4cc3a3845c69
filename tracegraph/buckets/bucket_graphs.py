"""BucketGraphs: the graphs of a function with buckets, one per bucket, each checked for padding."""

from __future__ import annotations

import dataclasses
import fractions
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tracegraph.buckets.analysis import PaddedResult, analyze_padding
from tracegraph.buckets.bucket_calls import TRUE_SIZES, CheckedBucket
from tracegraph.buckets.bucket_sizes import BucketSizes
from tracegraph.buckets.size_scope import binding_sizes
from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.capturing.pipeline import CapturePipeline
from tracegraph.capturing.progress import Progress
from tracegraph.constraints.violation import make_capture_error
from tracegraph.graphed_function import GraphedFunction
from tracegraph.ir.graph import Graph
from tracegraph.jax_internals import InvalidFloatSignal, read_settings
from tracegraph.passes.dead_code import DeadCode
from tracegraph.passes.inline_calls import InlineCalls
from tracegraph.passes.pipeline import rewrite_graph
from tracegraph.probing.probe_errors import make_bucket_error
from tracegraph.randomness.draws import UnboundDrawsSignal
from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.replaying.float_checks import raise_float_error
from tracegraph.replaying.padded_leaf import pad_leaves
from tracegraph.reports.recaptures import RecaptureLog
from tracegraph.runtime.device import Device
from tracegraph.tracing.checked_graph import CheckedGraph, FirstTrace, trace_call
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import LeafType, Signature
from tracegraph.tracing.trace import JaxTrace, build_traced

_PASSES = (InlineCalls(), DeadCode())


class BucketPipeline(CapturePipeline):
    """The phases of a capture of one bucket: its trace is checked for padding, too.

    Args:
        sizes: of the function.
        checked: what was found of each signature; it is added to.
        make_room: is told how much scratch the graph needs.
        *arguments: as of a `CapturePipeline`.
    """

    shares_arguments = True

    def __init__(
        self,
        sizes: BucketSizes,
        checked: dict[Signature, CheckedBucket],
        make_room: Callable[[int], None],
        *arguments: Any,
    ) -> None:
        super().__init__(*arguments)
        self._sizes, self._checked, self._make_room = sizes, checked, make_room

    def instantiate(self, lowered: LoweredCapture) -> CapturedGraph:
        """Makes the graph executable; smaller ones give their memory back if it needs more."""
        self._make_room(lowered.lowered.definition.arena_size.scratch_bytes)
        return super().instantiate(lowered)

    def finish_checks(self, first: FirstTrace) -> None:
        """Refuses probes, and follows what is padded through the graph, while XLA compiles."""
        super().finish_checks(first)
        if first.traced.probes:
            probe = first.traced.probes[0]
            raise make_bucket_error(probe.name, probe.source)
        found = check_padding(self._prepared, first.traced.graph, self._sizes)
        self._checked[self._prepared.signature] = found


class BucketGraphs(GraphedFunction[..., Any]):
    """The captured function behind one with buckets: its arguments are padded already.

    Args:
        function: the user's, with the true sizes as one more keyword.
        given: the keywords of `capture`.
        sizes: of the function.

    Attributes:
        checked: what was found of each signature.
        used: the graph of the latest call; what is in it before a call is tried first.
        is_quiet: True while the progress of a warm-up is shown.
    """

    def __init__(
        self, function: Callable[..., Any], given: dict[str, Any], sizes: BucketSizes
    ) -> None:
        super().__init__(function, given)
        self._sizes = sizes
        expected = len(sizes.list_combinations())
        self._recaptures = RecaptureLog(self._options.name, expected=expected)
        self.checked: dict[Signature, CheckedBucket] = {}
        self.used: list[CapturedGraph] = []
        self.is_quiet = False

    # The graphs of all sizes share memory of one device's pool.
    def _may_spread(self) -> bool:
        return False

    def list_graphs(self, bucket: tuple[int, ...]) -> list[Any]:
        """Returns the graphs of a bucket, the one used last first."""
        with self._lock:
            graphs = [each.graph for each in self._cache.list_latest()]
        return [each for each in graphs if self.checked[each.signature].bucket == bucket]

    def find_device(self) -> Device:
        """Returns the device that the graphs are on."""
        return self._device

    def replay_padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays the graph of padded arguments; `used` then holds it."""
        return self(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays the graph of padded arguments; `used` then holds it."""
        try:
            result = self._try_known(args, kwargs)
            if result is not MISS:
                return result
            # A new signature is verified with whole arguments.
            args, kwargs = pad_leaves((args, kwargs))
            return self._call_slowly(args, kwargs)
        except InvalidFloatSignal as signal:
            raise_float_error(signal, self._function, args, kwargs)

    def warm_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Captures the graph of padded arguments, unless there is one; nothing is called."""
        while True:
            before = self._random
            target, args_there, kwargs_there = self._find_target(args, kwargs)
            try:
                prepared = target._prepare(args_there, kwargs_there, has_values=True)
                target._find_graph(prepared, args_there, kwargs_there)
            except UnboundDrawsSignal as signal:
                self._join_random(signal, before)
            else:
                return

    def _make_room(self, scratch_bytes: int) -> None:
        """Releases graphs with less scratch, so that one memory serves all, Note [One scratch].

        Note [One scratch]. A graph uses the smallest scratch of its pool that is large enough.
        Where a larger bucket is captured after a smaller one, there would be two. So the graphs of
        smaller ones are released before, which lets their memory go, and made again at their next
        call.
        """
        with self._lock:
            smaller = _list_smaller(self._cache.list_latest(), scratch_bytes)
            self._release_graphs(smaller)
            if smaller:
                self.used.clear()

    def _make_progress(self) -> Progress:
        return Progress(f"capturing `{self._options.name}`", is_quiet=self.is_quiet)

    def _holds(self, captured: CapturedGraph) -> bool:
        capture = self._cache.find(captured.signature)
        return capture is not None and capture.graph is captured

    def _use(self, captured: Any) -> None:
        super()._use(captured)
        self.used[:] = [captured]

    def _try_known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tries the bucket's graph, then others; holds none of them where the call is a MISS."""
        settings = read_settings()
        for list_graphs in (self._list_used, self._list_recent):
            for captured in list_graphs():
                if captured.settings != settings:
                    continue
                result = captured.try_call(args, kwargs, False)
                if result is not MISS:
                    self._use(captured)
                    return result
        return MISS

    def _list_used(self) -> list[CapturedGraph]:
        with self._lock:
            return [*filter(self._holds, self.used)]

    def _list_recent(self) -> list[Any]:
        with self._lock:
            return self._cache.list_recent_graphs()

    def count_planned_bytes(self) -> dict[tuple[int, ...], int]:
        """Returns the bytes of each bucket's graph in a pool of its own, by the bucket's sizes."""
        planned: dict[tuple[int, ...], int] = {}
        if self._random is not None:
            planned = self._random.captured.count_planned_bytes()
        with self._lock:
            for capture in self._cache.list_latest():
                size = capture.graph.replay.definition.arena_size
                planned[self.checked[capture.graph.signature].bucket] = size.reserved_bytes
        return planned

    def _make_inner(
        self, function: Callable[..., Any], given: dict[str, Any]
    ) -> GraphedFunction[..., Any]:
        inner = BucketGraphs(function, given, self._sizes)
        inner.checked, inner.used = self.checked, self.used
        return inner

    def _check(self, prepared: PreparedCall) -> CheckedGraph:
        checked = super()._check(prepared)
        graph = _build(prepared, trace_call(prepared, is_repeated=True))
        check_padding(prepared, graph, self._sizes)
        return checked

    def _make_pipeline(self, prepared: PreparedCall, progress: Progress) -> CapturePipeline:
        return BucketPipeline(
            self._sizes, self.checked, self._make_room, prepared, self._device, self._pool, progress
        )


def _list_smaller(captures: Iterable[Any], scratch_bytes: int) -> list[Any]:
    """Returns the captures that need less scratch, and are in memory with less."""
    return [
        each
        for each in captures
        if each.graph.replay.definition.arena_size.scratch_bytes < scratch_bytes
        and each.graph.replay.arena.scratch_bytes < scratch_bytes
    ]


def make_sized(function: Callable[..., Any], sizes: BucketSizes) -> Callable[..., Any]:
    """Returns the function that is captured in the place of the user's function."""

    def sized(*args: Any, bucket_sizes: Mapping[str, Any], **kwargs: Any) -> Any:
        with binding_sizes(sizes, bucket_sizes):
            return function(*args, **kwargs)

    functools.update_wrapper(sized, function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return sized
    extra = inspect.Parameter(TRUE_SIZES, inspect.Parameter.KEYWORD_ONLY)
    is_last = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - is_last, extra)
    vars(sized)["__signature__"] = inspect.Signature(parameters)
    return sized


def check_padding(prepared: PreparedCall, graph: Graph, sizes: BucketSizes) -> CheckedBucket:
    """Checks that no padding reaches the results, see Note [Two traces].

    Args:
        prepared: a call with padded arguments.
        graph: its trace.
        sizes: of the function.

    Returns:
        The bucket.

    Raises:
        CaptureError: padding would reach them; all such ops are named.
    """
    extents = _list_extents(prepared, sizes)
    bucket: dict[str, int] = {}
    for (_, axes), leaf in zip(extents, prepared.signature.leaves, strict=True):
        bucket.update({name: leaf.shape[axis] for axis, name in axes.items()})
    key = tuple(bucket[name] for name in sizes.buckets)
    if all(size == 1 for size in bucket.values()):
        # A bucket of 1 is never padded, and an axis of extent 1 means something else to JAX.
        return CheckedBucket(key, (PaddedResult(()),) * len(graph.outputs))
    padded = {name: size for name, size in bucket.items() if size > 1}
    probes = {**bucket, **_choose_probes(padded, sizes)}
    leaves = tuple(
        _change_shape(leaf, {axis: probes[name] for axis, name in axes.items()})
        for (_, axes), leaf in zip(extents, prepared.signature.leaves, strict=True)
    )
    other = dataclasses.replace(
        prepared, signature=dataclasses.replace(prepared.signature, leaves=leaves)
    )
    # Before other passes: what is equal at one size only must not become one value.
    graph, twin = (
        rewrite_graph(each, _PASSES).graph
        for each in (graph, _build(prepared, trace_call(other, is_repeated=True)))
    )
    pairs = {name: (size, probes[name]) for name, size in bucket.items()}
    true_sizes = {index: name for index, (name, _) in enumerate(extents) if name is not None}
    results, violations = analyze_padding(graph, twin, pairs, true_sizes)
    if violations:
        raise make_capture_error(violations, graph_name=graph.name, graph=graph)
    return CheckedBucket(key, results)


def _build(prepared: PreparedCall, trace: JaxTrace) -> Graph:
    return build_traced(trace, capturing_stream=prepared.options.stream.number).graph


def _list_extents(
    prepared: PreparedCall, sizes: BucketSizes
) -> list[tuple[str | None, dict[int, str]]]:
    """Returns for each dynamic leaf the true size that it is, or its bucketed axes."""
    listed: list[tuple[str | None, dict[int, str]]] = []
    for each in prepared.list_arguments():
        key = sizes.name_position(each.key) if isinstance(each.key, int) else each.key
        if key == TRUE_SIZES:
            # In the order of JAX's trees.
            listed += [(name, {}) for name in sorted(sizes.buckets)]
        else:
            listed += [(None, sizes.find_axes(key))] * each.tree.num_leaves
    return listed


def _choose_probes(bucket: Mapping[str, int], sizes: BucketSizes) -> dict[str, int]:
    """Returns the sizes of the other trace: the least that the bucket serves, where it can be.

    What is the same for the least and for the largest size of a bucket is taken to be the same in
    between. Extents of two sizes must not be mistaken for one another, so ratios differ; and an
    axis of extent 1 means something else to JAX.
    """
    probes: dict[str, int] = {}
    ratios: set[fractions.Fraction] = set()
    for name, size in bucket.items():
        smaller = [each for each in sizes.buckets[name] if each < size]
        least = max(smaller[-1] + 1 if smaller else 1, 2)
        candidates = itertools.chain(range(least, size), itertools.count(size + 1))
        probes[name] = next(n for n in candidates if fractions.Fraction(n, size) not in ratios)
        ratios.add(fractions.Fraction(probes[name], size))
    return probes


def _change_shape(leaf: LeafType, extents: Mapping[int, int]) -> LeafType:
    shape = tuple(extents.get(axis, extent) for axis, extent in enumerate(leaf.shape))
    return dataclasses.replace(leaf, shape=shape)
