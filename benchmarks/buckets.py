"""Buckets of a decode step: memory, the time to capture all, and the cost of padding a call.

    PYTHONPATH=. python benchmarks/buckets.py [--output DIR] [--sizes N] [--dry-run]

Three figures: the pool of all buckets against that of the largest alone; the capture of all against
the sum of XLA's compiles of the padded programs, which a process of their own makes, since XLA
keeps what it has tuned; a call of each size against `jax.jit` of the padded program, padding and
cutting included on both sides.
"""

from __future__ import annotations

import datetime
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from bucket_decoder import Weights, decode, make_arguments, make_weights
from machine import read_driver, read_processor, read_version, write_files
from peer_process import answer_requests, start_peer

import tracegraph as tg

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result file")
_SIZES = flags.DEFINE_integer("sizes", 64, "buckets", 3)
_WIDTH = flags.DEFINE_integer("width", 256, "of the decoder", 1)
_LAYERS = flags.DEFINE_integer("layers", 2, "of the decoder", 1)
_REPEATS = flags.DEFINE_integer("repeats", 50, "calls of each side", 1)
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "few and small buckets")

MEMORY_LIMIT, CAPTURE_LIMIT = 1.15, 1.3


def serve(connection: Any) -> None:
    """Answers ``(sizes, width, layers)`` with the seconds of XLA's compiles."""
    answer_requests(connection, measure_compiles)


def measure_compiles(sizes: range, width: int, layers: int) -> float:
    """Returns the seconds that XLA takes for all padded programs."""
    seconds, weights = 0.0, make_weights(width, layers)
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


def main(argv: Sequence[str]) -> None:
    """Measures, prints and writes."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    is_dry = _DRY_RUN.value
    count, width, repeats = (4, 32, 3) if is_dry else (_SIZES.value, _WIDTH.value, _REPEATS.value)
    # Captures are timed as first ones.
    os.environ["TRACEGRAPH_KERNEL_CACHE"] = "0"
    sizes = range(2, 2 * count + 1, 2)
    with start_peer(serve) as ask:
        compile_seconds = ask(sizes, width, _LAYERS.value)
    weights = make_weights(width, _LAYERS.value)
    buckets = {"hidden": {0: tuple(sizes)}, "memory": {0: tuple(sizes)}}
    step: Any = tg.capture(decode, buckets=buckets)
    start = time.perf_counter()
    infos = step.warm_up(weights, *make_arguments(1, width))
    capture_seconds = time.perf_counter() - start
    alone = tg.capture(decode).lower(weights, *make_arguments(sizes[-1], width)).pool_bytes
    figures = {
        "buckets": len(infos),
        "pool_bytes": step.pool_bytes,
        "largest_alone_bytes": alone,
        "memory": step.pool_bytes / alone,
        "capture_seconds": capture_seconds,
        "compile_seconds": compile_seconds,
        "capture": capture_seconds / compile_seconds,
        "calls": measure_sizes(step, weights, sizes, repeats),
        "hits": sum(each.hits for each in step.bucket_info()),
    }
    for name, limit in (("memory", MEMORY_LIMIT), ("capture", CAPTURE_LIMIT)):
        verdict = "met" if figures[name] <= limit else "missed"
        print(f"{name}: {figures[name]:.3f}, limit {limit}: {verdict}")
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"processor": read_processor(), "gpu": read_driver()},
        "device": jax.devices()[0].device_kind,
        "versions": {name: read_version(name) for name in ("jax", "jaxlib")},
        "width": width,
        "layers": _LAYERS.value,
        **figures,
    }
    write_files(_OUTPUT.value, "buckets_dry_run" if is_dry else "buckets", document)


def measure_sizes(step: Any, weights: Weights, sizes: range, repeats: int) -> list[dict[str, Any]]:
    """Compares and times a call that is padded and one that is not, of three buckets."""
    program, rows = jax.jit(decode), []
    for bucket in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        for size in (bucket - 1, bucket):
            arguments = make_arguments(size, weights["w0"].shape[0])
            run_ours = functools.partial(step, weights, *arguments)
            run_jit = functools.partial(pad_and_cut, program, weights, arguments, size, bucket)
            np.testing.assert_allclose(run_ours(), run_jit(), rtol=1e-4, atol=1e-5)
            ours, theirs = (measure_calls(run, repeats) for run in (run_ours, run_jit))
            rows.append({"size": size, "bucket": bucket, "ours_us": ours, "jit_us": theirs})
            print(f"size {size} of {bucket}: {ours:.1f} us, padded jax.jit {theirs:.1f} us")
    return rows


if __name__ == "__main__":
    app.run(main)
