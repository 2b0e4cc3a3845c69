"""Masks as users write them, by their names: of scores (..., rows, columns)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

WINDOW = 20


def hide(scores: Any, is_seen: Any, constant: float = -1e9) -> Any:
    return jnp.where(is_seen, scores, constant)


def find_past(scores: Any) -> Any:
    rows = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 2)
    return rows >= lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)


def hide_future(scores: Any) -> Any:
    return hide(scores, find_past(scores), -jnp.inf)


def hide_by_triangles(scores: Any) -> Any:
    ones = jnp.ones(scores.shape[-2:], bool)
    return hide(
        scores, jnp.tril(ones) & ~jnp.tril(ones, -WINDOW), float(jnp.finfo(scores.dtype).min)
    )


def hide_behind_prefix(scores: Any) -> Any:
    return hide(scores, (jnp.arange(scores.shape[-1]) < WINDOW)[None], -1e9)


def see_prefix_and_past(scores: Any) -> Any:
    return hide(scores, find_past(scores) | (jnp.arange(scores.shape[-1]) < WINDOW))


def hide_from_last_rows(scores: Any) -> Any:
    rows = jnp.arange(scores.shape[-2])[:, None]
    return hide(scores, find_past(scores) & (rows < scores.shape[-2] - WINDOW))


def hide_little(scores: Any) -> Any:
    """The weights of what is hidden are not zero."""
    return hide(scores, find_past(scores), -1.0)


MASKS: dict[str, Callable[[Any], Any]] = {
    "future": hide_future,
    "triangles": hide_by_triangles,
    "prefix": hide_behind_prefix,
    "prefix and past": see_prefix_and_past,
    "last rows": hide_from_last_rows,
    "little": hide_little,
}
