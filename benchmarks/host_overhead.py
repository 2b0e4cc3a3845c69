"""Time per call of a captured function against `jax.jit`, in one run, interleaved.

    PYTHONPATH=. python benchmarks/host_overhead.py [--profile] [--json FILE]

Each row is one function. Both sides run the same calls on the same values, wait for one result of
every call, and keep the results in the loop's variables, as a program does. Samples of the two
sides alternate, so that a busy machine hits both; the figures are medians over the samples.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from call_profile import Counts, count_calls
from machine import describe_start, read_processor

import tracegraph as tg

_LEAVES = flags.DEFINE_multi_integer("leaves", [1, 10, 100, 1000], "sizes of the donated state")
_LEAF_SIZE = flags.DEFINE_integer("leaf-size", 128, "float32 elements of one leaf", 1)
_REPEATS = flags.DEFINE_integer("repeats", 60, "samples of each side", 1)
_CALLS = flags.DEFINE_integer("calls", 40, "calls in one sample", 1)
_WARMUP = flags.DEFINE_integer("warmup", 20, "calls before the first sample", 2)
_PROFILE = flags.DEFINE_bool("profile", False, "count the work of one call instead of timing it")
_JSON = flags.DEFINE_string("json", None, "write the figures to this file")

TINY_LIMIT, LEAVES_LIMIT = 1.5, 1.6
# One donated leaf more may cost copies, but no call of ours; a few are left for cache effects.
ALLOWED_GROWTH_CALLS = 5

Loop = Callable[[int], Any]
Wrap = Callable[..., Callable[..., Any]]


class Workload(NamedTuple):
    """One row: its name, the highest ratio allowed, and what makes its loop for either side."""

    name: str
    limit: float
    make_loop: Callable[[Wrap], Loop]


class Row(NamedTuple):
    """The figures of one workload, in microseconds per call."""

    name: str
    jit_us: float
    tracegraph_us: float
    limit: float

    @property
    def ratio(self) -> float:
        """How many times `jax.jit`'s time a captured call takes."""
        return self.tracegraph_us / self.jit_us


def double(x: jax.Array) -> jax.Array:
    """The tiny function."""
    return x * 2


def step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Moves every leaf towards the batch, and returns the distance of the first as the loss."""
    moved = jax.tree.map(lambda leaf: leaf - 0.1 * (leaf - batch), state)
    return moved, jnp.mean((state["leaf_0000"] - batch) ** 2)


def make_tiny_loop(wrap: Wrap, *, input_count: int) -> Loop:
    """Returns a loop over `double` on 5 elements.

    Args:
        wrap: `jax.jit` or `tg.capture`.
        input_count: 2 alternates between two arrays, so that each call brings a new one.
    """
    call = wrap(double)
    inputs = [jnp.arange(5, dtype=jnp.float32) + offset for offset in range(input_count)]

    def loop(count: int) -> Any:
        result = None
        for index in range(count):
            result = call(inputs[index % input_count])
            result.block_until_ready()
        return result

    return loop


def make_step_loop(wrap: Wrap, *, leaf_count: int, leaf_size: int) -> Loop:
    """Returns a loop over `step` with donated state of so many leaves, kept from call to call."""
    call = wrap(step, donate_argnums=(0,))
    state = {
        f"leaf_{index:04}": jnp.full((leaf_size,), index, jnp.float32)
        for index in range(leaf_count)
    }
    batches = [jnp.linspace(0.0, scale, leaf_size, dtype=jnp.float32) for scale in (1.0, 2.0)]

    def loop(count: int) -> Any:
        nonlocal state
        loss = None
        for index in range(count):
            state, loss = call(state, batches[index % 2])
            loss.block_until_ready()
        return state, loss

    return loop


def make_workloads(leaf_counts: Sequence[int], leaf_size: int) -> list[Workload]:
    """Returns the rows in the order of the table."""
    rows = [
        Workload("tiny, two inputs", TINY_LIMIT, functools.partial(make_tiny_loop, input_count=2)),
        Workload("tiny, same input", TINY_LIMIT, functools.partial(make_tiny_loop, input_count=1)),
    ]
    for count in leaf_counts:
        make_loop = functools.partial(make_step_loop, leaf_count=count, leaf_size=leaf_size)
        rows.append(Workload(f"{count} donated leaves", LEAVES_LIMIT, make_loop))
    return rows


def check_equality(workload: Workload, loops: Mapping[str, Loop], calls: int) -> None:
    """Runs both sides for so many calls from the start, and exits when their results differ."""
    wanted, got = (jax.tree.leaves(jax.device_get(loop(calls))) for loop in loops.values())
    pairs = zip(wanted, got, strict=True)
    if not all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs):
        sys.exit(f"{workload.name}: results differ from jax.jit after {calls} calls")


def measure(loops: Mapping[str, Loop], repeats: int, calls: int) -> dict[str, float]:
    """Times loops in turns.

    Args:
        loops: by name.
        repeats: samples of each.
        calls: calls in one sample.

    Returns:
        Median microseconds per call, by name.
    """
    samples: dict[str, list[float]] = {name: [] for name in loops}
    order = list(loops)
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            order.reverse()
            for name in order:
                loop = loops[name]
                start = time.perf_counter_ns()
                loop(calls)
                samples[name].append((time.perf_counter_ns() - start) / calls / 1000)
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in samples.items()}


def make_loops(workload: Workload) -> dict[str, Loop]:
    """Returns the two sides of a workload."""
    capture = functools.partial(tg.capture, verify=False)
    return {"jit": workload.make_loop(jax.jit), "tracegraph": workload.make_loop(capture)}


def time_workload(workload: Workload) -> Row:
    """Checks that both sides agree, then times them."""
    loops = make_loops(workload)
    check_equality(workload, loops, _WARMUP.value)
    medians = measure(loops, _REPEATS.value, _CALLS.value)
    return Row(workload.name, medians["jit"], medians["tracegraph"], workload.limit)


def profile_workload(workload: Workload) -> Counts:
    """Counts the work of one captured call that is neither the XLA call nor a copy."""
    loop = make_loops(workload)["tracegraph"]
    loop(_WARMUP.value)
    return count_calls(functools.partial(loop, 1))


def format_rows(rows: Sequence[Row]) -> str:
    """Returns the table of times."""
    lines = [f"{'case':<22}{'jax.jit us':>12}{'tracegraph us':>15}{'ratio':>8}{'limit':>7}  pass"]
    for row in rows:
        verdict = "yes" if row.ratio <= row.limit else "NO"
        lines.append(
            f"{row.name:<22}{row.jit_us:>12.1f}{row.tracegraph_us:>15.1f}{row.ratio:>8.2f}"
            f"{row.limit:>7.1f}  {verdict}"
        )
    return "\n".join(lines)


def format_counts(counts: Mapping[str, Counts]) -> str:
    """Returns the table of counts, and whether the calls grow with the leaves."""
    lines = [f"{'case':<22}{'our calls':>12}{'our bytecodes':>15}{'excluded':>10}"]
    for name, count in counts.items():
        lines.append(f"{name:<22}{count.ours:>12}{count.bytecodes:>15}{count.excluded:>10}")
    steps = [count.ours for name, count in counts.items() if "leaves" in name]
    if len(steps) > 1:
        grows = max(steps) - min(steps) > ALLOWED_GROWTH_CALLS
        lines.append(f"our calls grow with the donated leaves: {'YES' if grows else 'no'}")
    return "\n".join(lines)


def describe_run() -> dict[str, Any]:
    """Returns date, versions and machine, without which a figure means nothing."""
    names = ("jax", "jaxlib", "numpy")
    return {
        **describe_start(__file__, names),
        "device": jax.devices()[0].device_kind,
        "processor": read_processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
    }


def main(argv: Sequence[str]) -> None:
    """Prints the table, or with ``--profile`` the counts."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    run = describe_run()
    print(", ".join(f"{key} {value}" for key, value in run.items()))
    workloads = make_workloads(_LEAVES.value, _LEAF_SIZE.value)
    if _PROFILE.value:
        counts = {workload.name: profile_workload(workload) for workload in workloads}
        print(format_counts(counts))
        figures: list[dict[str, Any]] = [
            {"name": name, **count._asdict()} for name, count in counts.items()
        ]
    else:
        rows = [time_workload(workload) for workload in workloads]
        print(format_rows(rows))
        figures = [{**row._asdict(), "ratio": row.ratio} for row in rows]
    if _JSON.value:
        document = json.dumps({"run": run, "figures": figures}, indent=1)
        pathlib.Path(_JSON.value).write_text(document + "\n")


if __name__ == "__main__":
    app.run(main)
