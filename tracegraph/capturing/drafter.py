"""Drafter: assigns the ops of a Graph to regions, in program order.

A region grows until something needs it to be finished: an event recorded behind it, a value of it
used on another stream, or an op that cannot be captured. Such ops become eager regions.

Note [Constants in regions]
What is computed from literals alone (a filled array, an iota) is computed again in each region that
reads it, and never passed between two. XLA then sees a constant where it sees one in the whole
function, folds and simplifies the same way, and gives the same bits; and no buffer holds it. Only
cheap ops count: work that XLA does not fold would be done several times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from tracegraph.constraints.callbacks import has_callback
from tracegraph.ir.graph import EXTERNAL_MARKS, Graph, Op, Operand, Value
from tracegraph.lowering.request import EventPoint, Place

CAPTURING_STREAM = 0
# See Note [Constants in regions].
_CHEAP_NAMES = """abs add and bitcast_convert_type broadcast_in_dim clamp concatenate
    convert_element_type copy div eq exp expand_dims floor ge gt integer_pow iota le log lt max min
    mul ne neg not or pad reshape rev rsqrt select_n sign slice sqrt squeeze sub transpose"""
CHEAP_PRIMITIVES = frozenset(_CHEAP_NAMES.split())


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """A region that is not finished yet.

    More than six fields because it is the region and its place among the others at once.

    Attributes:
        name: of the region.
        place: its stream, its waits, and whether it is captured.
        is_compiled: False for an eager region that JAX runs op by op.
        ops: in program order.
        covered: names of all regions that come before it.
        point: what it is instead of a region: a record of an external event, or a wait for one.
        extra: what it returns besides values of its own, by the name of the result.
        repeated: values of its ops that are not its own, see Note [Constants in regions].
    """

    name: str
    place: Place
    is_compiled: bool = True
    ops: list[Op] = dataclasses.field(default_factory=list)
    covered: set[str] = dataclasses.field(default_factory=set)
    point: EventPoint | None = None
    extra: dict[str, Operand] = dataclasses.field(default_factory=dict)
    repeated: set[Operand] = dataclasses.field(default_factory=set)


class Drafter:
    """Walks the ops in program order and assigns them to regions."""

    def __init__(self) -> None:
        self._drafts: dict[str, Draft] = {}
        self._open: dict[int, Draft] = {}
        self._last: dict[int, Draft] = {}
        self._waits: dict[int, set[str]] = {}
        self._events: dict[int, set[str]] = {}
        self._producers: dict[Operand, Draft] = {}
        self._floor: Draft | None = None
        self._constants: dict[Operand, Op] = {}

    def split(self, graph: Graph, uncapturable: Collection[int]) -> list[Draft]:
        """Returns the regions in program order."""
        if graph.ops and not uncapturable and not graph.has_streams:
            # Nothing to cut at, as in most graphs.
            self._start(CAPTURING_STREAM).ops.extend(graph.ops)
            return list(self._drafts.values())
        stored = _find_stored(graph, uncapturable)
        awaited = {op.params["event"] for op in graph.ops if op.name == "tg_wait"}
        for index, op in enumerate(graph.ops):
            if op.name == "tg_record":
                if op.params["event"] in awaited:
                    self._record(op.params["stream"], op.params["event"])
            elif op.name == "tg_wait":
                self._wait(op.params["stream"], op.params["event"])
            elif op.name in EXTERNAL_MARKS:
                self._add_event(op)
            elif index in uncapturable:
                self._add_eager(op)
            elif self._is_constant(op):
                self._constants[op.results[0]] = op
                if op.results[0] in stored:
                    self._add(op)
            else:
                self._add(op)
        return list(self._drafts.values())

    def _is_constant(self, op: Op) -> bool:
        """True for a cheap op on literals and constants alone."""
        return op.name in CHEAP_PRIMITIVES and all(
            operand in self._constants or not isinstance(operand, Value) for operand in op.operands
        )

    def _record(self, stream: int, event: int) -> None:
        self._open.pop(stream, None)
        self._events[event] = self._find_previous(stream)

    def _wait(self, stream: int, event: int) -> None:
        new = self._events.get(event, set()) - self._find_covered(stream)
        if new:
            self._open.pop(stream, None)
            self._waits.setdefault(stream, set()).update(new)

    def _add_eager(self, op: Op) -> None:
        """Adds the op to an eager region that comes after everything before it."""
        is_compiled = not has_callback(op)
        latest = next(reversed(self._drafts.values()), None)
        if latest is not None and latest is self._floor and latest.is_compiled and is_compiled:
            self._append(latest, op)
            return
        everything = {draft.name for draft in self._last.values()}
        self._waits.setdefault(CAPTURING_STREAM, set()).update(everything)
        self._floor = self._start(CAPTURING_STREAM, is_captured=False, is_compiled=is_compiled)
        self._append(self._floor, op)
        self._open.clear()

    def _add_event(self, op: Op) -> None:
        """Adds a point that nothing before it on its stream may pass, and nothing behind it."""
        stream = op.params["stream"]
        self._open.pop(stream, None)
        point = EventPoint(op.params["event"], is_wait=op.name == "tg_external_wait")
        self._start(stream, point=point).ops.append(op)
        del self._open[stream]

    def _add(self, op: Op) -> None:
        stream = op.origin.stream
        missing = self._find_missing(op, stream)
        # Only the backward pass finds any: its streams are synchronised by data, see
        # docs/constraints.md#stream-wait.
        for producer in missing:
            if self._open.get(producer.place.stream) is producer:
                del self._open[producer.place.stream]
            self._waits.setdefault(stream, set()).add(producer.name)
        if missing:
            self._open.pop(stream, None)
        self._append(self._open.get(stream) or self._start(stream), op)

    def _find_missing(self, op: Op, stream: int) -> list[Draft]:
        """Returns the regions that made operands which the next op on this stream may not read."""
        own = self._open.get(stream)
        operands = [operand for operand in op.operands if operand not in self._constants]
        producers = [self._producers.get(operand, own) for operand in operands]
        others = [each for each in producers if each is not None and each is not own]
        if not others:
            return []
        covered = self._find_covered(stream)
        return [producer for producer in others if producer.name not in covered]

    def _find_previous(self, stream: int) -> set[str]:
        """Returns the regions that the next one on this stream directly comes after."""
        before = [self._last.get(stream), self._floor]
        return self._waits.get(stream, set()) | {draft.name for draft in before if draft}

    def _find_covered(self, stream: int) -> set[str]:
        """Returns all regions whose values the next op on this stream may read."""
        draft = self._open.get(stream)
        if draft is not None:
            return {*draft.covered, draft.name}
        return self._close_over(self._find_previous(stream))

    def _close_over(self, names: set[str]) -> set[str]:
        return names.union(*(self._drafts[name].covered for name in names))

    def _append(self, draft: Draft, op: Op) -> None:
        if draft.is_compiled:
            self._repeat_constants(draft, op)
        draft.ops.append(op)
        self._producers.update(dict.fromkeys(op.results, draft))

    def _repeat_constants(self, draft: Draft, op: Op) -> None:
        """Adds the constants that an op reads, unless the region makes them already."""
        for operand in op.operands:
            constant = self._constants.get(operand)
            is_own = self._producers.get(operand) is draft
            if constant is not None and not is_own and operand not in draft.repeated:
                self._repeat_constants(draft, constant)
                draft.repeated.add(operand)
                draft.ops.append(constant)

    def _start(
        self,
        stream: int,
        *,
        is_captured: bool = True,
        is_compiled: bool = True,
        point: EventPoint | None = None,
    ) -> Draft:
        previous = self._find_previous(stream)
        self._waits.pop(stream, None)
        # A stream is in order by itself.
        waits = sorted(name for name in previous if self._drafts[name].place.stream != stream)
        draft = Draft(
            name=f"{'event' if point else 'region'}{len(self._drafts)}",
            place=Place(stream, tuple(waits), is_captured),
            is_compiled=is_compiled,
            covered=self._close_over(previous),
            point=point,
        )
        self._drafts[draft.name] = draft
        self._open[stream] = self._last[stream] = draft
        return draft


def _find_stored(graph: Graph, uncapturable: Collection[int]) -> set[Operand]:
    """Returns what a region has to store: results, and what JAX reads op by op."""
    eager = [graph.ops[index] for index in uncapturable]
    read = {operand for op in eager if has_callback(op) for operand in op.operands}
    return read | {*graph.outputs}
