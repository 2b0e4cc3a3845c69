"""The rules `stream-wait`, `stream-join` and `stream-in-body`: streams fork once and join once.

Each stream has a clock: how far into every stream its work is ordered after. An event is a copy of
the clock of the stream it was recorded on; a wait takes the later of the two, stream by stream. A
value is ready on a stream when the stream's clock has reached the op that made it.
"""

from __future__ import annotations

from tracegraph.constraints.dependence import iterate_ops, list_subgraphs
from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import STREAM_MARKS, Graph, Op, Value

CAPTURING_STREAM = 0
_BACKWARD_SCOPE = "transpose("
# Their bodies run many times, or not at all.
_WITH_BODIES = frozenset({"cond", "scan", "while"})


def check_streams(graph: Graph) -> list[Violation]:
    """Finds uses of a value without a wait, and side streams that do not fork or join.

    Args:
        graph: with calls inlined; ops inside a subgraph run where the op that holds them runs.

    Returns:
        The violations, each with its op. Ops of the backward pass are ordered by autograd.
    """
    if not graph.has_streams:
        return []
    walk = _StreamWalk(graph.name)
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
                return _make_body_violation(op, inner, graph_name)
    return None


class _StreamWalk:
    def __init__(self, name: str) -> None:
        self.violations: list[Violation] = []
        self._name = name
        self._clocks: dict[int, dict[int, int]] = {CAPTURING_STREAM: {CAPTURING_STREAM: 0}}
        self._events: dict[int, dict[int, int]] = {}
        self._made: dict[int, tuple[int, int]] = {}
        self._last: dict[int, tuple[int, Op]] = {}

    def visit(self, op: Op) -> None:
        if op.name == "tg_record":
            self._record(op)
        elif op.name == "tg_wait":
            self._wait(op)
        # In the backward pass autograd orders the streams itself, as it does at its end.
        elif _BACKWARD_SCOPE not in op.origin.scope:
            self._run(op)

    def check_joins(self) -> None:
        for stream, (tick, op) in self._last.items():
            if self._clocks[CAPTURING_STREAM].get(stream, -1) < tick:
                self.violations.append(_make_join_violation(op, stream, self._name))

    def _run(self, op: Op) -> None:
        stream = op.origin.stream
        tick = self._advance(op, stream)
        clock = self._clocks[stream]
        for value in _list_values(op):
            self._use(op, value, clock)
        self._made.update({id(result): (stream, tick) for result in op.results})
        if stream != CAPTURING_STREAM:
            self._last[stream] = (tick, op)

    def _use(self, op: Op, value: Value, clock: dict[int, int]) -> None:
        # Inputs, constants and everything made by the backward pass are ready everywhere.
        stream, tick = self._made.get(id(value), (CAPTURING_STREAM, 0))
        if clock.get(stream, -1) >= tick:
            return
        self.violations.append(_make_use_violation(op, value, stream, self._name))
        clock[stream] = tick

    def _record(self, op: Op) -> None:
        stream = op.params["stream"]
        self._advance(op, stream)
        self._events[op.params["event"]] = dict(self._clocks[stream])

    def _wait(self, op: Op) -> None:
        stream, event = op.params["stream"], op.params["event"]
        clock = self._clocks.setdefault(stream, {})
        if event not in self._events:
            self.violations.append(_make_event_violation(op, stream, event, self._name))
            return
        for other, tick in self._events[event].items():
            clock[other] = max(clock.get(other, -1), tick)

    def _advance(self, op: Op, stream: int) -> int:
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        if CAPTURING_STREAM not in clock:
            self.violations.append(_make_fork_violation(op, stream, self._name))
            # Reported once: the rest is checked as if the stream had forked here.
            clock[CAPTURING_STREAM] = self._clocks[CAPTURING_STREAM][CAPTURING_STREAM]
        return clock[stream]


def _list_values(op: Op) -> list[Value]:
    return [operand for operand in op.operands if isinstance(operand, Value)]


def _name_stream(stream: int) -> str:
    return "the capturing stream" if stream == CAPTURING_STREAM else f"stream {stream}"


def _make_use_violation(op: Op, value: Value, made_on: int, graph_name: str) -> Violation:
    used_on, made = _name_stream(op.origin.stream), _name_stream(made_on)
    return Violation(
        "stream-wait",
        f"`{graph_name}` uses a value of {made} on {used_on} without a wait",
        locate_op(op),
        f"%{value.number} was made on {made}, and nothing makes {used_on} wait for it; the two "
        "run side by side in a CUDA graph",
        f"write `a.wait_stream(b)` before this line, where a is {used_on} and b is {made}",
        op,
    )


def _make_fork_violation(op: Op, stream: int, graph_name: str) -> Violation:
    return Violation(
        "stream-wait",
        f"`{graph_name}` works on stream {stream} before the stream has forked",
        locate_op(op),
        "a stream belongs to a capture only after it has waited for the capturing stream",
        f"write `s.wait_stream(tg.current_stream())` before `with tg.stream(s)`, where s is "
        f"stream {stream}",
        op,
    )


def _make_event_violation(op: Op, stream: int, event: int, graph_name: str) -> Violation:
    return Violation(
        "stream-wait",
        f"`{graph_name}` makes {_name_stream(stream)} wait for event {event}, which was never "
        "recorded",
        locate_op(op),
        "an event orders nothing until it is recorded, in the same capture and before the wait",
        f"call `record` on event {event} before this line",
        op,
    )


def _make_body_violation(op: Op, inner: Op, graph_name: str) -> Violation:
    return Violation(
        "stream-in-body",
        f"`{graph_name}` uses a stream or an event inside the body of a `{op.name}`",
        locate_op(inner),
        f"a body runs on the stream of its `{op.name}`, here {_name_stream(op.origin.stream)}, as "
        "often as its data say; a stream forks and joins once in a capture",
        f"put the whole `{op.name}` into the `with tg.stream(s)` block",
        inner,
    )


def _make_join_violation(op: Op, stream: int, graph_name: str) -> Violation:
    return Violation(
        "stream-join",
        f"`{graph_name}` ends while stream {stream} has not joined the capturing stream",
        locate_op(op),
        f"this op is the last on stream {stream}, and nothing in the capture waits for it",
        f"write `tg.current_stream().wait_stream(s)` at the end, where s is stream {stream}",
        op,
    )
