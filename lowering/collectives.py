"""Collectives of XLA's optimised program: how many, of which kind, how many bytes."""

from __future__ import annotations

import dataclasses
import math
import re

_OP = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>.+?) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all"
    r"|collective-permute|collective-broadcast)(?P<start>-start)?\(",
    re.MULTILINE,
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<shape>[\d,]*)\]")
# An asynchronous start has its operands before its results in its type.
_PAIRED = ("all-gather", "collective-permute", "reduce-scatter", "all-to-all")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a program.

    Attributes:
        kind: as XLA names it, ``all-reduce``.
        count: of the ops; one in the body of a loop counts once.
        nbytes: of their results on each device, together.
    """

    kind: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.count} {self.kind} ({self.nbytes:,} bytes on each device)"


def list_collectives(text: str) -> tuple[Collective, ...]:
    """Returns the collectives of a program, one record per kind, in order of appearance.

    Args:
        text: an optimised HLO module, as ``jax.stages.Compiled.as_text`` returns it.

    Example:
        >>> list_collectives("  %r = f32[8,2]{1,0} all-reduce(%x), channel_id=1")
        (Collective(kind='all-reduce', count=1, nbytes=64),)
    """
    found: dict[str, list[int]] = {}
    for match in _OP.finditer(text):
        kind = match["kind"]
        sizes = [_measure(each["dtype"], each["shape"]) for each in _ARRAY.finditer(match["type"])]
        if match["start"] and kind in _PAIRED:
            # A permute has two contexts after these, on some devices.
            half = 1 if kind == "collective-permute" else len(sizes) // 2
            sizes = sizes[half : 2 * half]
        found.setdefault(kind, []).append(sum(sizes))
    return tuple(Collective(kind, len(sizes), sum(sizes)) for kind, sizes in found.items())


def _measure(dtype: str, shape: str) -> int:
    digits = re.search(r"\d+", dtype)
    bits = 8 if digits is None else int(digits.group())
    count = math.prod(int(size) for size in shape.split(",") if size)
    return -(-count * bits // 8)
