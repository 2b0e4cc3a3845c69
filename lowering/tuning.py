"""Tuning: what a program may be made with that is no default of XLA's."""

from __future__ import annotations

import dataclasses

# The option of XLA's that leaves its pass out which splits the sum of a matmul.
KEEP_SUMS = ("xla_disable_hlo_passes", "splitk-rewriter")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a program is made.

    Attributes:
        merges: small kernels that compute the same become one, see Note [Merged loops].
        keeps_sums: XLA leaves each matmul's sums in one piece, see Note [Sums in one piece].
    """

    merges: bool = False
    keeps_sums: bool = False


UNTUNED = Tuning()
