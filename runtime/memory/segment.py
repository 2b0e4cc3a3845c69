"""Segments and blocks: what a provider hands to a pool, and what a pool hands out."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """One allocation obtained from a provider. Compares by identity, since addresses recur.

    Attributes:
        address: of its first byte.
        nbytes: its size.
        storage: the object that keeps the memory alive; whoever holds the segment holds it.
    """

    address: int
    nbytes: int
    storage: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A piece of a segment, in use until it is freed. Holding it keeps the memory alive.

    Attributes:
        segment: where it lies.
        offset: bytes from the start of the segment.
        nbytes: its size, at least what was asked for.
    """

    segment: Segment
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Address of its first byte."""
        return self.segment.address + self.offset
