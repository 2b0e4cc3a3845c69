"""What is said where streams fork, wait or join wrongly: both lines, and what to add."""

from __future__ import annotations

from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import Op, Value
from tracegraph.ir.origins import locate_origin

CAPTURING_STREAM = 0


def name_stream(stream: int) -> str:
    """Returns how messages name a stream, by its number in the capture."""
    return "the capturing stream" if stream == CAPTURING_STREAM else f"stream {stream}"


def make_use_violation(op: Op, value: Value, maker: tuple[int, Op], graph_name: str) -> Violation:
    """Returns the violation of an op that reads what another stream makes.

    Args:
        op: reads it, in program order behind its maker.
        value: what is read.
        maker: the stream that it is ready on, and the op that makes it.
        graph_name: the captured function's name.
    """
    used_on, made_on = name_stream(op.origin.stream), name_stream(maker[0])
    return Violation(
        "stream-wait",
        f"`{graph_name}` uses a value of {made_on} on {used_on} without a wait",
        locate_op(op),
        f"%{value.number} was made on {made_on} at {_locate(maker[1])}, and nothing makes "
        f"{used_on} wait for it; the two run side by side in a CUDA graph",
        f"write `a.wait_stream(b)` before this line, where a is {used_on} and b is {made_on}",
        op,
    )


def make_backward_violation(
    op: Op, value: Value, stream: int, maker: tuple[int, Op], graph_name: str
) -> Violation:
    """Returns the violation of a backward pass that is called before its input is there.

    Args:
        op: of the backward pass; its line is that of its forward op.
        value: what is read.
        stream: that the backward pass is called on.
        maker: the stream that the value is ready on, and the op that makes it.
        graph_name: the captured function's name.
    """
    called_on, made_on = name_stream(stream), name_stream(maker[0])
    return Violation(
        "stream-wait",
        f"`{graph_name}` calls a backward pass on {called_on} with a value of {made_on} without "
        "a wait",
        locate_op(op),
        f"%{value.number} was made on {made_on} at {_locate(maker[1])}, and nothing makes "
        f"{called_on} wait for it; a backward pass waits for its own forward ops only",
        f"write `a.wait_stream(b)` before the backward pass is called, where a is {called_on} and "
        f"b is {made_on}",
        op,
    )


def make_fork_violation(
    op: Op, stream: int, maker: tuple[Value, Op] | None, late: Op | None, graph_name: str
) -> Violation:
    """Returns the violation of work on a stream that takes no part in the capture yet.

    Args:
        op: the first work on the stream.
        stream: its number.
        maker: what the op reads of the capture, and the op that makes it, if there is any.
        late: the stream's first wait, behind the op, if there is one.
        graph_name: the captured function's name.
    """
    why = "a stream belongs to a capture only after it has waited for the capturing stream"
    if maker is not None:
        why += f"; this op reads %{maker[0].number}, made at {_locate(maker[1])}"
    if late is not None:
        why += f"; its first wait, at {_locate(late)}, comes later"
    return Violation(
        "stream-wait",
        f"`{graph_name}` works on stream {stream} before the stream has forked",
        locate_op(op),
        why,
        f"write `s.wait_stream(tg.current_stream())` before `with tg.stream(s)`, where s is "
        f"stream {stream}",
        op,
    )


def make_event_violation(
    op: Op, stream: int, event: int, late: Op | None, graph_name: str
) -> Violation:
    """Returns the violation of a wait for an event that orders nothing.

    Args:
        op: the wait.
        stream: that waits.
        event: its number.
        late: where the event is recorded behind the wait, if it is.
        graph_name: the captured function's name.
    """
    why = "an event orders nothing until it is recorded, in the same capture and before the wait"
    if late is not None:
        why += f"; it is recorded later, at {_locate(late)}"
    return Violation(
        "stream-wait",
        f"`{graph_name}` makes {name_stream(stream)} wait for event {event}, which was never "
        "recorded",
        locate_op(op),
        why,
        f"call `record` on event {event} before this line; for one that work outside of the graph "
        "records, make it tg.Event(external=True)",
        op,
    )


def make_body_violation(op: Op, inner: Op, graph_name: str) -> Violation:
    """Returns the violation of a stream or an event in the body of a loop or a branch.

    Args:
        op: the loop or branch.
        inner: the op of its body.
        graph_name: the captured function's name.
    """
    return Violation(
        "stream-in-body",
        f"`{graph_name}` uses a stream or an event inside the body of a `{op.name}`",
        locate_op(inner),
        f"a body runs on the stream of its `{op.name}`, here {name_stream(op.origin.stream)}, as "
        "often as its data say; a stream forks and joins once in a capture",
        f"put the whole `{op.name}` into the `with tg.stream(s)` block",
        inner,
    )


def make_join_violation(op: Op, stream: int, fork: Op | None, graph_name: str) -> Violation:
    """Returns the violation of a stream that nothing waits for at the end.

    Args:
        op: the last one on the stream.
        stream: its number.
        fork: the wait by which the stream came into the capture.
        graph_name: the captured function's name.
    """
    forked = f", which forked at {_locate(fork)}," if fork is not None else ""
    return Violation(
        "stream-join",
        f"`{graph_name}` ends while stream {stream} has not joined the capturing stream",
        locate_op(op),
        f"this op is the last on stream {stream}{forked} and nothing in the capture waits for it",
        f"write `tg.current_stream().wait_stream(s)` at the end, where s is stream {stream}",
        op,
    )


def _locate(op: Op) -> str:
    return locate_origin(op.origin)
