"""The rules `stream-wait`, `stream-join` and `stream-in-body`: streams fork once and join once.

Each stream has a clock: how far into every stream its work is ordered after. An event is a copy of
the clock of the stream it was recorded on; a wait takes the later of the two, stream by stream. A
value is ready on a stream when the stream's clock has reached the op that made it.

Note [Backward passes]
A backward op runs on the stream of its forward op, as in PyTorch. Inside of a backward pass the
streams wait for one another by themselves, and for the forward ops. To what is around it, the pass
is work of the stream that it is called on: its first gradients must be ready there, and the
gradients that it returns are made there. So what a forward op made or read is not judged where the
backward pass reads it; all else is.
"""

from __future__ import annotations

import dataclasses

from tracegraph.constraints.dependence import iterate_ops, list_subgraphs
from tracegraph.constraints.stream_violations import (
    CAPTURING_STREAM,
    make_backward_violation,
    make_body_violation,
    make_event_violation,
    make_fork_violation,
    make_join_violation,
    make_use_violation,
)
from tracegraph.constraints.violation import Violation
from tracegraph.ir.graph import BACKWARD_SCOPE, EXTERNAL_MARKS, STREAM_MARKS, Graph, Op, Value

_FORWARD_SCOPE = "jvp("
# Their bodies run many times, or not at all.
_WITH_BODIES = frozenset({"cond", "scan", "while"})


def check_streams(graph: Graph) -> list[Violation]:
    """Finds uses of a value without a wait, and side streams that do not fork or join.

    Args:
        graph: with calls inlined; ops inside a subgraph run where the op that holds them runs.

    Returns:
        The violations, each with its op.
    """
    if not graph.has_streams:
        return []
    walk = _StreamWalk(graph)
    for op in graph.ops:
        walk.visit(op)
    walk.check_joins()
    return walk.violations


def find_body_violation(op: Op, graph_name: str) -> Violation | None:
    """Finds a stream block or an event in the body of a loop or a branch.

    A body is on the stream of the op that holds it. JAX gives it no place among the ops around it,
    where an event could be recorded once and waited for once.

    Args:
        op: any op.
        graph_name: the captured function's name.

    Returns:
        The violation, at the first such op of the body, or None.
    """
    if op.name not in _WITH_BODIES:
        return None
    for body in list_subgraphs(op):
        for inner in iterate_ops(body):
            if inner.name in STREAM_MARKS or inner.origin.stream != op.origin.stream:
                return make_body_violation(op, inner, graph_name)
    return None


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Where and when a value is ready: the stream, its time, and the op that makes the value."""

    stream: int
    tick: int
    op: Op


class _StreamWalk:
    def __init__(self, graph: Graph) -> None:
        self.violations: list[Violation] = []
        self._name = graph.name
        self._clocks: dict[int, dict[int, int]] = {CAPTURING_STREAM: {CAPTURING_STREAM: 0}}
        self._events: dict[int, dict[int, int]] = {}
        self._made: dict[int, _Maker] = {}
        # What forward ops made and read, see Note [Backward passes].
        self._saved: set[int] = set()
        self._last: dict[int, _Maker] = {}
        self._waited: set[int] = set()
        self._first_waits = _find_first(graph, "tg_wait", "stream")
        self._first_records = _find_first(graph, "tg_record", "event")

    def visit(self, op: Op) -> None:
        if op.name == "tg_record":
            self._record(op)
        elif op.name == "tg_wait":
            self._wait(op)
        elif op.name in EXTERNAL_MARKS:
            self._work(op, op.params["stream"])
        else:
            self._run(op)

    def check_joins(self) -> None:
        for stream, last in self._last.items():
            if self._clocks[CAPTURING_STREAM].get(stream, -1) < last.tick:
                fork = self._first_waits.get(stream)
                self.violations.append(make_join_violation(last.op, stream, fork, self._name))

    def _run(self, op: Op) -> None:
        caller = op.origin.backward_on
        stream = op.origin.stream if caller is None else caller
        maker = self._work(op, stream)
        if caller is not None:
            self._check_fork(op, op.origin.stream)
        clock, values = self._clocks[stream], _list_values(op)
        for value in values:
            if caller is None or id(value) not in self._saved:
                self._use(op, value, stream, clock)
        self._made.update({id(result): maker for result in op.results})
        if _FORWARD_SCOPE in op.origin.scope.partition(BACKWARD_SCOPE)[0]:
            self._saved.update(map(id, (*values, *op.results)))

    def _work(self, op: Op, stream: int) -> _Maker:
        """Takes an op as the stream's latest work."""
        maker = _Maker(stream, self._advance(op, stream), op)
        if stream != CAPTURING_STREAM:
            self._last[stream] = maker
        return maker

    def _use(self, op: Op, value: Value, stream: int, clock: dict[int, int]) -> None:
        # Inputs and constants are ready everywhere.
        maker = self._made.get(id(value))
        if maker is None or clock.get(maker.stream, -1) >= maker.tick:
            return
        made = maker.stream, maker.op
        self.violations.append(
            make_use_violation(op, value, made, self._name)
            if op.origin.backward_on is None
            else make_backward_violation(op, value, stream, made, self._name)
        )
        clock[maker.stream] = maker.tick

    def _record(self, op: Op) -> None:
        stream = op.params["stream"]
        self._advance(op, stream)
        self._events[op.params["event"]] = dict(self._clocks[stream])

    def _wait(self, op: Op) -> None:
        stream, event = op.params["stream"], op.params["event"]
        clock = self._clocks.setdefault(stream, {})
        self._waited.add(stream)
        if event not in self._events:
            late = self._first_records.get(event)
            self.violations.append(make_event_violation(op, stream, event, late, self._name))
            return
        for other, tick in self._events[event].items():
            clock[other] = max(clock.get(other, -1), tick)

    def _advance(self, op: Op, stream: int) -> int:
        self._check_fork(op, stream)
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def _check_fork(self, op: Op, stream: int) -> None:
        clock = self._clocks.setdefault(stream, {})
        if CAPTURING_STREAM in clock:
            return
        made = [(value, self._made.get(id(value))) for value in _list_values(op)]
        maker = next(((value, each.op) for value, each in made if each is not None), None)
        late = None if stream in self._waited else self._first_waits.get(stream)
        self.violations.append(make_fork_violation(op, stream, maker, late, self._name))
        # Reported once: the rest is checked as if the stream had forked here.
        clock[CAPTURING_STREAM] = self._clocks[CAPTURING_STREAM][CAPTURING_STREAM]


def _list_values(op: Op) -> list[Value]:
    return [operand for operand in op.operands if isinstance(operand, Value)]


def _find_first(graph: Graph, name: str, key: str) -> dict[int, Op]:
    """Returns the first mark of a kind for each stream or event."""
    marks = [op for op in graph.ops if op.name == name]
    return {op.params[key]: op for op in reversed(marks)}
