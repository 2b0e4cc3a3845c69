"""The record of one broken capture constraint, and the one error that reports them all.

Violations are grouped by their cause: one mistake is one message, however often it was made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tracegraph.ir.graph import Graph, Op
from tracegraph.ir.origins import locate_origin
from tracegraph.ir.printer import print_op
from tracegraph.runtime.errors import MAX_EXAMPLES, CaptureError, format_error, shorten_list

# Of one error, with the lines of its notes.
MAX_LINES = 40
_HEAD_LINES = 4
# Of a group with one example: an empty line, what, where, how many more, why and fix.
_LEAST_LINES = 6
_INDENT = "\n         "
_WINDOW_OPS = 3
_HEAD_PLACES = 4


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
    """Returns the user's line and the op as it prints: ``train.py:41 in step, %12 = sin %7``.

    The user's own line comes first; where a library made the op, its line follows in brackets.
    """
    return f"{locate_origin(op.origin)}, {print_op(op)}"


@dataclasses.dataclass(frozen=True)
class Group:
    """Violations of one cause: the same rule is broken, and the same change mends it.

    Attributes:
        first: the first of them in source order, whose words stand for all.
        whats: what is wrong, of each.
        places: where each is, every place once.
    """

    first: Violation
    whats: tuple[str, ...]
    places: tuple[str, ...]

    @property
    def what(self) -> str:
        """What is wrong, and how often."""
        count = len(self.whats)
        if count == 1:
            return self.first.what
        if len(set(self.whats)) == 1:
            return f"{self.first.what}, {count} times"
        return f"{self.first.what}, and {count - 1} more like it"

    def print_where(self, examples: int = MAX_EXAMPLES) -> str:
        """Returns the places, one per line, at most so many, and how many are left out."""
        return _INDENT.join(shorten_list(self.places, examples))

    def print_lines(self, examples: int) -> str:
        """Returns the group as the four parts of an error."""
        where, first = self.print_where(examples), self.first
        return format_error(self.what, where, first.why, first.fix, first.rule)


def group_violations(violations: Sequence[Violation]) -> list[Group]:
    """Returns the groups of violations, in the order of their first ones.

    Example:
        >>> broken = [Violation("callback", "`f` prints", f"a.py:{line} in f", "no host code runs",
        ...                     "print outside") for line in range(1, 101)]
        >>> (group,) = group_violations(broken)
        >>> group.what, group.print_where(2)
        ('`f` prints, 100 times', 'a.py:1 in f\\n         a.py:2 in f\\n         and 98 more')
    """
    groups: dict[tuple[str, str], list[Violation]] = {}
    for violation in violations:
        groups.setdefault((violation.rule, violation.fix), []).append(violation)
    return [
        Group(
            members[0],
            tuple(member.what for member in members),
            tuple(dict.fromkeys(member.where for member in members)),
        )
        for members in groups.values()
    ]


def print_groups(groups: Sequence[Group]) -> str:
    """Returns groups as text, in as many lines as an error has below its first four.

    Groups that do not fit are counted; the examples of the others become fewer first.
    """
    room = MAX_LINES - _HEAD_LINES
    shown = groups[: (room - 2) // _LEAST_LINES]
    examples = max(
        (n for n in range(1, MAX_EXAMPLES + 1) if _count_lines(shown, n) <= room - 2), default=1
    )
    parts = [group.print_lines(examples) for group in shown]
    if len(shown) < len(groups):
        parts.append(f"and {len(groups) - len(shown)} more causes, see `error.violations`")
    return "\n\n".join(parts)


def make_capture_error(
    violations: Sequence[Violation], *, graph_name: str, graph: Graph | None = None
) -> CaptureError:
    """Combines all violations into one error of at most 40 lines, in the order given.

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
    groups = group_violations(violations)
    if len(groups) == 1:
        error = _make_group_error(groups[0], violations)
    else:
        error = _make_joint_error(groups, violations, graph_name)
    lines = str(error).count("\n") + 1
    for group in groups:
        op = group.first.op
        window = "" if op is None else _print_window(op, graph)
        lines += window.count("\n") + 1
        if window and (lines <= MAX_LINES or group is groups[0]):
            error.add_note(window)
    return error


def _make_group_error(group: Group, violations: Sequence[Violation]) -> CaptureError:
    first = group.first
    return CaptureError(
        group.what,
        where=group.print_where(),
        why=first.why,
        fix=first.fix,
        anchor=first.rule,
        violations=violations,
    )


def _make_joint_error(
    groups: Sequence[Group], violations: Sequence[Violation], graph_name: str
) -> CaptureError:
    lines = dict.fromkeys(violation.where.split(", ")[0] for violation in violations)
    error = CaptureError(
        f"`{graph_name}` breaks {len(violations)} capture constraints",
        where=", ".join(shorten_list(list(lines), _HEAD_PLACES)),
        why="each of them would make a replay differ from a call; the causes follow in source "
        "order",
        fix="fix them one by one, each as described below",
        anchor=violations[0].rule,
        violations=violations,
    )
    error.args = (f"{error}\n\n{print_groups(groups)}",)
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


def _count_lines(groups: Sequence[Group], examples: int) -> int:
    return sum(group.print_lines(examples).count("\n") + 2 for group in groups)
