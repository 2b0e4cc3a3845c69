"""Solvers of jaxlib that wait for the GPU: known by name, since a try would do harm.

Note [Waiting solvers]
cuSOLVER's Jacobi methods for one matrix (`syevj`, `gesvdj`) decide on the host whether they go on,
and its other methods for singular values (`gesvd`, `gesvdp`) wait as well. A capture of their
stream fails, and after that of `syevj` fails every later `syevj` of the process, also those that
JAX calls. So they are not tried out. Batches of small matrices have methods of their own, which do
not wait: jaxlib takes them for more than one matrix of up to 32 rows and columns.
"""

from __future__ import annotations

import math

from tracegraph.runtime.ffi.call import FfiCall, ScalarAttribute

SMALL_ROWS = 32
# Values of jaxlib's attribute `algorithm` of `syevd`: by size, or Jacobi's method.
_BY_SIZE, _JACOBI = 0, 2
_WHY = "which waits for the GPU: cuSOLVER decides on the host whether it goes on"
# The way of `docs/gpu.md#singular-values` waits for nothing, and has other bits.
_WHY_SVD = f"{_WHY}; a polar decomposition and `eigh` do without, see docs/gpu.md#singular-values"
_WHY_EIGH = f"{_WHY}; with `implementation=jax.lax.linalg.EighImplementation.QR` it does not"


def find_wait(call: FfiCall) -> str:
    """Returns why a solver cannot be captured; an empty text for every other call.

    Args:
        call: of any handler.
    """
    if call.target in ("cusolver_gesvd_ffi", "cusolver_gesvdp_ffi"):
        return _WHY_SVD
    if call.target == "cusolver_gesvdj_ffi":
        return "" if _is_small_batch(call) else _WHY_SVD
    if call.target != "cusolver_syevd_ffi":
        return ""
    algorithm = dict(call.attributes.items).get("algorithm")
    value = algorithm.value if isinstance(algorithm, ScalarAttribute) else _BY_SIZE
    is_small = call.operands[0].dims[-1] <= SMALL_ROWS
    is_jacobi = value == _JACOBI or (value == _BY_SIZE and is_small)
    return _WHY_EIGH if is_jacobi and not _is_small_batch(call) else ""


def _is_small_batch(call: FfiCall) -> bool:
    *batch, rows, columns = call.operands[0].dims
    return math.prod(batch) > 1 and max(rows, columns) <= SMALL_ROWS
