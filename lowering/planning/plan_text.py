"""The rows and bars of the table of a memory plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracegraph.lowering.planning.lifetimes import Lifetime
from tracegraph.lowering.planning.short_names import shorten_names
from tracegraph.runtime.errors import count_noun

BAR_COLUMNS = 60
NAME_COLUMNS = 48
TABLE_ROWS = 40


def format_lifetimes(
    lifetimes: Sequence[Lifetime], offsets: Mapping[str, int], step_count: int
) -> list[str]:
    """Returns a line for each buffer, in the order of the arena, and one of those left out.

    Lifetimes are bars over the steps, one column per step, scaled to ``BAR_COLUMNS`` beyond that.
    Of more than ``TABLE_ROWS`` buffers the largest are shown.

    Args:
        lifetimes: of the buffers.
        offsets: of each, by name.
        step_count: of the program.

    Example:
        >>> format_lifetimes([Lifetime("a", 512, 0, 0)], {"a": 256}, 2)[1:]
        ['  a          256    512   0..0  █·']
    """
    by_size = sorted(lifetimes, key=lambda lifetime: (-lifetime.nbytes, lifetime.name))
    shown = sorted(
        by_size[:TABLE_ROWS],
        key=lambda lifetime: (offsets[lifetime.name], lifetime.first, lifetime.name),
    )
    names = shorten_names((lifetime.name for lifetime in shown), NAME_COLUMNS)
    cells = [("buffer", "offset", "bytes", "steps", "lifetime")] if shown else []
    cells += [
        (
            names[lifetime.name],
            _print_place(lifetime, offsets[lifetime.name]),
            f"{lifetime.nbytes:,}",
            f"{lifetime.first}..{lifetime.last}",
            draw_bar(lifetime, step_count),
        )
        for lifetime in shown
    ]
    lines = align_columns(cells)
    left_out = by_size[TABLE_ROWS:]
    if left_out:
        left_out_bytes = sum(lifetime.nbytes for lifetime in left_out)
        lines.append(
            f"  {count_noun(len(left_out), 'smaller buffer')} left out, {left_out_bytes:,} bytes"
        )
    return lines


def _print_place(lifetime: Lifetime, offset: int) -> str:
    if lifetime.is_host:
        return "host"
    return "lent" if lifetime.is_lent else f"{offset:,}"


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
