"""Nodes: the tree of a function's parts, one branch for each value that was read."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from tracegraph.capturing.kept_graph import KeptGraph
from tracegraph.capturing.pipeline import Capture
from tracegraph.constraints.mismatch import make_refusal_error
from tracegraph.ir.graph import Graph
from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.replaying.invalid_floats import InvalidResultsSignal, make_invalid_error
from tracegraph.tracing.checked_graph import CheckedGraph

# Of each read; what follows other values is run op by op.
MAX_BRANCHES = 8
# Of one signature of a function.
MAX_PARTS = 64
# Values of a read that are remembered, to know one that comes back.
_MAX_SEEN = 64

# Where a value is: 0 for the leaves of the arguments, then one level per part; and its place there.
Source: TypeAlias = tuple[int, int]


class LoadedPart(NamedTuple):
    """A part that was loaded ahead of its call.

    Attributes:
        graph: that is loaded.
        args: with which; the very tuple that it is to be called with.
    """

    graph: CapturedGraph
    args: tuple[Any, ...]


class FunctionPart:
    """A captured part of a function.

    Args:
        capture: its graph, or the `JitCall` that is faster, and what it is made of.
        inputs: where its inputs are.

    Attributes:
        checked: the traced graph.
        inputs: the same.
        replacements: what became of ops that something faster can compute.
        kept: its graph; None where a call takes its place, which has no memory to give back.
    """

    def __init__(self, capture: Capture, inputs: tuple[Source, ...]) -> None:
        self.checked: CheckedGraph = capture.graph.checked
        self.inputs, self.replacements = inputs, capture.replacements
        self.kept: KeptGraph | None = None
        self._call: Any = None
        if isinstance(capture.graph, CapturedGraph) and capture.recipe is not None:
            self.kept = KeptGraph(capture.graph, capture.recipe)
        else:
            self._call = capture.graph

    @property
    def has_probes(self) -> bool:
        """True for a part that shows values."""
        return bool(self.checked.probes)

    def find(self) -> Any:
        """Returns the graph, which is made again if it was released, or the call in its place.

        Raises:
            OutOfMemoryError: the pool cannot hold the graph; it stays released.
        """
        return self._call if self.kept is None else self.kept.find()

    def load(self, levels: Sequence[Sequence[Any]], donated: Sequence[Any]) -> LoadedPart | None:
        """Loads the part ahead of its call, if it can; returns what `run` takes.

        Args:
            levels: the values so far.
            donated: the trees of the donated arguments, for the last part.
        """
        # A call makes no graph again that it may not need.
        graph = None if self.kept is None else self.kept.peek()
        # Others do more at a call than to launch.
        if type(graph) is not CapturedGraph:
            return None
        args = self._gather(levels, donated)
        return LoadedPart(graph, args) if graph.load_ahead(args) else None

    def run(
        self,
        levels: Sequence[Sequence[Any]],
        donated: Sequence[Any] = (),
        loaded: LoadedPart | None = None,
    ) -> Any:
        """Replays the part.

        Args:
            levels: the values so far.
            donated: the trees of the donated arguments, for the last part.
            loaded: what `load` returned for the same.

        Raises:
            InvalidFloatError: with ``debug_nans=True``, a result has a NaN or an infinity.
        """
        graph = self.find()
        if loaded is not None and loaded.graph is graph:
            args = loaded.args
        else:
            # It may have been released meanwhile.
            args = self._gather(levels, donated)
        try:
            result = graph.try_call(args, {}, True)
        except InvalidResultsSignal as signal:
            # The part's own inputs: the call's are those of the first part only.
            leaves = jax.tree_util.tree_leaves(args)
            raise make_invalid_error(signal, leaves, graph.names) from None
        if result is MISS:
            raise make_refusal_error(graph.name)
        return result

    def _gather(self, levels: Sequence[Sequence[Any]], donated: Sequence[Any]) -> tuple[Any, ...]:
        return (*[levels[level][place] for level, place in self.inputs], *donated)


@dataclasses.dataclass(frozen=True)
class Read:
    """A host read that ends a part.

    Attributes:
        source: of the value that is read.
        kind: how it is read, see `READ_NAMES`.
        where: the user's line.
        nbytes: that are fetched from the device.
    """

    source: Source
    kind: str
    where: str
    nbytes: int


class PartNode:
    """A part with what follows it; the owner of the tree holds a lock for changes.

    Args:
        part: what to replay; None where nothing is computed.
        traced: the part as it was traced, before any pass.
        results: which of its values it returns, by their order in the trace.
        read: that it ends with; None at the end of the function.
        out_tree: of the function's results at its end.

    Attributes:
        branches: what follows, by the key of what was read.
        hits: how often each was taken, by the same keys.
        shown: what was read, as text, by the same keys.
        uncaptured: how often the rest was run op by op.
    """

    # One per part: what the phases of its capture returned.
    def __init__(
        self,
        part: FunctionPart | None,
        traced: Graph,
        results: tuple[int, ...],
        read: Read | None,
        out_tree: Any,
    ) -> None:
        self.part, self.traced, self.results = part, traced, results
        self.read, self.out_tree = read, out_tree
        self.branches: dict[Hashable, PartNode] = {}
        self.hits: dict[Hashable, int] = {}
        self.shown: dict[Hashable, str] = {}
        self.uncaptured = 0
        self._seen: collections.OrderedDict[Hashable, None] = collections.OrderedDict()

    @property
    def is_full(self) -> bool:
        """True when no other value gets a branch."""
        return len(self.branches) >= MAX_BRANCHES

    def is_recurring(self, key: Hashable) -> bool:
        """True for a value that was asked about before, as far as that is remembered."""
        is_known = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return is_known
