"""Equality of trees of arrays, bit for bit: what a replay must give."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_same(got: Any, wanted: Any) -> None:
    """Fails unless both trees have the same structure, leaf types and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, one), other in pairs:
        name = jax.tree_util.keystr(path)
        assert jax.typeof(one) == jax.typeof(other), name
        assert to_bytes(one) == to_bytes(other), f"{name}: {one} is not {other}"


def to_bytes(array: Any) -> bytes:
    """Returns the bits of an array; of a typed key, those of its key data."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()
