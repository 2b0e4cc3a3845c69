"""BucketCalls: the calls of a function with buckets, from padded arguments to cut results."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from tracegraph.buckets.analysis import PaddedResult
from tracegraph.buckets.bucket_sizes import BucketSizes
from tracegraph.buckets.padded_call import PaddedCall, cut_results
from tracegraph.replaying.replayable_graph import ReplayableGraph
from tracegraph.runtime.device import Device
from tracegraph.runtime.jax_interop import make_aval, to_immutable, uncommit
from tracegraph.tracing.signature import Signature

TRUE_SIZES = "bucket_sizes"
# Of one graph; a scalar each on the device.
MAX_SIZE_TREES = 256
_SIZE = make_aval((), np.int32)


@dataclasses.dataclass(frozen=True)
class BucketInfo:
    """One bucket of a captured function.

    Attributes:
        bucket: its size; of several sizes, each by its name.
        hits: calls that it served.
        full: those of them that needed no padding.
        pool_bytes: what its graph takes from a pool of its own; None before it is captured.

    Example:
        >>> step = tg.capture(lambda x: x + 1, buckets={"x": {0: (2, 4)}})
        >>> _ = step(jnp.zeros(3)), step(jnp.zeros(4))
        >>> step.bucket_info()[1].hits, step.bucket_info()[1].full
        (2, 1)
    """

    bucket: int | Mapping[str, int]
    hits: int
    full: int
    pool_bytes: int | None


@dataclasses.dataclass(frozen=True)
class CheckedBucket:
    """One bucket that was checked for padding.

    Attributes:
        bucket: its sizes, in the order of the function's.
        results: where each flat result is cut.
    """

    bucket: tuple[int, ...]
    results: tuple[PaddedResult, ...]


class PaddedGraphs(Protocol):
    """The graphs of all buckets.

    Attributes:
        checked: what is known of each signature.
        used: the graph of the latest call; what is in it before a call is tried first.
    """

    checked: dict[Signature, CheckedBucket]
    used: list[Any]

    def list_graphs(self, bucket: tuple[int, ...]) -> list[Any]:
        """Returns the graphs of a bucket, of all signatures, that have their memory."""
        ...

    def find_device(self) -> Device:
        """Returns the device that the graphs are on."""
        ...

    def replay_padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays the graph of padded arguments; `used` then holds it."""
        ...


@dataclasses.dataclass(frozen=True)
class Served:
    """The graph that served a bucket's latest call, and what its next calls need.

    Attributes:
        graph: not held: it is made again after a release.
        device: that it is on.
        results: where each flat result is cut.
        size_trees: the argument with the true sizes, on the device, by the sizes.
    """

    graph: weakref.ref[ReplayableGraph]
    device: Device
    results: tuple[PaddedResult, ...]
    size_trees: dict[tuple[int, ...], dict[str, Any]]

    def find_sizes(self, true_sizes: Mapping[str, int]) -> dict[str, Any]:
        """Returns the argument with the true sizes; it is copied to the device once."""
        key = tuple(true_sizes.values())
        found = self.size_trees.get(key)
        if found is None:
            if len(self.size_trees) >= MAX_SIZE_TREES:
                self.size_trees.clear()
            found = {name: self._place(size) for name, size in true_sizes.items()}
            self.size_trees[key] = found
        return found

    def _place(self, size: int) -> jax.Array:
        with jax.transfer_guard("allow"):
            placed = to_immutable(np.full((), size, np.int32), _SIZE, self.device.jax_device)
        # A call for another device must not take it for the user's own choice.
        return uncommit(placed)


class BucketCalls:
    """The calls of a function with buckets, and how many each bucket has served.

    Args:
        sizes: of the function.
    """

    def __init__(self, sizes: BucketSizes) -> None:
        self._sizes = sizes
        self._served: dict[tuple[int, ...], Served] = {}
        self._hits: dict[tuple[int, ...], list[int]] = {}

    def replay(self, call: PaddedCall, graphs: PaddedGraphs) -> Any:
        """Replays the graph of a bucket; the caller holds the function's lock.

        Note [Shared arguments]. The graphs of all buckets have their arguments and results in the
        same memory, so nothing may be left there after a call: results that are in it are copied
        or cut, and no call takes an argument for unchanged: `Replay.shares_inputs`.

        Args:
            call: padded.
            graphs: of all buckets.
        """
        key = tuple(call.bucket[name] for name in self._sizes.buckets)
        served = self._served.get(key)
        known = None if served is None else served.graph()
        graphs.used[:] = graphs.list_graphs(key) if known is None else [known]
        if served is None:
            sizes: dict[str, Any] = {n: np.int32(size) for n, size in call.true_sizes.items()}
        else:
            sizes = served.find_sizes(call.true_sizes)
        result = graphs.replay_padded(call.args, {**call.kwargs, TRUE_SIZES: sizes})
        used = graphs.used.pop()
        if served is None or used is not known:
            results = graphs.checked[used.signature].results
            served = Served(weakref.ref(used), graphs.find_device(), results, {})
            self._served[key] = served
        leaves, tree = jax.tree.flatten(result)
        # With the last name of a result its copy is saved: `settle` copies what is still held.
        del result, known
        if not call.is_full:
            leaves = cut_results(leaves, served.results, call.true_sizes, served.device)
        with used.lock:
            used.replay.settle()
        counts = self._hits.setdefault(key, [0, 0])
        counts[0] += 1
        counts[1] += call.is_full
        return jax.tree.unflatten(tree, leaves)

    def list_infos(self, planned: Mapping[tuple[int, ...], int]) -> tuple[BucketInfo, ...]:
        """Returns the hits and the bytes of every bucket, the smallest first.

        Args:
            planned: the bytes of each bucket's graph, by the bucket's sizes.
        """
        infos = []
        for bucket in reversed(self._sizes.list_combinations()):
            key = tuple(bucket.values())
            hits, full = self._hits.get(key, (0, 0))
            shown = key[0] if len(key) == 1 else bucket
            infos.append(BucketInfo(shown, hits, full, planned.get(key)))
        return tuple(infos)
