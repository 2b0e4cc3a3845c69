"""LeafSet: one leaf for every resident result of a graph, see Note [Leaf sets]."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.arrays.residence import Donation, Residence
from tracegraph.runtime.arrays.static_buffer import StaticBuffer
from tracegraph.runtime.definition.graph import ReplayClock


class LeafSet:
    """The leaves that one replay returns.

    Args:
        buffers: of the resident results, each once.
        clock: of their graph.
        donations: what to say of a leaf that a later replay has taken, by the name of its buffer.

    Attributes:
        leaves: by the name of their buffer; without those that got a value of their own.
        residence: what they share.
        clock: as given.
    """

    __slots__ = ("clock", "leaves", "residence")

    def __init__(
        self,
        buffers: Iterable[StaticBuffer],
        clock: ReplayClock,
        donations: Mapping[str, Donation],
    ) -> None:
        self.clock = clock
        self.residence = Residence(clock.generation, donations)
        self.leaves = {
            buffer.name: Array(buffer, clock.generation, ArrayState.RESIDENT, self.residence)
            for buffer in buffers
        }

    def drop_values(self) -> None:
        """Drops the copies that leaves keep of what was read."""
        if self.residence.values:
            self.residence.values.clear()
            for leaf in self.leaves.values():
                leaf.drop_value()

    def detach(self, name: str) -> None:
        """Takes the leaf of a buffer out; if it is still held, it keeps its value."""
        leaf = self.leaves.pop(name, None)
        if leaf is None:
            return
        reference = weakref.ref(leaf)
        del leaf
        held = reference()
        if held is not None:
            held.detach()
