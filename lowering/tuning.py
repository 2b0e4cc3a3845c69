"""Tuning: what a program may be made with that is no default of XLA's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# The option of XLA's that leaves its pass out which splits the sum of a matmul.
KEEP_SUMS = ("xla_disable_hlo_passes", "splitk-rewriter")
# The option without which XLA writes kernels of its own for matmuls.
LIBRARY_ALONE = ("xla_gpu_enable_triton_gemm", False)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a program is made.

    Attributes:
        merges: small kernels that compute the same become one, see Note [Merged loops].
        keeps_sums: XLA leaves each matmul's sums in one piece, see Note [Sums in one piece].
        uses_library: XLA leaves matmuls to cublasLt, see Note [Matmuls of the library].
        has_two_lanes: no more than two steps run at once, see Note [Lanes].
    """

    merges: bool = False
    keeps_sums: bool = False
    uses_library: bool = False
    has_two_lanes: bool = False

    def list_options(self) -> tuple[tuple[str, bool | str], ...]:
        """Returns the options of XLA's that it stands for."""
        chosen = ((self.keeps_sums, KEEP_SUMS), (self.uses_library, LIBRARY_ALONE))
        return tuple(option for is_chosen, option in chosen if is_chosen)


UNTUNED = Tuning()


def join_options(
    first: Sequence[tuple[str, bool | str]], others: Sequence[tuple[str, bool | str]]
) -> tuple[tuple[str, bool | str], ...]:
    """Returns all of XLA's options; lists of passes under one name become one list."""
    joined = dict(first)
    for name, value in others:
        earlier = joined.get(name)
        is_list = isinstance(earlier, str) and isinstance(value, str)
        joined[name] = f"{earlier},{value}" if is_list else value
    return tuple(joined.items())
