"""CaptureCache: the captures of one function by signature, and the counts of its calls."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TypeAlias

from tracegraph.cache_info import CacheInfo
from tracegraph.capturing.pipeline import Capture
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.replaying.jit_call import JitCall
from tracegraph.replaying.spread_call import SpreadCall
from tracegraph.tracing.signature import Signature

Replayable: TypeAlias = CapturedGraph | JitCall | SpreadCall
MAX_SIGNATURES = 64
# Graphs that a call tries before it works out its signature, which costs more.
MAX_TRIED = 8


class CaptureCache:
    """The captures of one function, the one used last at the end; its owner holds a lock.

    Attributes:
        first_calls: calls that returned the first result of a new graph.
    """

    def __init__(self) -> None:
        self._captures: collections.OrderedDict[Signature, Capture] = collections.OrderedDict()
        # Those whose graphs have given their memory back, without these graphs.
        self._released: dict[Signature, Capture] = {}
        self._retired_calls = 0
        self._misses = 0
        self.first_calls = 0

    def __len__(self) -> int:
        return len(self._captures)

    @property
    def is_full(self) -> bool:
        """True when the next capture drops another."""
        return len(self._captures) >= MAX_SIGNATURES

    def find(self, signature: Signature) -> Capture | None:
        """Returns the capture of a signature, if there is one."""
        return self._captures.get(signature)

    def list_latest(self) -> list[Capture]:
        """Returns all captures, the one used last first."""
        # By their keys: the iterator over an OrderedDict's values looks each key up, and makes a
        # KeyError of an interrupt in its hash.
        return [self._captures[signature] for signature in reversed(self._captures)]

    def list_all(self) -> list[Capture]:
        """Returns all captures, the one used last first, and those whose graphs were released."""
        return [*self.list_latest(), *self._released.values()]

    def list_recent_graphs(self) -> list[Replayable]:
        """Returns the graphs that were used last: alternating signatures stay cheap."""
        recent = itertools.islice(reversed(self._captures), MAX_TRIED)
        return [self._captures[signature].graph for signature in recent]

    def add(self, capture: Capture) -> None:
        """Keeps a new capture; drops the one that was not used for longest, if there are many."""
        self._misses += 1
        self._keep(capture)

    def release(self, capture: Capture) -> None:
        """Drops the graph of a capture and keeps its recipe, for `restore`."""
        signature = capture.graph.signature
        del self._captures[signature]
        self._retired_calls += capture.graph.calls
        self._released[signature] = dataclasses.replace(capture, graph=None)

    def list_released(self) -> list[Signature]:
        """Returns the signatures whose graphs were released, those with most scratch first."""

        def read_scratch(signature: Signature) -> int:
            recipe = self._released[signature].recipe
            return recipe.lowered.definition.arena_size.scratch_bytes if recipe is not None else 0

        return sorted(self._released, key=read_scratch, reverse=True)

    def is_released(self, signature: Signature) -> bool:
        """True for a signature whose graph `restore` makes again."""
        return signature in self._released

    def restore(self, signature: Signature) -> Capture | None:
        """Makes the graph of a released capture again; None if it is no such signature.

        Raises:
            OutOfMemoryError: the pool cannot hold it; it stays released.
        """
        released = self._released.get(signature)
        if released is None or released.recipe is None:
            return None
        capture = dataclasses.replace(released, graph=released.recipe.instantiate())
        del self._released[signature]
        self._keep(capture)
        return capture

    def _keep(self, capture: Capture) -> None:
        self._captures[capture.graph.signature] = capture
        if len(self._captures) > MAX_SIGNATURES:
            _, dropped = self._captures.popitem(last=False)
            self._retired_calls += dropped.graph.calls

    def use(self, graph: Replayable) -> bool:
        """Makes a graph the one that was used last; False if it is not kept any more."""
        is_kept = graph.signature in self._captures
        if is_kept:
            self._captures.move_to_end(graph.signature)
        return is_kept

    def clear(self) -> None:
        """Drops all captures; the counts of calls stay."""
        self._retired_calls = self.count_calls()
        self._captures.clear()
        self._released.clear()

    def drop(self, kind: type) -> None:
        """Drops the captures whose graphs are of a kind; the counts of calls stay."""
        for signature, capture in list(self._captures.items()):
            if isinstance(capture.graph, kind):
                self._retired_calls += capture.graph.calls
                del self._captures[signature]

    def count_calls(self) -> int:
        """Returns how often the function was called with success."""
        kept = sum(capture.graph.calls for capture in self._captures.values())
        return self._retired_calls + kept

    def add_counts(self, info: CacheInfo) -> None:
        """Adds the counts of calls and captures whose graphs were kept elsewhere."""
        self._retired_calls += info.hits
        self._misses += info.misses

    def read_info(self) -> CacheInfo:
        """Returns the counts."""
        # A capture whose first call failed has not been used yet.
        hits = self.count_calls() - self.first_calls
        return CacheInfo(hits, self._misses, MAX_SIGNATURES, len(self._captures))
