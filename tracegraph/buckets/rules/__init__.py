"""What each primitive does with padded axes: one rule per primitive, by its name."""

from __future__ import annotations

from collections.abc import Callable

from tracegraph.buckets.padded import Padded
from tracegraph.buckets.rules import control, elementwise, indexing, reductions, shapes
from tracegraph.buckets.rules.context import Context

PaddingRule = Callable[[Context], list[Padded]]

ALL_RULES: dict[str, PaddingRule] = {
    **dict.fromkeys(elementwise.NAMES, elementwise.apply_elementwise),
    **shapes.RULES,
    **reductions.RULES,
    **indexing.RULES,
    **control.RULES,
}
