"""Segments: what a provider hands to an allocator."""

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
