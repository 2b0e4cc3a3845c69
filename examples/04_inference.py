"""Serve requests of any size by replaying a few graphs.

A graph has fixed shapes. So each request is padded to the next of a few batch sizes, and each of
these sizes is captured once. The known images are closed over: they become constants in the graph's
own memory.
"""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import tracegraph as tg

DATA = pathlib.Path(__file__).parent / "data" / "digits.csv.gz"
BATCH_SIZES = (1, 8, 64)
KNOWN = 1000


def pad_to_batch(images: np.ndarray) -> np.ndarray:
    """Adds empty images up to the next batch size."""
    size = next(size for size in BATCH_SIZES if size >= len(images))
    return np.pad(images, ((0, size - len(images)), (0, 0)))


def main() -> None:
    """Classifies requests of 1 to 64 images by their nearest known images."""
    rows = np.loadtxt(DATA, delimiter=",", dtype=np.float32)
    known, digits = jnp.asarray(rows[:KNOWN, :64]), jnp.asarray(rows[:KNOWN, 64], jnp.int32)

    @tg.capture
    def classify(images: ArrayLike) -> jax.Array:
        distances = jnp.sum(known * known, axis=1) - 2 * jnp.dot(images, known.T)
        return digits[jnp.argmin(distances, axis=1)]

    for size in BATCH_SIZES:
        classify(np.zeros((size, 64), np.float32))
    assert classify.cache_info().captures == len(BATCH_SIZES)

    new = rows[KNOWN:]
    random = np.random.default_rng(0)
    start = count = correct = 0
    while start < len(new):
        request = new[start : start + random.integers(1, BATCH_SIZES[-1] + 1)]
        answer = np.asarray(classify(pad_to_batch(request[:, :64])))[: len(request)]
        correct += int(np.sum(answer == request[:, 64]))
        start, count = start + len(request), count + 1

    counts = classify.cache_info()
    print(f"{count} requests, {len(new)} images, {correct / len(new):.1%} correct, {counts}")
    assert counts.captures == len(BATCH_SIZES), "no request may need a capture"
    assert counts.hits == count
    assert correct / len(new) > 0.9


if __name__ == "__main__":
    main()
