"""Variant: one program for a call, of those that the fastest one is chosen from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.kernel_caching.cached_lowering import CachedLowering, CacheSlot
from tracegraph.lowering.compiled_region import CompiledRegion
from tracegraph.lowering.tuning import UNTUNED, Tuning
from tracegraph.replacements.report import Replacement
from tracegraph.tracing.checked_graph import FirstTrace

# What reports call the tunings.
MERGED = "small kernels merged"
KEPT_SUMS = "sums of matmuls in one piece"
FROM_LIBRARY = "matmuls of the library"
TWO_LANES = "steps in two lanes"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One program for a call, lowered.

    Attributes:
        first: what it was lowered from.
        lowered: the lowering.
        tuning: that it was lowered with.
        slot: its place in the kernel cache, if it has one.
        cached: what was there.
    """

    first: FirstTrace = dataclasses.field(repr=False)
    lowered: LoweredCapture
    tuning: Tuning
    slot: CacheSlot | None
    cached: CachedLowering | None


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What was the fastest in an earlier process.

    Attributes:
        first: the function, with what was replaced.
        tuning: how it is lowered.
        replacements: what became of each rule.
    """

    first: FirstTrace
    tuning: Tuning
    replacements: tuple[Replacement, ...]


class Lower(Protocol):
    """Lowers a variant; regions that were compiled before need not be compiled again."""

    def __call__(
        self,
        first: FirstTrace,
        *,
        tuning: Tuning = UNTUNED,
        compiled: Sequence[CompiledRegion] = (),
    ) -> Variant:
        """Returns the variant of a function."""
        ...


def find_tuning(replacements: Sequence[Replacement]) -> Tuning:
    """Returns how a program was made of which these are the replacements."""
    used = {each.rule for each in replacements if each.is_used}
    return Tuning(MERGED in used, KEPT_SUMS in used, FROM_LIBRARY in used, TWO_LANES in used)
