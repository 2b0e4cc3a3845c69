"""BucketedFunction: a captured function whose arguments are padded to a few sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.buckets.bucket_calls import TRUE_SIZES, BucketCalls, BucketInfo
from tracegraph.buckets.bucket_graphs import BucketGraphs, make_sized
from tracegraph.buckets.bucket_sizes import BucketSizes, read_buckets
from tracegraph.buckets.errors import make_objects_error, make_option_error
from tracegraph.buckets.padded_call import (
    PaddedCall,
    measure_call,
    pad_call,
    pad_later,
)
from tracegraph.buckets.saved_buckets import SavedBuckets, encode_buckets
from tracegraph.buckets.size_scope import binding_sizes
from tracegraph.capturing.capture_cache import MAX_SIGNATURES
from tracegraph.capturing.progress import Progress
from tracegraph.constraints.frames import hides_own_frames
from tracegraph.graphed_function import GraphedFunction
from tracegraph.jax_internals import eval_trace, trace_state
from tracegraph.objects.graph_objects import has_objects
from tracegraph.options import Options
from tracegraph.randomness.draws import UnboundDrawsSignal
from tracegraph.randomness.random_calls import RandomCalls
from tracegraph.replaying.padded_leaf import pad_leaves
from tracegraph.runtime.streams.stream import is_tracing
from tracegraph.saving.save_captures import Collected
from tracegraph.tracing.inner_call import InnerCall

P = ParamSpec("P")
R = TypeVar("R")


class BucketedFunction(GraphedFunction[P, R]):
    """What `tg.capture` returns with ``buckets=``: pads, replays the bucket's graph, and cuts.

    All of a `tg.GraphedFunction` works; what takes arguments pads them first. Calls follow one
    another, since the graphs have all memory but constants and donated state in common.

    Args:
        function: the user's.
        given: the keywords of `capture`, with ``buckets``.

    Example:
        >>> @tg.capture(buckets={"x": {0: (4, 8)}})
        ... def double(x):
        ...     return x * 2
        >>> print(double(jnp.arange(3.0)))
        [0. 2. 4.]
        >>> [(each.bucket, each.hits) for each in double.bucket_info()]
        [(4, 1), (8, 0)]
    """

    def __init__(self, function: Callable[P, R], given: dict[str, Any]) -> None:
        plain = {key: value for key, value in given.items() if key != "buckets"}
        super().__init__(function, plain)
        self._sizes = read_buckets(function, given["buckets"])
        _check_options(function, self._options, self._sizes)
        self._given = {**self._given, "buckets": given["buckets"]}
        sized = make_sized(function, self._sizes)
        inner = {
            each.name: getattr(self._options, each.name) for each in dataclasses.fields(Options)
        }
        self._graphs = BucketGraphs(sized, inner, self._sizes)
        self._graphs._pool = self._pool
        self._inner = InnerCall(_make_exact(function, self._sizes), self._options)
        self._pad = pad_later
        self._calls = BucketCalls(self._sizes)

    def __setstate__(self, state: tuple[Callable[P, R], dict[str, Any]]) -> None:
        BucketedFunction.__init__(self, *state)

    def __repr__(self) -> str:
        return (
            f"<BucketedFunction {self._options.name}, {self._graphs.cache_info().currsize} graphs>"
        )

    @hides_own_frames
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Pads the arguments to the next bucket, replays its graph and cuts the results.

        Args:
            *args: as the function takes them.
            **kwargs: the same.

        Returns:
            What the function returns for the arguments as they are.

        Raises:
            CaptureError: the function cannot be captured, padding would reach its results, or an
                argument is larger than the largest bucket.
            VerificationError: the new graph differs from `jax.jit`.
            OutOfMemoryError: the pool cannot hold the graph.
        """
        if trace_state.value is not eval_trace or is_tracing():
            return self._inner(args, kwargs)
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self._inner(args, kwargs)
        call = self._pad_call(args, kwargs)
        with self._lock:
            return self._calls.replay(call, self._graphs)

    def bucket_info(self) -> tuple[BucketInfo, ...]:
        """Returns the hits and the bytes of every bucket, the smallest first."""
        with self._lock:
            return self._calls.list_infos(self._graphs.count_planned_bytes())

    def warm_up(self, *args: Any, **kwargs: Any) -> tuple[BucketInfo, ...]:
        """Captures the graphs of all buckets, the largest first, with a progress line.

        All memory is taken by the first of them but for constants and donated state. Nothing is
        called, and nothing that is donated is used up.

        Args:
            *args: arguments of any size; `jax.ShapeDtypeStruct` where only the type matters.
            **kwargs: the same.

        Returns:
            What `bucket_info` returns then: the bytes of every bucket, before the first call.

        Raises:
            CaptureError: as of a call.

        Example:
            >>> step = tg.capture(lambda x: x + 1, buckets={"x": {0: (2, 4)}})
            >>> infos = step.warm_up(jax.ShapeDtypeStruct((1, 3), jnp.float32))
            >>> [each.bucket for each in infos], step.cache_info().captures
            ([2, 4], 2)
        """
        combinations = self._sizes.list_combinations()
        progress = Progress(f"warming up `{self._options.name}`")
        with self._lock, progress:
            self._graphs.is_quiet = True
            try:
                for number, bucket in enumerate(combinations, start=1):
                    progress.enter(f"bucket {number} of {len(combinations)}")
                    call = self._pad_call(args, kwargs, bucket=bucket)
                    # Not the true sizes of the sample: the bucket is verified as it is when full.
                    sizes = {name: np.int32(size) for name, size in bucket.items()}
                    full = pad_leaves((call.args, call.kwargs | {TRUE_SIZES: sizes}))
                    self._graphs.warm_up(*jax.tree.map(_make_value, full))
            finally:
                self._graphs.is_quiet = False
        return self.bucket_info()

    def _pad_call(
        self, args: Any, kwargs: Any, *, bucket: Mapping[str, int] | None = None
    ) -> PaddedCall:
        if has_objects((args, kwargs)):
            raise make_objects_error(self._options.name)
        return pad_call(self._sizes, args, kwargs, pad=self._pad, bucket=bucket)

    def _find_target(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GraphedFunction[..., Any], tuple[Any, ...], dict[str, Any]]:
        call = self._pad_call(args, kwargs)
        sizes = {name: np.int32(size) for name, size in call.true_sizes.items()}
        whole = pad_leaves((call.args, call.kwargs | {TRUE_SIZES: sizes}))
        return self._graphs._find_target(*whole)

    def _join_random(self, signal: UnboundDrawsSignal, before: RandomCalls | None) -> None:
        # The graphs draw, not this function, which never has such calls of its own.
        del before
        self._graphs._join_random(signal, self._graphs._random)

    def _collect(self, *, has_constants: bool) -> Collected:
        return self._graphs._collect(has_constants=has_constants)

    def _encode_extra(self, collected: Collected) -> Any:
        checked = tuple(self._graphs.checked[each] for each in collected.signatures)
        return encode_buckets(SavedBuckets(self._sizes, checked))

    def _list_inner(self) -> list[GraphedFunction[..., Any]]:
        return [self._graphs]


def _make_value(leaf: Any) -> Any:
    """Returns zeros for a type."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf.dtype, np.dtype) and leaf.sharding is None:
        # No program for each shape.
        return np.zeros(leaf.shape, leaf.dtype)
    return jnp.zeros(leaf.shape, leaf.dtype)


def _check_options(function: Callable[..., Any], options: Options, sizes: BucketSizes) -> None:
    """Refuses options that do not go with buckets, and buckets that are too many."""
    count = math.prod(map(len, sizes.buckets.values()))
    if count > MAX_SIGNATURES:
        raise make_option_error(
            function, f"buckets= makes {count} graphs", f"at most {MAX_SIGNATURES} are kept"
        )
    if options.mode != "whole" or options.outputs != "fresh":
        name, value = ("mode", options.mode) if options.mode != "whole" else ("outputs", "static")
        raise make_option_error(
            function,
            f"buckets= is given with {name}={value!r}",
            "the graphs of all buckets share the memory of their arguments and results, which no "
            "eager part and no static result may keep",
        )
    if options.debug_nans:
        raise make_option_error(
            function,
            "buckets= is given with debug_nans=True",
            "what is computed of the padding may be a NaN, which no result keeps",
        )
    if not options.warm:
        raise make_option_error(
            function,
            "buckets= is given with warm=False",
            "what is padded must pass through a checked graph; `warm_up()` makes all of them ahead "
            "of the first call",
        )
    for axis in sizes.axes:
        for word, names, positions in (
            ("static", options.static_argnames, options.static_argnums),
            ("donated", options.donate_argnames, options.donate_argnums),
        ):
            if axis.argument in {*names, *positions, *map(sizes.name_position, positions)}:
                raise make_option_error(
                    function,
                    f"`{axis.argument}` has buckets and is {word}",
                    "what is padded at each call is neither a part of the graph nor stays in it",
                )


def _make_exact(function: Callable[..., Any], sizes: BucketSizes) -> Callable[..., Any]:
    """Returns the function as it is called inside of other programs: nothing is padded."""

    def exact(*args: Any, **kwargs: Any) -> Any:
        found = measure_call(sizes, args, kwargs)
        with binding_sizes(sizes, {name: np.int32(size) for name, size in found.items()}):
            return function(*args, **kwargs)

    vars(exact)["__wrapped__"] = function
    exact.__name__ = getattr(function, "__name__", "function")
    return exact
