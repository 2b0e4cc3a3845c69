"""A step of GPT-2 small in bfloat16: one graph against `jax.jit` and PyTorch's graphs, on a GPU.

    PYTHONPATH=. python benchmarks/gpt2.py [--output DIR] [--rounds N]

Master weights are float32, the optimizer is gradient descent, the batch 8 sequences of 256 tokens.
PyTorch's step has its own attention, which is flash attention here, plain and compiled; each runs
in a process of its own. Before anything is timed, all make a few steps, after which their losses
and how far their weights have moved must agree; then they take turns.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numerics
import numpy as np
from absl import app, flags
from gpt2_torch import serve
from gpu_timing import time_total
from machine import read_version
from peer_process import start_peer

COMPILERS = {"torch graph": "", "torch graph, compiled": "default"}
TRAINED = ("loss", "weights have moved")
CHECKED_STEPS, CALLS = 4, 20
# Of a loss, which is rounded to bfloat16, and of gradients in it.
TOLERANCE = 2.0**-6
# Of the best graph of PyTorch.
LIMIT = 0.85


def main(argv: Sequence[str]) -> None:
    """Compares and times all sides, and writes one file of results."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    options: Any = flags.FLAGS
    is_dry = options["dry-run"].value
    if not is_dry and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    record: dict[str, Any] = {
        **numerics.describe_run(is_dry=is_dry),
        "torch": read_version("torch"),
        **measure(1 if is_dry else options.rounds, is_dry=is_dry),
    }
    for side, microseconds in record["microseconds"].items():
        print(f"{side:<24} {microseconds:10,.1f} us; {record['trained'][side]}")
    for line in record["replaced"]:
        print(f"    {line}")
    name = "gpt2_dry_run" if is_dry else "gpt2_gpu"
    path = pathlib.Path(options.output) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def measure(rounds: int, *, is_dry: bool) -> dict[str, Any]:
    """Returns what the first steps made, medians in microseconds, ratios and replacements.

    Raises:
        AssertionError: a side trains otherwise than `jax.jit`.
    """
    case = numerics.make_gpt2(is_dry)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[str, int], Any]] = {}
        for name, compiler in {} if is_dry else COMPILERS.items():
            sides[name] = stack.enter_context(start_peer(serve, compiler, numerics.RATE))
        ours = {name: numerics.Side(case, name) for name in numerics.SIDES}
        initial = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(case.state)]
        sides |= {name: functools.partial(_answer, side, initial) for name, side in ours.items()}
        trained = {name: ask("train", CHECKED_STEPS) for name, ask in sides.items()}
        for name, found in trained.items():
            np.testing.assert_allclose(found, trained["jax.jit"], rtol=TOLERANCE, err_msg=name)
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, ask in sides.items():
                samples[name].append(ask("time", 2 if is_dry else CALLS))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    peers = [medians[name] for name in COMPILERS if name in medians]
    ratio = {"ratio to PyTorch's best": medians["equivalent"] / min(peers)} if peers else {}
    return {
        "trained": {name: dict(zip(TRAINED, each, strict=True)) for name, each in trained.items()},
        "microseconds": medians,
        "equivalent / jax.jit": medians["equivalent"] / medians["jax.jit"],
        **ratio,
        "limit of it": LIMIT,
        "replaced": ours["equivalent"].list_replacements(),
    }


def _answer(side: numerics.Side, initial: Sequence[Any], request: str, count: int) -> Any:
    if request == "time":
        return time_total(side.advance, side.synchronise, count)
    for _ in range(count):
        side.advance()
    *leaves, loss = side.read()
    moved = [leaf - before for leaf, before in zip(leaves, initial, strict=True)]
    return float(loss), sum(float((each * each).sum()) for each in moved) ** 0.5


if __name__ == "__main__":
    app.run(main)
