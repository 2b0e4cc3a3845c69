"""Loops and branches in one graph, against `jax.jit`, on a GPU.

    PYTHONPATH=. python benchmarks/control_flow.py [--output DIR] [--case NAME] [--repeats N]

The two sides of a case take turns in one process; the figures are medians over the repeats, of the
time per call with the device's work included. Every result is compared before it is timed.
"""

from __future__ import annotations

import dataclasses
import datetime
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from gpu_timing import time_total
from jax import lax
from machine import read_processor, write_files

import tracegraph as tg

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result file")
_CASES = flags.DEFINE_multi_string("case", [], "these cases only")
_REPEATS = flags.DEFINE_integer("repeats", 9, "turns of each side", 1)
_CALLS = flags.DEFINE_integer("calls", 50, "calls per turn", 1)
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "on any device, few calls")

SIZE = 1024


@dataclasses.dataclass(frozen=True)
class LoopCase:
    """A program and what it is called with.

    Attributes:
        name: in the results.
        function: what both sides run.
        arguments: of every call.
        iterations: of its loop; 1 for a branch.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    iterations: int


def list_cases() -> list[LoopCase]:
    """Returns the cases: what a loop costs by its length, and programs that consist of loops."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=SIZE).astype(np.float32))
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(256, 256)).astype(np.float32)) / 16
    rows = jnp.asarray(np.random.default_rng(2).normal(size=(100, 64, 256)).astype(np.float32))

    def iterate(length: int) -> Callable[..., Any]:
        return lambda x: lax.scan(lambda c, _: (jnp.sin(c) * 1.1, None), x, None, length)[0]

    def recur(weights: Any, rows: Any) -> Any:
        def turn(h: Any, row: Any) -> tuple[Any, Any]:
            h = jnp.tanh(h @ weights + row)
            return h, h

        return lax.scan(turn, rows[0], rows)

    def train(weights: Any, rows: Any) -> Any:
        loss = jax.value_and_grad(lambda w: jnp.mean(recur(w, rows)[1] ** 2))
        value, gradient = loss(weights)
        return weights - 0.1 * gradient, value

    def search(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 1000.0, lambda c: c + jnp.abs(jnp.sin(c)) + 1, x * 0)

    def count(length: Any, x: Any) -> Any:
        return lax.fori_loop(0, length, lambda _, c: jnp.sin(c) * 1.1, x)

    def branch(x: Any) -> Any:
        return lax.cond(x[0] > 0, lambda: jnp.sort(x), lambda: jnp.cumsum(x))

    return [
        LoopCase("scan_100", iterate(100), (x,), 100),
        LoopCase("scan_1000", iterate(1000), (x,), 1000),
        LoopCase("scan_10000", iterate(10_000), (x,), 10_000),
        LoopCase("while_loop", search, (x,), 600),
        LoopCase("fori_loop_dynamic", count, (jnp.int32(1000), x), 1000),
        LoopCase("rnn_100", recur, (weights, rows), 100),
        LoopCase("rnn_100_train", train, (weights, rows), 100),
        LoopCase("cond", branch, (x,), 1),
    ]


def measure(case: LoopCase, repeats: int, calls: int) -> dict[str, Any]:
    """Returns the medians of both sides in microseconds, and what they mean per iteration.

    Raises:
        AssertionError: the results differ.
    """
    sides = {"tracegraph": tg.capture(case.function), "jax.jit": jax.jit(case.function)}
    results: dict[str, Any] = {name: call(*case.arguments) for name, call in sides.items()}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *results.values()
    )
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            last: list[Any] = []

            def advance(call: Callable[..., Any] = call, last: list[Any] = last) -> None:
                last[:] = [call(*case.arguments)]

            def synchronise(last: list[Any] = last) -> None:
                jax.block_until_ready(last)

            samples[name].append(time_total(advance, synchronise, calls))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ratio = medians["tracegraph"] / medians["jax.jit"]
    per_iteration = {name: value / case.iterations for name, value in medians.items()}
    return {"microseconds": medians, "ratio": ratio, "per_iteration": per_iteration}


def main(argv: Sequence[str]) -> None:
    """Runs the cases and writes one file of results."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not _DRY_RUN.value and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    cases = {case.name: case for case in list_cases()}
    unknown = [name for name in _CASES.value if name not in cases]
    if unknown:
        raise app.UsageError(f"no case {', '.join(unknown)}; there are {', '.join(cases)}")
    repeats, calls = (1, 2) if _DRY_RUN.value else (_REPEATS.value, _CALLS.value)
    found: dict[str, Any] = {}
    for name in _CASES.value or cases:
        found[name] = measure(cases[name], repeats, calls)
        row = found[name]
        print(
            f"{name:18} {row['microseconds']['tracegraph']:10.1f} us, {row['ratio']:5.2f} x jit, "
            f"{row['per_iteration']['tracegraph']:7.2f} us an iteration",
            flush=True,
        )
    if _DRY_RUN.value:
        return
    record = {
        "date": str(datetime.date.today()),
        "command": " ".join(sys.argv),
        "device": jax.devices()[0].device_kind,
        "processor": read_processor(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "cases": found,
    }
    write_files(_OUTPUT.value, "control_flow_gpu", record)


if __name__ == "__main__":
    app.run(main)
