"""CaptureCache: the captures of one function by signature, and the counts of its calls."""

from __future__ import annotations

import collections
import itertools

from tracegraph.cache_info import CacheInfo
from tracegraph.capturing.pipeline import Capture
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.replaying.jit_call import JitCall
from tracegraph.tracing.signature import Signature

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

    def list_recent_graphs(self) -> list[CapturedGraph | JitCall]:
        """Returns the graphs that were used last: alternating signatures stay cheap."""
        recent = itertools.islice(reversed(self._captures), MAX_TRIED)
        return [self._captures[signature].graph for signature in recent]

    def add(self, capture: Capture) -> None:
        """Keeps a new capture; drops the one that was not used for longest, if there are many."""
        self._misses += 1
        self._captures[capture.graph.signature] = capture
        if len(self._captures) > MAX_SIGNATURES:
            _, dropped = self._captures.popitem(last=False)
            self._retired_calls += dropped.graph.calls

    def use(self, graph: CapturedGraph | JitCall) -> bool:
        """Makes a graph the one that was used last; False if it is not kept any more."""
        is_kept = graph.signature in self._captures
        if is_kept:
            self._captures.move_to_end(graph.signature)
        return is_kept

    def clear(self) -> None:
        """Drops all captures; the counts of calls stay."""
        self._retired_calls = self.count_calls()
        self._captures.clear()

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
