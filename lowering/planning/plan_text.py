"""The rows and bars of the table of a memory plan."""

from __future__ import annotations

from collections.abc import Sequence

from tracegraph.lowering.planning.lifetimes import Lifetime

BAR_COLUMNS = 60


def draw_bar(lifetime: Lifetime, step_count: int) -> str:
    """Returns a lifetime as a bar over the steps, scaled to at most ``BAR_COLUMNS``.

    Example:
        >>> draw_bar(Lifetime("a", 512, 1, 2), 4)
        '·██·'
    """
    columns = min(step_count, BAR_COLUMNS)
    first = lifetime.first * columns // step_count
    last = lifetime.last * columns // step_count
    return "·" * first + "█" * (last - first + 1) + "·" * (columns - 1 - last)


def count_noun(number: int, noun: str) -> str:
    """Returns a number with its noun.

    Example:
        >>> count_noun(1, "step"), count_noun(2000, "step")
        ('1 step', '2,000 steps')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def align_columns(rows: Sequence[tuple[str, str, str, str, str]]) -> list[str]:
    """Returns rows as lines: the first column to the left, numbers to the right, a bar at the end.

    Example:
        >>> align_columns([("a", "0", "512", "0..1", "██")])
        ['  a  0  512  0..1  ██']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"  {name:<{widths[0]}}  {offset:>{widths[1]}}  {nbytes:>{widths[2]}}"
        f"  {steps:>{widths[3]}}  {bar}"
        for name, offset, nbytes, steps, bar in rows
    ]
