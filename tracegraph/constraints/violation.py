"""The record of one broken capture constraint, and the one error that reports them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tracegraph.ir.graph import Graph, Op
from tracegraph.ir.printer import print_op
from tracegraph.runtime.errors import CaptureError, format_error

_WINDOW_OPS = 3


@dataclasses.dataclass(frozen=True)
class Violation:
    """One broken capture constraint: the four lines of its message.

    Attributes:
        rule: its row in ``docs/constraints.md`` and its section in ``docs/errors.md``.
        what: what is wrong, naming the thing that the user wrote.
        where: the user's line, and our op or argument.
        why: the one fact that makes it wrong.
        fix: one or two things to type.
        op: the op that breaks the rule, where there is one; a pickle leaves it out.

    Example:
        >>> print(Violation("callback", "`f` prints", "a.py:3 in f", "no host code is replayed",
        ...                 "print outside"))
        `f` prints
          where: a.py:3 in f
          why:   no host code is replayed
          fix:   print outside          python -m tracegraph error callback
    """

    rule: str
    what: str
    where: str
    why: str
    fix: str
    op: Op | None = None

    def __getstate__(self) -> dict[str, Any]:
        # JAX's objects in an op, such as its traceback, cannot be pickled.
        return {**vars(self), "op": None}

    def __str__(self) -> str:
        return format_error(self.what, self.where, self.why, self.fix, self.rule)


def locate_op(op: Op) -> str:
    """Returns the user's line and the op as it prints: ``train.py:41 in step, %12 = sin %7``."""
    return f"{op.origin.source}, {print_op(op)}"


def make_capture_error(
    violations: Sequence[Violation], *, graph_name: str, graph: Graph | None = None
) -> CaptureError:
    """Combines all violations into one error, in the order given.

    Args:
        violations: at least one.
        graph_name: the captured function's name.
        graph: where the ops stand; with it the notes show the ops around each.

    Returns:
        The error, for the caller to raise; its ``violations`` holds all of them.

    Raises:
        ValueError: if there is no violation.
    """
    if not violations:
        raise ValueError("no violation to report")
    error = (
        _make_single_error(violations[0])
        if len(violations) == 1
        else _make_joint_error(violations, graph_name)
    )
    for violation in violations:
        if violation.op is not None:
            error.add_note(_print_window(violation.op, graph))
    return error


def _make_single_error(violation: Violation) -> CaptureError:
    return CaptureError(
        violation.what,
        where=violation.where,
        why=violation.why,
        fix=violation.fix,
        anchor=violation.rule,
        violations=[violation],
    )


def _make_joint_error(violations: Sequence[Violation], graph_name: str) -> CaptureError:
    lines = dict.fromkeys(violation.where.split(", ")[0] for violation in violations)
    error = CaptureError(
        f"`{graph_name}` breaks {len(violations)} capture constraints",
        where=", ".join(lines),
        why="each of them would make a replay differ from a call; they follow in source order",
        fix="fix them one by one, each as described below",
        anchor=violations[0].rule,
        violations=violations,
    )
    error.args = ("\n\n".join([str(error), *map(str, violations)]),)
    return error


def _print_window(op: Op, graph: Graph | None) -> str:
    around = () if graph is None else graph.ops
    index = next((i for i, other in enumerate(around) if _contains(other, op)), None)
    if index is None:
        return f"> {print_op(op)}"
    first = max(0, index - _WINDOW_OPS)
    lines = [f"In the graph of `{graph.name}`:"] if graph is not None else []
    for position, other in enumerate(around[first : index + _WINDOW_OPS + 1], start=first):
        lines.append(f"{'>' if position == index else ' '} {print_op(other)}")
    return "\n".join(lines)


def _contains(outer: Op, op: Op) -> bool:
    if outer is op:
        return True
    return any(_contains(inner, op) for _, graph in outer.subgraphs for inner in graph.ops)
