"""Closed-over arrays whose values are in XLA's programs, and which of them a file must not hold.

Note [Embedded arrays in a file]. XLA's program has the values of arrays below a mebibyte, as that
of `jax.jit` has. Where a file is to hold no constants, all that the user has made are inputs of
another program, which is compiled when the file is written. It has other bits, and each input
costs a replay on the host device some tenths of a microsecond: hence not in every capture. What is
left is what the function itself writes down with NumPy in each trace, as the indices of a gather,
and scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tracegraph.constraints.constants import list_inner_arrays
from tracegraph.constraints.mismatch import print_leaf_type
from tracegraph.ir.graph import Constant, Graph
from tracegraph.lowering.saved_lowering import SaveProblem
from tracegraph.runtime.jax_interop import unwrap_key
from tracegraph.saving.held_arrays import list_host_arrays

# Of an array that a function makes with NumPy whenever it is traced.
MAX_OWN_BYTES = 256


def find_left_out(function: Callable[..., Any], graph: Graph) -> list[Constant]:
    """Returns the closed-over arrays that a file without constants must not hold.

    Args:
        function: the captured one.
        graph: of a signature.

    Raises:
        SaveProblem: one of them cannot be an input.
    """
    held = list_host_arrays(function)
    for array in list_inner_arrays(graph):
        if _is_left_out(array, held):
            data = unwrap_key(array)
            kind = print_leaf_type(data.shape, data.dtype, False)
            raise SaveProblem(
                f"with constants=False, since a loop, a branch or a checkpoint calls a `jax.jit` "
                f"function that closes over {kind}, which XLA's program then holds"
            )
    return [each for each in graph.constants if _is_left_out(each.array, held)]


def _is_left_out(array: Any, held: Sequence[np.ndarray[Any, Any]]) -> bool:
    if np.ndim(array) == 0:
        return False
    if not isinstance(array, np.ndarray) or array.nbytes > MAX_OWN_BYTES:
        return True
    # A part of an array, too.
    return any(np.may_share_memory(array, each) for each in held)
