"""Loops that read a result of each step on the host: ours, `jax.jit` and PyTorch, on a GPU.

    PYTHONPATH=. python benchmarks/host_reads.py [--output DIR] [--repeats N] [--dry-run]

A step is one small kernel, and one result is read before the next step: a scalar as ``float()``, a
vector of 4 KiB, 1 MiB or 16 MiB as an array of NumPy. Sides take turns; PyTorch has a process of
its own. The third side of ours reads the result as a plain array of JAX, as all reads did before.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from gpu_timing import time_total
from machine import read_driver, read_processor, read_version, write_files
from peer_process import answer_requests, start_peer

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result file")
_REPEATS = flags.DEFINE_integer("repeats", 9, "turns of each side", 1)
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "on any device, few calls, without PyTorch")

SIZES = {"scalar": 1, "4 KiB": 1 << 10, "1 MiB": 1 << 18, "16 MiB": 1 << 22}
OURS, PLAIN, JIT, TORCH = "tg.capture", "tg.capture, as a jax.Array", "jax.jit", "torch, eager"


def _read(value: Any, count: int) -> Any:
    return float(value) if count == 1 else np.asarray(value)


def make_loop(side: str, count: int) -> Callable[[], None]:
    """Returns what makes one step in JAX and checks nothing: results are compared before."""
    jax, tg = importlib.import_module("jax"), importlib.import_module("tracegraph")
    jnp = jax.numpy

    def step(x: Any) -> Any:
        return x * 0.5 + 1

    function = jax.jit(step) if side == JIT else tg.capture(step)
    start = jnp.zeros(() if count == 1 else count)
    state = [start]

    def advance() -> None:
        result = function(state[0])
        _read(result.jax() if side == PLAIN else result, count)
        state[0] = result

    advance()
    np.testing.assert_array_equal(_read(state[0], count), np.asarray(step(start)))
    return advance


def serve(connection: Any) -> None:
    """Times PyTorch's loops: requests are ``(count, calls)``."""
    torch = importlib.import_module("torch")

    def answer(count: int, calls: int) -> float:
        state = [torch.zeros(() if count == 1 else count, device="cuda")]

        def advance() -> None:
            state[0] = torch.addcmul(torch.ones_like(state[0]), state[0], state[0], value=0.5)
            state[0].item() if count == 1 else state[0].cpu().numpy()

        return time_total(advance, torch.cuda.synchronize, calls)

    answer_requests(connection, answer)


def main(argv: Sequence[str]) -> None:
    """Times all sides and writes the result."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if _DRY_RUN.value:
        run({}, 1)
        return
    with start_peer(serve) as ask:
        jax = importlib.import_module("jax")
        if jax.default_backend() != "gpu":
            sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
        run({TORCH: ask}, _REPEATS.value)


def run(peers: dict[str, Callable[..., Any]], repeats: int) -> None:
    """Times every size; writes the figures unless it is a dry run."""
    times: dict[str, dict[str, float]] = {}
    for name, count in SIZES.items():
        calls = 3 if _DRY_RUN.value else 200 if count < 1 << 20 else 30
        sides = {side: make_loop(side, count) for side in (OURS, PLAIN, JIT)}
        ask: dict[str, Callable[[], float]] = {
            side: functools.partial(time_total, advance, lambda: None, calls)
            for side, advance in sides.items()
        }
        ask |= {side: functools.partial(peer, count, calls) for side, peer in peers.items()}
        samples: dict[str, list[float]] = {side: [] for side in ask}
        for _ in range(repeats):
            for side, time_one in ask.items():
                samples[side].append(time_one())
        times[name] = {side: statistics.median(each) for side, each in samples.items()}
        print(name, {side: round(each, 1) for side, each in times[name].items()}, flush=True)
    if _DRY_RUN.value:
        return
    document = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python benchmarks/host_reads.py",
        "machine": {"processor": read_processor(), "gpu": read_driver()},
        "versions": {name: read_version(name) for name in ("jax", "jaxlib", "torch")},
        "microseconds_per_step": times,
    }
    write_files(_OUTPUT.value, "host_reads", document)


if __name__ == "__main__":
    app.run(main)
