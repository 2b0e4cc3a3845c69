"""The kernels of ours that loops and branches may need, to be loaded while XLA compiles them."""

from __future__ import annotations

from tracegraph.lowering.kernels.loops.conditions import CONDITIONS
from tracegraph.lowering.kernels.loops.counters import COUNT_AHEAD
from tracegraph.lowering.kernels.loops.slices import COPY_SLICE
from tracegraph.lowering.kernels.loops.waits import write_wait
from tracegraph.runtime.definition.nodes import KernelCode

# The compute capability from which on XLA's kernels wait, and so do ours: Note [Kernels that wait].
FIRST_WITH_WAITS = 9.0


def list_loop_kernels(architecture: str) -> list[KernelCode]:
    """Returns a kernel of each text that loops and branches may need.

    A text that is missing here, as that of a guard, is compiled when a graph is made.

    Args:
        architecture: of the GPU, its compute capability as ``9.0``.

    Example:
        >>> [code.symbol for code in list_loop_kernels("9.0")]
        ['set_flag', 'count_ahead_4', 'copy_slice_4']
    """
    codes = [
        KernelCode("set_flag", CONDITIONS),
        KernelCode("count_ahead_4", COUNT_AHEAD),
        KernelCode("copy_slice_4", COPY_SLICE),
    ]
    return (
        [write_wait(code) for code in codes] if float(architecture) >= FIRST_WITH_WAITS else codes
    )
