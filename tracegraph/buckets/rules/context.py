"""What a rule sees: one op in both traces, and what is known of its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracegraph.buckets.padded import Padded, Padding, RefusedError
from tracegraph.ir.graph import Graph, Op

# From one graph in both traces and its inputs to its outputs.
Walk = Callable[[Graph, Graph, Sequence[Padded]], list[Padded]]


@dataclasses.dataclass(frozen=True)
class Context:
    """One op.

    Attributes:
        op: in the bucket's trace.
        other: the same in the other trace.
        operands: what is known of them.
        sizes: of each size by name, in the bucket and in the other trace.
        walk: analyses a sub-graph.
    """

    op: Op
    other: Op
    operands: tuple[Padded, ...]
    sizes: Mapping[str, tuple[int, int]]
    walk: Walk

    def read_result(self, index: int = 0) -> tuple[Padding | None, ...]:
        """Returns the padding of a result by its shapes in the two traces; nothing is filled.

        Raises:
            RefusedError: an extent is no multiple of a size.
        """
        pair = self.op.results[index].aval, self.other.results[index].aval
        return read_shapes(*pair, self.sizes)

    def make_result(self, **known: Any) -> list[Padded]:
        """Returns the one result with its shape's padding."""
        return [Padded(self.read_result(), **known)]

    @property
    def leak(self) -> Op | None:
        """The mask of an operand that lets padding through."""
        return next((each.leak for each in self.operands if each.leak is not None), None)


def read_shapes(
    aval: Any, other: Any, sizes: Mapping[str, tuple[int, int]]
) -> tuple[Padding | None, ...]:
    """Returns the padding of each axis, by the extents in both traces.

    Raises:
        RefusedError: an extent follows a size, and is no multiple of it.
    """
    extents = zip(getattr(aval, "shape", ()), getattr(other, "shape", ()), strict=True)
    return tuple(_read_axis(axis, *pair, sizes) for axis, pair in enumerate(extents))


def _read_axis(
    axis: int, extent: int, other: int, sizes: Mapping[str, tuple[int, int]]
) -> Padding | None:
    if extent == other:
        return None
    for name, (size, probe) in sizes.items():
        scale, rest = divmod(extent, size)
        if not rest and scale and other == scale * probe:
            return Padding(name, scale)
    raise RefusedError(
        f"makes axis {axis} of extent {extent}, which follows a bucket's size and is no multiple "
        "of it",
        "it is not known which part of such an axis is padding",
        "keep the padded axis whole, or compute this outside of the captured function",
    )


def merge_axis(entries: Sequence[Padding | None], axis: int) -> Padding | None:
    """Returns the padding that operands share on an axis, unfilled.

    Raises:
        RefusedError: they follow different sizes.
    """
    padded = [each for each in entries if each is not None]
    if not padded:
        return None
    if all(padded[0].is_like(each) for each in padded):
        return Padding(padded[0].size, padded[0].scale)
    names = " and ".join(sorted({f"`{each.size}`" for each in padded}))
    raise RefusedError(
        f"meets two sizes, {names}, on axis {axis}",
        "the two have different true sizes in one call, so their true parts do not fit",
        "give both arguments the same tuple of sizes if they always have the same size",
    )
