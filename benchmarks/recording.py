"""Time to record a block of eager ops against that of tracing them as a function, in one run.

    PYTHONPATH=. python benchmarks/recording.py [--ops N] [--repeats N] [--json FILE]

Each row is one body of ops. `tg.graph` records the body, `jax.make_jaxpr` traces it as a function
that JAX has not seen before; both end with a closed jaxpr. Samples of the two sides alternate; the
figures are medians. What follows is the same for both, and not timed: checks, XLA, verification.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from jax import lax
from machine import describe_start, read_processor

import tracegraph as tg
from tracegraph.recording.recording import Recording

_OPS = flags.DEFINE_integer("ops", 500, "ops in a body", 5)
_REPEATS = flags.DEFINE_integer("repeats", 15, "samples of each side", 1)
_JSON = flags.DEFINE_string("json", None, "write the figures to this file")

LIMIT = 3.0
WARM_UP = 2

Body = Callable[[jax.Array, jax.Array], Any]


class RecordingRow(NamedTuple):
    """The figures of one body, in milliseconds."""

    name: str
    recording_ms: float
    tracing_ms: float

    @property
    def ratio(self) -> float:
        """How many times the time of tracing recording takes."""
        return self.recording_ms / self.tracing_ms


def repeat(op: Callable[[Any, Any], Any], count: int) -> Body:
    """Returns a body that applies an op to its own result so often."""

    def body(x: jax.Array, w: jax.Array) -> Any:
        for _ in range(count):
            x = op(x, w)
        return x

    return body


def mix(x: jax.Array, w: jax.Array) -> jax.Array:
    """Five ops of the usual kinds."""
    y = x * 1.5
    y = y + w
    y = jnp.sin(y)
    y = y @ w
    return y - x


def make_bodies(count: int) -> dict[str, Body]:
    """Returns the bodies, of so many ops each."""
    return {
        "mixed jnp": repeat(mix, count // 5),
        "jnp.add": repeat(jnp.add, count),
        "lax.add": repeat(lax.add, count),
        "jnp.where": repeat(lambda x, w: jnp.where(True, x, w), count),
        "jnp.add, all held": lambda x, w: [jnp.add(x, w) for _ in range(count)],
    }


def record(body: Body, x: jax.Array, w: jax.Array) -> float:
    """Returns the seconds that recording a body takes."""
    stream = tg.Stream()
    with tg.stream(stream):
        start = time.perf_counter()
        recording = Recording("block", stream, jax.devices()[0])
        # Held, as the arrays of a block are.
        results = body(x, w)
        recording.leave()
        block = recording.finish()
        seconds = time.perf_counter() - start
    assert block.outputs
    del results
    return seconds


def trace(body: Body, x: jax.Array, w: jax.Array) -> float:
    """Returns the seconds that tracing a body takes, as a function of its own."""

    def function(x: jax.Array, w: jax.Array) -> Any:
        return body(x, w)

    start = time.perf_counter()
    jax.make_jaxpr(function)(x, w)
    return time.perf_counter() - start


def measure_recording(count: int, repeats: int) -> list[RecordingRow]:
    """Times every body on both sides in turns.

    Args:
        count: ops in a body.
        repeats: samples of each side.
    """
    x, w = jnp.ones((4, 4)), jnp.eye(4)
    rows: list[RecordingRow] = []
    for name, body in make_bodies(count).items():
        samples: dict[Callable[..., float], list[float]] = {record: [], trace: []}
        gc.collect()
        gc.disable()
        try:
            for turn in range(WARM_UP + repeats):
                for side, seconds in samples.items():
                    sample = side(body, x, w)
                    if turn >= WARM_UP:
                        seconds.append(sample)
        finally:
            gc.enable()
        recording, tracing = (1000 * statistics.median(each) for each in samples.values())
        rows.append(RecordingRow(name, recording, tracing))
    return rows


def format_recording(rows: Sequence[RecordingRow]) -> str:
    """Returns the table as Markdown."""
    lines = ["| body | tg.graph ms | tracing ms | ratio | limit | |", "|---|---|---|---|---|---|"]
    for row in rows:
        verdict = "met" if row.ratio <= LIMIT else "NOT MET"
        figures = f"{row.recording_ms:.1f} | {row.tracing_ms:.1f} | {row.ratio:.2f} | {LIMIT:.1f}"
        lines.append(f"| {row.name} | {figures} | {verdict} |")
    return "\n".join(lines)


def list_figures(rows: Sequence[RecordingRow]) -> list[Mapping[str, Any]]:
    """Returns the rows as they are written to a file."""
    return [{**row._asdict(), "ratio": row.ratio, "limit": LIMIT} for row in rows]


def main(argv: Sequence[str]) -> None:
    """Prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    run = {
        **describe_start(__file__, ("jax", "jaxlib")),
        "device": jax.devices()[0].device_kind,
        "processor": read_processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "ops": _OPS.value,
    }
    print(", ".join(f"{key} {value}" for key, value in run.items()))
    rows = measure_recording(_OPS.value, _REPEATS.value)
    print(format_recording(rows))
    if _JSON.value:
        document = json.dumps({"run": run, "figures": list_figures(rows)}, indent=1)
        pathlib.Path(_JSON.value).write_text(document + "\n")


if __name__ == "__main__":
    app.run(main)
