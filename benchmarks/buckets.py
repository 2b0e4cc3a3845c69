"""Buckets of a decode step: memory, the time to capture all, and the cost of padding a call.

    PYTHONPATH=.:benchmarks python benchmarks/buckets.py
    PYTHONPATH=.:benchmarks python benchmarks/buckets.py --sizes 4 --width 32  # a dry run

Three figures: the pool of all buckets against that of the largest alone; the capture of all against
the sum of XLA's compiles of the padded programs; a call of each size against `jax.jit` of the
padded program, padding and cutting included on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg

Weights = dict[str, jax.Array]
MEMORY_LIMIT, CAPTURE_LIMIT = 1.15, 1.3


def make_weights(width: int, layers: int) -> Weights:
    """Returns the weights of a small decoder."""
    keys = jax.random.split(jax.random.key(0), 2 * layers)
    return {f"w{i}": jax.random.normal(key, (width, width)) / width for i, key in enumerate(keys)}


def decode(weights: Weights, hidden: jax.Array, memory: jax.Array) -> jax.Array:
    """Returns the next hidden state of each row, which attends to its own memory."""
    for index in range(0, len(weights), 2):
        scores = jax.nn.softmax(jnp.einsum("bw,btw->bt", hidden, memory))
        hidden = hidden + jnp.einsum("bt,btw->bw", scores, memory) @ weights[f"w{index}"]
        hidden = jnp.tanh(hidden @ weights[f"w{index + 1}"]) + hidden
    return hidden


def make_arguments(size: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of a call and their memory."""
    hidden = jnp.ones((size, width)) / width
    return hidden, jnp.ones((size, 8, width)) / width


def measure_compiles(weights: Weights, sizes: range, width: int) -> float:
    """Returns the seconds that XLA takes for all padded programs."""
    seconds = 0.0
    for size in reversed(sizes):
        lowered = jax.jit(decode).lower(weights, *make_arguments(size, width))
        start = time.perf_counter()
        lowered.compile()
        seconds += time.perf_counter() - start
    return seconds


def measure_calls(run: Callable[[], Any], repeats: int) -> float:
    """Returns the median microseconds of a call that is waited for."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        samples.append(time.perf_counter() - start)
    return 1e6 * statistics.median(samples)


def pad_and_cut(
    program: Any, weights: Weights, arguments: tuple[jax.Array, ...], size: int, bucket: int
) -> Any:
    """Does what a user of `jax.jit` does by hand."""
    padded = [jnp.pad(x, [(0, bucket - size)] + [(0, 0)] * (x.ndim - 1)) for x in arguments]
    return program(weights, *padded)[:size]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=50)
    given = parser.parse_args()
    # Captures are timed as first ones.
    os.environ["TRACEGRAPH_KERNEL_CACHE"] = "0"
    sizes = range(2, 2 * given.sizes + 1, 2)
    weights = make_weights(given.width, given.layers)

    compile_seconds = measure_compiles(weights, sizes, given.width)
    buckets = {"hidden": {0: tuple(sizes)}, "memory": {0: tuple(sizes)}}
    step: Any = tg.capture(decode, buckets=buckets)
    start = time.perf_counter()
    infos = step.warm_up(weights, *make_arguments(1, given.width))
    capture_seconds = time.perf_counter() - start
    alone = tg.capture(decode).lower(weights, *make_arguments(sizes[-1], given.width)).pool_bytes
    print(f"device: {jax.devices()[0].device_kind}, jax {jax.__version__}, {len(infos)} buckets")
    memory, capture = step.pool_bytes / alone, capture_seconds / compile_seconds
    print(f"pool: {step.pool_bytes:,} bytes, {memory:.3f} x the largest alone ({MEMORY_LIMIT})")
    print(f"capture of all: {capture_seconds:.2f} s, {capture:.2f} x XLA's ({CAPTURE_LIMIT})")

    program = jax.jit(decode)
    rows = []
    for bucket in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        for size in (bucket - 1, bucket):
            arguments = make_arguments(size, given.width)

            def run_ours(arguments: Any = arguments) -> Any:
                return step(weights, *arguments)

            def run_jit(arguments: Any = arguments, size: int = size, bucket: int = bucket) -> Any:
                return pad_and_cut(program, weights, arguments, size, bucket)

            np.testing.assert_allclose(run_ours(), run_jit(), rtol=1e-4, atol=1e-5)
            ours, theirs = (measure_calls(run, given.repeats) for run in (run_ours, run_jit))
            rows.append({"size": size, "bucket": bucket, "ours_us": ours, "jit_us": theirs})
            print(f"size {size} of {bucket}: {ours:.1f} us, padded jax.jit {theirs:.1f} us")
    hits = sum(each.hits for each in step.bucket_info())
    print(json.dumps({"memory": memory, "capture": capture, "hits": hits, "calls": rows}))


if __name__ == "__main__":
    main()
