"""Residence: what the leaves of one set share, so that all of them are deleted at once.

Note [Leaf sets]. Donated state never leaves the graph's memory, but a leaf that was passed as a
donated argument is deleted, as under `jax.jit`: `best = p; p = step(p, x)` leaves nothing in `best`
to read. So each replay returns other leaf objects than it was given, over the same buffers. The
leaves that one replay returns are a set. They share a `Residence`, which says which replay they
show. When the graph's clock goes on, the whole set is deleted: that costs nothing per leaf. The
clock goes on just before the launch, so the state can not be read while it is being written.

A loop drops the old leaves when it assigns the new ones. Two sets then take turns: a set is
returned again if nothing else holds one of its leaves, see `tracegraph/replaying/holders.py`. A
leaf that is still held keeps its set from that, so it stays deleted for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Donation:
    """To which call an array was given up.

    Attributes:
        function: name of the captured function.
        argument: which argument it was, as ``state['w']``.
    """

    function: str
    argument: str


class Residence:
    """What the leaves of one set share, see Note [Leaf sets].

    Attributes:
        generation: number of the replay whose state they show.
        values: the plain arrays that leaves keep of their values. A user who deletes one, or
            donates its leaf to `jax.jit`, has deleted the leaf.
        donations: what to say of a leaf that is deleted, by the name of its buffer.
    """

    __slots__ = ("donations", "generation", "values")

    def __init__(self, generation: int, donations: Mapping[str, Donation]) -> None:
        self.generation = generation
        self.values: list[Any] = []
        self.donations = donations

    def forget(self, value: Any) -> None:
        """Takes a value out of those that leaves keep."""
        self.values[:] = [each for each in self.values if each is not value]
