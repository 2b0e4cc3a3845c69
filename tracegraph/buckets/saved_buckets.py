"""Functions with buckets from a file: the sizes of their buckets, and where results are cut."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

from tracegraph.buckets.analysis import PaddedResult
from tracegraph.buckets.bucket_calls import (
    TRUE_SIZES,
    BucketCalls,
    BucketInfo,
    CheckedBucket,
)
from tracegraph.buckets.bucket_sizes import BucketedAxis, BucketSizes
from tracegraph.buckets.padded_call import pad_call, pad_later
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.constraints.frames import hides_own_frames
from tracegraph.jax_internals import eval_trace, trace_state
from tracegraph.replaying.padded_leaf import pad_leaves
from tracegraph.replaying.replayable_graph import MISS, ReplayableGraph
from tracegraph.runtime.device import Device
from tracegraph.runtime.saving.record_codec import ContentProblem, RecordCodec
from tracegraph.runtime.saving.saved_file import raise_damage
from tracegraph.runtime.streams.stream import is_tracing
from tracegraph.saving.loaded_errors import make_trace_error
from tracegraph.saving.loaded_function import LoadedFunction
from tracegraph.saving.loaded_graphs import LoadedEntry, LoadedParts


@dataclasses.dataclass(frozen=True)
class SavedBuckets:
    """What a file has of a function with buckets beside its graphs.

    Attributes:
        sizes: of its buckets.
        checked: one per signature.
    """

    sizes: BucketSizes
    checked: tuple[CheckedBucket, ...]


_codec = RecordCodec((SavedBuckets, BucketSizes, BucketedAxis, CheckedBucket, PaddedResult))


def encode_buckets(buckets: SavedBuckets) -> dict[str, Any]:
    """Returns the record as JSON; it has no byte strings."""
    return {"buckets": _codec.encode(buckets).tree}


def decode_buckets(tree: Any, parts: LoadedParts) -> SavedBuckets:
    """Returns the record.

    Args:
        tree: of JSON.
        parts: the function that it belongs to.

    Raises:
        SavedFileError: it is not as `encode_buckets` writes it, or does not fit the function.
    """
    try:
        if not isinstance(tree, dict) or tree.keys() != {"buckets"}:
            raise ContentProblem("the header", "it has parts of another kind of function")
        buckets = _codec.decode(tree["buckets"], [], SavedBuckets)
        if len(buckets.checked) != len(parts.entries):
            raise ContentProblem("the buckets", f"they are {len(buckets.checked)}")
        _check_sizes(buckets.sizes)
        for checked, entry in zip(buckets.checked, parts.entries, strict=True):
            _check_bucket(checked, entry, buckets.sizes)
    except ContentProblem as problem:
        raise_damage(parts.source, f"the buckets, {problem.place}", problem.problem)
    return buckets


class LoadedBucketedFunction(LoadedFunction):
    """What `tg.load` returns of a function with buckets: pads, replays and cuts.

    All of a `tg.LoadedFunction` works. A bucket that was not captured when the function was saved
    has no graph: `warm_up()` before `save` captures all of them.

    Args:
        parts: what is known of it.
        device: that its graphs are on.
        pool: that their memory comes from.
        buckets: of the function.

    Attributes:
        checked: what is known of each signature.
        used: the graph of the latest call.

    Example:
        >>> step = tg.capture(lambda x: x + 1, buckets={"x": {0: (2, 4)}})
        >>> _ = step.warm_up(jnp.zeros(1))
        >>> step.save(path.with_suffix(".tg"))
        >>> loaded = tg.load(path.with_suffix(".tg"))
        >>> print(loaded(jnp.zeros(3)), [each.hits for each in loaded.bucket_info()])
        [1. 1. 1.] [0, 1]
    """

    def __init__(
        self, parts: LoadedParts, device: Device, pool: FunctionPool, buckets: SavedBuckets
    ) -> None:
        signatures = [each.call.signature for each in parts.entries]
        self.checked = dict(zip(signatures, buckets.checked, strict=True))
        self.used: list[ReplayableGraph] = []
        self._sizes, self._calls = buckets.sizes, BucketCalls(buckets.sizes)
        super().__init__(parts, device, pool)
        shown = [each for each in parts.parameters if each.name != TRUE_SIZES]
        self.__signature__ = inspect.Signature(shown)

    @hides_own_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pads the arguments to the next bucket, replays its graph and cuts the results.

        Args:
            *args: as the captured function takes them.
            **kwargs: the same.

        Raises:
            CaptureError: an argument is larger than the largest bucket.
            ReplayError: the file has no graph for the bucket or for other arguments.
        """
        if trace_state.value is not eval_trace or is_tracing():
            raise make_trace_error(self.__name__)
        call = pad_call(self._sizes, args, kwargs, pad=pad_later)
        with self._lock:
            return self._calls.replay(call, self)

    def replay_padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays the graph of padded arguments; `used` then holds it."""
        return self._call_generally(args, kwargs)

    def bucket_info(self) -> tuple[BucketInfo, ...]:
        """Returns the hits and the bytes of every bucket, the smallest first."""
        planned = {
            self.checked[each.call.signature].bucket: _read_bytes(each)
            for each in self._parts.entries
        }
        with self._lock:
            return self._calls.list_infos(planned)

    def _list_recent(self) -> Sequence[ReplayableGraph]:
        known = [each for each in self.used if self._graphs.get(each.signature) is each]
        return [*known, *super()._list_recent()]

    def _call_generally(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._graphs:
            # The largest first, so that one memory serves all: Note [One scratch].
            self.restore()
        result = self._try_recent(args, kwargs)
        if result is not MISS:
            return result
        return super()._call_generally(*pad_leaves((args, kwargs)))

    def list_graphs(self, bucket: tuple[int, ...]) -> list[ReplayableGraph]:
        """Returns the graphs of a bucket but for those whose first call is to prove them."""
        with self._lock:
            graphs = [*self._graphs.values()]
        served = [each for each in graphs if self.checked[each.signature].bucket == bucket]
        return [each for each in served if each.signature not in self._unproven]

    def find_device(self) -> Device:
        """Returns the device that the graphs are on."""
        return self._device

    def _use(self, graph: ReplayableGraph) -> None:
        super()._use(graph)
        self.used[:] = [graph]


def _read_bytes(entry: LoadedEntry) -> int:
    return entry.lowered.definition.arena_size.reserved_bytes


def _check_sizes(sizes: BucketSizes) -> None:
    """Refuses sizes that no option `buckets` has."""
    for name, buckets in sizes.buckets.items():
        if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
            raise ContentProblem("the sizes", f"the buckets of {name[:80]!r} do not ascend")
    if {each.size for each in sizes.axes} != sizes.buckets.keys():
        raise ContentProblem("the sizes", "they are not those of the padded axes")
    if not sizes.axes or any(each.axis < 0 for each in sizes.axes):
        raise ContentProblem("the sizes", "a padded axis counts from behind, or there is none")


def _check_bucket(checked: CheckedBucket, entry: LoadedEntry, sizes: BucketSizes) -> None:
    """Refuses a bucket that is not that of its graph's arguments and results."""
    extents = dict(zip(sizes.buckets, checked.bucket, strict=False))
    is_known = all(size in sizes.buckets[name] for name, size in extents.items())
    if len(checked.bucket) != len(sizes.buckets) or not is_known:
        raise ContentProblem("a bucket", f"its sizes are {checked.bucket}")
    start, keys = 0, []
    for each in entry.call.arguments:
        key = sizes.name_position(each.key) if isinstance(each.key, int) else each.key
        keys.append(key)
        stop = start + each.tree.num_leaves
        for leaf in entry.call.signature.leaves[start:stop]:
            for axis, name in sizes.find_axes(key).items():
                if axis >= len(leaf.shape) or leaf.shape[axis] != extents[name]:
                    raise ContentProblem("a bucket", f"axis {axis} of {key!r} is another")
        start = stop
    if not {TRUE_SIZES, *(each.argument for each in sizes.axes)} <= set(keys):
        raise ContentProblem("a bucket", "an argument that is padded is missing")
    if len(checked.results) != len(entry.results.avals):
        raise ContentProblem("a bucket", f"it cuts {len(checked.results)} results")
    for result, aval in zip(checked.results, entry.results.avals, strict=True):
        for axis, name, scale in result.axes:
            extent = aval.shape[axis] if 0 <= axis < len(aval.shape) else None
            if name not in extents or extent != extents[name] * scale:
                raise ContentProblem("a bucket", f"it cuts axis {axis} of {aval.str_short()}")
