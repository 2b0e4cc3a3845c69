"""Long names, shortened so that they still differ; reaches neither JAX nor CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

GAP = "…"


def shorten(text: str, columns: int) -> str:
    """Returns a text of at most so many columns, with its end left out.

    Example:
        >>> shorten("a value that is too long", 12)
        'a value tha…'
    """
    return text if len(text) <= columns else text[: columns - 1] + GAP


def shorten_names(names: Iterable[str], columns: int) -> dict[str, str]:
    """Returns a short form of each name; different names have different ones.

    Both ends of a path are kept. Paths that would look the same keep more of their beginning, as
    much as it takes. Where nothing shows the difference they are numbered, beyond the columns.

    Args:
        names: of buffers or leaves.
        columns: most characters of a short form.

    Example:
        >>> names = ["state['mu']['layer']['kernel']", "state['nu']['layer']['kernel']"]
        >>> list(shorten_names(names, 24).values())
        ["state['m…yer']['kernel']", "state['n…yer']['kernel']"]
    """
    names = tuple(dict.fromkeys(names))
    short = {name: name for name in names if len(name) <= columns}
    used = set(short)
    for group in _group_similar([name for name in names if len(name) > columns], columns):
        head = _find_head(group, columns)
        for name in group:
            text = _leave_out(name, head, columns)
            numbered = (f"{text}#{number}" for number in itertools.count(2))
            short[name] = next(t for t in itertools.chain([text], numbered) if t not in used)
            used.add(short[name])
    return short


def _group_similar(names: Sequence[str], columns: int) -> list[list[str]]:
    """Groups names that look the same when a third of the columns shows their beginning."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_leave_out(name, columns // 3, columns), []).append(name)
    return list(groups.values())


def _find_head(group: Sequence[str], columns: int) -> int:
    """Returns how much of the beginning to show, so that most names of a group differ."""
    heads = range(columns // 3, columns - 1)
    return max(heads, key=lambda head: len({_leave_out(n, head, columns) for n in group}))


def _leave_out(name: str, head: int, columns: int) -> str:
    return name[:head] + GAP + name[len(name) - (columns - head - 1) :]
