"""First calls of small functions in a process that has captured before.

    PYTHONPATH=. python benchmarks/small_captures.py [--output DIR] [--case NAME] [--captures N]
        [--dry-run]

Each case is one function at many sizes; each size is a program of its own, and each call is one of
a new function object, so that JAX remembers no trace. `jax.jit` and `tg.capture` run in processes
of their own, for what XLA chooses for one of them makes the other faster. The kernel cache is on,
as it is for users, in a new folder. The process of `tg.capture` captures all sizes twice: first
each is compiled and stored, then each is found. Figures are medians over the sizes, without the
first ones, in milliseconds. Results are compared with those of `jax.jit`.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from gpu_report import JIT, TRACEGRAPH, format_table
from gpu_sides import find_difference, name_leaves
from machine import describe_start, read_driver, read_processor, write_files
from peer_process import run_script

import tracegraph as tg
from tracegraph.kernel_caching.storing import wait_for_stores

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result files")
_CASES = flags.DEFINE_multi_string("case", [], "only these cases")
_CAPTURES = flags.DEFINE_integer("captures", 12, "sizes of each case, without the first ones", 1)
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "small sizes on the CPU")
_WORKER = flags.DEFINE_enum("worker", None, [JIT, TRACEGRAPH], "measure one side, print JSON")

FOUND = "tg.capture, found"
# Those in which a process loads libraries and Python its modules.
FIRST_CAPTURES = 3
TOLERANCE = 1e-3

Sample = Mapping[str, float]


def scale_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """One kernel of a few operations."""
    return jnp.tanh(x) * weight[0] + 1.0


def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """One matmul."""
    return x @ weight


def attend(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Two matmuls with a softmax between them."""
    return jax.nn.softmax(x @ weight @ x.T) @ x


def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step of gradient descent."""

    def compute_loss(weight: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ weight) @ weight.T - x) ** 2)

    loss, gradient = jax.value_and_grad(compute_loss)(weight)
    return loss, weight - 0.1 * gradient


def repeat(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A loop of ten matmuls."""

    def advance(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ weight), None

    return jax.lax.scan(advance, x, None, length=10)[0]


CASES: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (scale_rows, multiply, attend, step, repeat)
}


class SmallCaptureError(Exception):
    """A capture that was not what it should be: nothing is reported."""


def main(argv: Sequence[str]) -> None:
    """Runs the cases and writes their figures."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    unknown = [name for name in _CASES.value if name not in CASES]
    if unknown:
        raise app.UsageError(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if _DRY_RUN.value:
        jax.config.update("jax_platforms", "cpu")
    if _WORKER.value:
        measure = measure_jit if _WORKER.value == JIT else measure_captures
        print(json.dumps(measure(CASES[_CASES.value[0]])))
        return
    # This process leaves the memory to the others.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if not _DRY_RUN.value and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    cases = {name: measure_case(name) for name in _CASES.value or CASES}
    document = {"run": describe_run(), "cases": cases}
    page = format_page(document)
    name = "small_captures_dry_run" if _DRY_RUN.value else "small_captures"
    write_files(_OUTPUT.value, name, document, page)
    print(page)


def measure_case(name: str) -> dict[str, Any]:
    """Returns the medians of all sides of a case, and what follows from them."""
    samples = {**run_worker(name, JIT), **run_worker(name, TRACEGRAPH)}
    medians = {side: take_medians(each) for side, each in samples.items()}
    ratios = {
        side: medians[side]["first call"] / medians[JIT]["first call"]
        for side in (TRACEGRAPH, FOUND)
    }
    return {"medians": medians, "first call / jax.jit": ratios, "samples": samples}


def run_worker(name: str, side: str) -> dict[str, list[Sample]]:
    """Returns the samples of one side, from a process of its own with an empty kernel cache.

    Raises:
        subprocess.CalledProcessError: it failed; its messages went to the standard error.
    """
    command = [__file__, f"--case={name}", f"--worker={side}"]
    command += [f"--captures={_CAPTURES.value}", *(["--dry-run"] if _DRY_RUN.value else [])]
    with tempfile.TemporaryDirectory(prefix="small_captures_") as folder:
        cache = {"TRACEGRAPH_KERNEL_CACHE": "1", "TRACEGRAPH_KERNEL_CACHE_PATH": folder}
        samples = run_script(command, {**os.environ, **cache})
    print(f"[{name}, {side}]", file=sys.stderr)
    return samples


def measure_jit(function: Callable[..., Any]) -> dict[str, list[Sample]]:
    """Returns the seconds of first calls of `jax.jit`."""
    seconds = [time_call(jax.jit(renew(function)), each)[0] for each in make_arguments()]
    return {JIT: [{"first call": value} for value in seconds[FIRST_CAPTURES:]]}


def measure_captures(function: Callable[..., Any]) -> dict[str, list[Sample]]:
    """Returns the seconds of captures that compile, and of those that find their programs.

    Raises:
        SmallCaptureError: a result differs from that of `jax.jit`, or a program was not found.
    """
    arguments = make_arguments()
    compiled = [capture(function, each) for each in arguments]
    wait_for_stores()
    found = [capture(function, each) for each in arguments]
    if any("compile" in sample for sample, _ in found):
        raise SmallCaptureError("a program that the kernel cache holds was compiled")
    for (_, first), (_, second), each in zip(compiled, found, arguments, strict=True):
        wanted = name_leaves(jax.jit(renew(function))(*each))
        for result in (first, second):
            difference = find_difference(TOLERANCE, wanted, name_leaves(result))
            if difference is not None:
                raise SmallCaptureError(difference)
    rows = {TRACEGRAPH: compiled, FOUND: found}
    return {side: [sample for sample, _ in each[FIRST_CAPTURES:]] for side, each in rows.items()}


def capture(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Sample, Any]:
    """Returns the seconds of a first call and of its phases, and its result."""
    captured = tg.capture(renew(function))
    seconds, result = time_call(captured, arguments)
    return {"first call": seconds, **captured.timings()}, result


def time_call(call: Callable[..., Any], arguments: Sequence[Any]) -> tuple[float, Any]:
    """Returns the seconds of a call until its results are there, and the results."""
    start = time.perf_counter()
    result = jax.block_until_ready(call(*arguments))
    return time.perf_counter() - start, result


def renew(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a new function that does the same."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


def make_arguments() -> list[tuple[jax.Array, ...]]:
    """Returns the arguments of each size, on the device."""
    rng = np.random.default_rng(0)
    width, unit = (8, 1) if _DRY_RUN.value else (256, 8)
    weight = rng.normal(size=(width, width)) / width**0.5
    rows = [unit * (8 + index) for index in range(FIRST_CAPTURES + _CAPTURES.value)]
    arrays = [(rng.normal(size=(each, width)), weight) for each in rows]
    return jax.block_until_ready([tuple(jnp.asarray(a, jnp.float32) for a in p) for p in arrays])


def take_medians(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the median of each figure, in milliseconds."""
    return {key: statistics.median(each[key] for each in samples) * 1e3 for key in samples[0]}


def describe_run() -> dict[str, str]:
    """Returns date, versions and devices, without which a figure means nothing."""
    return {
        **describe_start(__file__, ["jax"]),
        "device": jax.devices()[0].device_kind,
        "driver": read_driver(),
        "processor": f"{read_processor()}, {os.cpu_count()} cores",
        "captures": f"{_CAPTURES.value} of each case, after {FIRST_CAPTURES} that are not counted",
    }


def format_page(document: Mapping[str, Any]) -> str:
    """Returns the document as a Markdown page."""
    cases: Mapping[str, Any] = document["cases"]
    medians = {(name, side): row for name in cases for side, row in cases[name]["medians"].items()}
    phases = list(dict.fromkeys(key for row in medians.values() for key in row))
    rows = []
    for (name, side), row in medians.items():
        ratio = cases[name]["first call / jax.jit"].get(side, 1.0)
        cells = [f"{row[phase]:.1f}" if phase in row else "" for phase in phases]
        rows.append([name, side, *cells, f"{ratio:.2f}"])
    return (
        "\n\n".join(
            [
                "# Captures of small functions in a warm process",
                "\n".join(f"* {key}: {value}" for key, value in document["run"].items()),
                format_table(["case", "side", *phases, "/ jax.jit"], rows),
                "Medians in milliseconds. The phases of a capture are those of `timings()`.",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    app.run(main)
