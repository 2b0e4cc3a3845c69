"""How far apart two arrays are: the largest difference, relative to the largest magnitude."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.constraints.traces import read_array
from tracegraph.runtime.jax_interop import find_sharding, is_default_device
from tracegraph.runtime.packing import is_packable

# From here on compiling a comparison takes less than copying both arrays to the host.
LARGE_BYTES = 32 << 20


def measure_difference(got: Any, wanted: Any) -> float:
    """Returns 0.0 for equal bits, else the largest difference relative to the largest magnitude.

    NaNs at equal places are equal; a NaN at one side only, or any difference of another kind than
    a float's, is infinite.

    Args:
        got: an array.
        wanted: what it should be. Two large JAX arrays of floats are compared where they are.
    """
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    if all(isinstance(array, jax.Array) and is_large(array) for array in (got, wanted)):
        return _measure_in_place(got, wanted)
    return _measure_on_host(read_array(got), read_array(wanted))


def is_large(array: Any) -> bool:
    """True for an array, or its shape and dtype, that is better compared where it is."""
    nbytes = array.size * array.dtype.itemsize
    is_float = jnp.issubdtype(array.dtype, jnp.floating) and not is_packable(array.dtype)
    return nbytes >= LARGE_BYTES and is_float


def prepare_difference(shape: tuple[int, ...], dtype: Any, jax_device: Any) -> None:
    """Compiles beforehand what `measure_difference` runs for large arrays on a device."""
    sharding = None if is_default_device(jax_device) else find_sharding(jax_device)
    spec = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    with jax.enable_x64(True):
        _compare_floats.lower(spec, spec).compile()


def _measure_in_place(got: jax.Array, wanted: jax.Array) -> float:
    # JAX converts to float64 on a GPU in a fraction of the time that the copies to the host take.
    with jax.enable_x64(True):
        found = jax.device_get(_compare_floats(got, wanted))
    is_alike, is_equal, difference, magnitude = found
    if not is_alike:
        return float("inf")
    return 0.0 if is_equal else _divide(float(difference), float(magnitude))


@jax.jit
def _compare_floats(got: jax.Array, wanted: jax.Array) -> tuple[jax.Array, ...]:
    """Returns if what is not finite is equal, if all else has equal bits, difference, magnitude."""
    bits = [jax.lax.bitcast_convert_type(a, f"uint{8 * a.dtype.itemsize}") for a in (got, wanted)]
    ours, theirs = got.astype(jnp.float64), wanted.astype(jnp.float64)
    is_finite = jnp.isfinite(theirs)
    is_same = (ours == theirs) | (jnp.isnan(ours) & jnp.isnan(theirs))
    return (
        jnp.all(is_finite | is_same),
        jnp.all(~is_finite | (bits[0] == bits[1])),
        jnp.max(jnp.where(is_finite, jnp.abs(ours - theirs), 0.0), initial=0.0),
        jnp.max(jnp.where(is_finite, jnp.abs(theirs), 0.0), initial=0.0),
    )


def _measure_on_host(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    # Arrays may be large and differ in a few elements only: no more than those are converted.
    changed = _find_changed(got, wanted)
    if not changed.size:
        return 0.0
    if got.dtype.kind not in "fcV":
        return float("inf")
    kind = complex if got.dtype.kind == "c" else float
    ours, theirs = got.ravel()[changed].astype(kind), wanted.ravel()[changed].astype(kind)
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return float("inf")
    difference = np.max(np.abs(ours[finite] - theirs[finite]), initial=0.0)
    if difference == 0.0 and not finite.any():
        return 0.0
    return _divide(float(difference), _find_magnitude(wanted))


def _divide(difference: float, magnitude: float) -> float:
    """Returns the relative difference of arrays that are not equal bit for bit."""
    # Zeros of other signs differ, too.
    return difference / (magnitude or 1.0) or float(np.finfo(np.float64).tiny)


def _find_changed(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the flat indices of the elements that differ in any bit."""
    itemsize = one.dtype.itemsize
    width = min(itemsize, 8)
    words = [
        np.ascontiguousarray(array).ravel().view(f"u{width}").reshape(-1, itemsize // width)
        for array in (one, other)
    ]
    return np.flatnonzero((words[0] != words[1]).any(axis=1))


def _find_magnitude(array: np.ndarray[Any, Any]) -> float:
    """Returns the largest finite magnitude."""
    magnitudes = np.abs(array)
    finite = np.isfinite(magnitudes)
    return float(np.max(magnitudes, initial=0, where=finite))
