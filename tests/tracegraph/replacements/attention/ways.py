"""Attention over a cache, written in the ways that users write it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, HEADS, GROUPS, WIDTH, LENGTH = 2, 4, 2, 16, 48
POSITION = 17


def draw(*shape: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> Any:
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.normal(size=shape), dtype)


def write(caches: Any, new: Any, position: Any) -> list[Any]:
    """Writes new keys and values, of one position, into (batch, position, group, element)."""
    return [
        lax.dynamic_update_slice(cache, each, (0, position, 0, 0))
        for cache, each in zip(caches, new, strict=True)
    ]


def find_angles(position: Any, width: int) -> tuple[Any, Any]:
    half = width // 2
    angles = position * 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.sin(angles), jnp.cos(angles)


def rotate_halves(x: Any, sine: Any, cosine: Any) -> Any:
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, -1).astype(x.dtype)


def rotate_pairs(x: Any, sine: Any, cosine: Any) -> Any:
    even, odd = x[..., ::2], x[..., 1::2]
    turned = jnp.stack((even * cosine - odd * sine, odd * cosine + even * sine), -1)
    return turned.reshape(x.shape).astype(x.dtype)


def attend_grouped(rotate: Any, query: Any, new: Any, caches: Any, position: Any) -> Any:
    """Llama's: rotated, grouped, with scores in float32."""
    sine, cosine = find_angles(position, query.shape[-1])
    query, key = rotate(query, sine, cosine), rotate(new[0], sine, cosine)
    keys, values = write(caches, (key, new[1]), position)
    batch, _, groups, width = new[0].shape
    grouped = query.reshape(batch, groups, -1, width)
    scores = jnp.einsum("bgqd,btgd->bgqt", grouped, keys).astype(jnp.float32) * width**-0.5
    is_past = jnp.arange(keys.shape[1]) <= position
    shares = jax.nn.softmax(jnp.where(is_past, scores, -1e9)).astype(query.dtype)
    return jnp.einsum("bgqt,btgd->bgqd", shares, values).reshape(query.shape), keys, values


def attend_by_jax(query: Any, new: Any, caches: Any, position: Any) -> Any:
    keys, values = write(caches, new, position)
    mask = (jnp.arange(keys.shape[1]) <= position)[None, None, None, :]
    return jax.nn.dot_product_attention(query, keys, values, mask=mask), keys, values


def attend_ragged(query: Any, new: Any, caches: Any, lengths: Any) -> Any:
    """Each sequence has a position of its own, written by a scatter."""
    rows = jnp.arange(query.shape[0])
    keys, values = (
        cache.at[rows, lengths].set(each[:, 0]) for cache, each in zip(caches, new, strict=True)
    )
    mixed = jax.nn.dot_product_attention(query, keys, values, key_value_seq_lengths=lengths + 1)
    return mixed, keys, values


def attend_by_flax(query: Any, new: Any, caches: Any, position: Any) -> Any:
    keys, values = write(caches, new, position)
    mask = (jnp.arange(keys.shape[1]) <= position)[None, None, None, :]
    return nn.dot_product_attention(query, keys, values, mask=mask), keys, values


def attend_repeated(query: Any, new: Any, caches: Any, position: Any) -> Any:
    """Heads before positions; keys and values repeated for each head."""
    keys, values = (
        cache.at[:, :, position].set(each[:, 0]) for cache, each in zip(caches, new, strict=True)
    )
    heads, groups = query.shape[2], keys.shape[1]
    wide = [jnp.repeat(each, heads // groups, axis=1) for each in (keys, values)]
    scores = (query.swapaxes(1, 2) @ wide[0].swapaxes(-1, -2)).astype(jnp.float32)
    bias = jnp.where(jnp.arange(keys.shape[2]) <= position, 0, -jnp.inf)
    shares = jax.nn.softmax(scores * keys.shape[-1] ** -0.5 + bias, -1).astype(query.dtype)
    return (shares @ wide[1]).swapaxes(1, 2), keys, values


def attend_capped(query: Any, new: Any, caches: Any, position: Any) -> Any:
    """Gemma's: scores that are capped, and a window of the last positions."""
    keys, values = write(caches, new, position)
    scores = jnp.einsum("bqhd,bthd->bhqt", query, keys) * query.shape[-1] ** -0.5
    places = jnp.arange(keys.shape[1])
    is_near = (places <= position) & (places > position - 9)
    scores = jnp.where(is_near, jnp.tanh(scores / 5) * 5, -jnp.inf)
    return jnp.einsum("bhqt,bthd->bqhd", jax.nn.softmax(scores), values), keys, values


def attend_alone(query: Any, keys: Any, values: Any) -> Any:
    """Several queries, nothing written."""
    return (jax.nn.dot_product_attention(query, keys, values, is_causal=True),)


def make_arguments(*, heads: int = HEADS, dtype: Any = jnp.bfloat16, swaps: bool = False) -> Any:
    groups = min(heads, GROUPS)
    shape = (BATCH, groups, LENGTH, WIDTH) if swaps else (BATCH, LENGTH, groups, WIDTH)
    new = [draw(BATCH, 1, groups, WIDTH, dtype=dtype, seed=seed) for seed in (1, 2)]
    caches = [draw(*shape, dtype=dtype, seed=seed) for seed in (3, 4)]
    return draw(BATCH, 1, heads, WIDTH, dtype=dtype), new, caches, jnp.int32(POSITION)


def make_ragged(*positions: int) -> Any:
    return (*make_arguments()[:3], jnp.array(positions, jnp.int32))


def make_alone() -> Any:
    shapes = [(BATCH, 6, HEADS, WIDTH), *[(BATCH, LENGTH, GROUPS, WIDTH)] * 2]
    return [draw(*each, dtype=jnp.float32, seed=seed) for seed, each in enumerate(shapes)]


WAYS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "halves": (functools.partial(attend_grouped, rotate_halves), make_arguments),
    "pairs": (
        functools.partial(attend_grouped, rotate_pairs),
        lambda: make_arguments(dtype=jnp.float32),
    ),
    "jax": (attend_by_jax, make_arguments),
    "ragged": (attend_ragged, lambda: make_ragged(5, 47)),
    # The second sequence is full: nothing is written.
    "dropped": (attend_ragged, lambda: make_ragged(5, 48)),
    "flax": (attend_by_flax, lambda: make_arguments(heads=2)),
    "repeated": (attend_repeated, lambda: make_arguments(swaps=True)),
    "capped": (attend_capped, lambda: make_arguments(heads=2, dtype=jnp.float32)),
    "alone": (attend_alone, make_alone),
}
