"""Is anything slower with `numerics="equivalent"` than with `"xla"`? Many programs, on a GPU.

    PYTHONPATH=. python benchmarks/numerics_sweep.py [--output DIR] [--workers N] [--corpus N]

The cases of `numerics.py`, and programs of `tests/ecosystem`, a sample over all of its files.
Worker processes capture them side by side, with a lock around each trial of a replacement; when the
last capture is made, the replays of both sides are timed in turns, one program at a time. A program
that seems slower is captured and timed three times more with the machine to itself; the figure is
the median of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import pathlib
import queue
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numerics
import numpy as np
from absl import app, flags
from gpu_timing import time_block, without_collector
from numerics import NumericsCase, Side

from tests.ecosystem.program import Program, Setup
from tests.ecosystem.runner import FILES, find_missing, load_programs
from tracegraph.capturing import fastest_variant

_WORKERS = flags.DEFINE_integer("workers", 0, "processes; by default one for two cores, up to 16")
_CORPUS = flags.DEFINE_integer("corpus", 80, "how many programs of the corpus", 0)
SWEPT_SIDES = ("xla", "equivalent")
# Many short turns: what else the machine does meets both sides alike.
ROUNDS, CALLS, REPEATS = 31, 20, 3
# Two graphs of the same kernels differ by this much from run to run.
LIMIT = 1.05


@dataclasses.dataclass(frozen=True)
class Swept:
    """A program that was captured on both sides.

    Attributes:
        case: what is run.
        sides: by name.
        difference: the largest relative distance of their first results.
        is_finite: those are finite.
    """

    case: NumericsCase
    sides: dict[str, Side]
    difference: float
    is_finite: bool


def list_corpus() -> dict[str, Callable[[], NumericsCase]]:
    """Returns what makes each program of the corpus whose library is here, by name."""
    files = [load_programs(file) for file in FILES if not find_missing(file)]
    return {name: _Maker(name, each) for file in files for name, each in file.items()}


def choose_names(*, is_dry: bool, count: int) -> list[str]:
    """Returns the names of all cases, and of so many programs of the corpus."""
    corpus = list(list_corpus())
    count = min(count, len(corpus))
    sample = [corpus[index * len(corpus) // count] for index in range(count)]
    return [*numerics.list_makers(is_dry=is_dry), *sample]


def find_maker(name: str, *, is_dry: bool) -> Callable[[], NumericsCase]:
    """Returns what makes a case, or a program of the corpus; imports only the file that has it.

    Raises:
        KeyError: there is none of that name.
    """
    cases = numerics.list_makers(is_dry=is_dry)
    file = name.partition(".")[0]
    if name in cases or file not in FILES or find_missing(file):
        return cases[name]
    return _Maker(name, load_programs(file)[name])


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes the case of a program of the corpus."""

    name: str
    program: Program

    def __call__(self) -> NumericsCase:
        setup = self.program.make()
        if setup.adapt is not None or setup.options or "whole" not in self.program.modes:
            raise NotImplementedError("it is captured with options, or only in parts")
        batch = setup.make_batch(np.random.default_rng(7))
        return NumericsCase(self.name, _take_state(setup), setup.state, batch, CALLS)


def _take_state(setup: Setup) -> Callable[..., Any]:
    """Returns the function with a state in front, if it has none."""
    if setup.state is not None:
        return setup.function
    return lambda state, *batch: (state, setup.function(*batch))


def capture(case: NumericsCase) -> Swept:
    """Captures both sides and makes their first call."""
    sides = {name: Side(case, name) for name in SWEPT_SIDES}
    for side in sides.values():
        side.advance()
        side.synchronise()
    pairs = zip(*(side.read() for side in sides.values()), strict=True)
    difference = max((numerics.relate(one, other) for other, one in pairs), default=0.0)
    is_finite = all(side.is_finite() for side in sides.values())
    for side in sides.values():
        # Captured again where a state came back with other types.
        side.advance()
    return Swept(case, sides, difference, is_finite)


def measure(swept: Swept, rounds: int) -> dict[str, Any]:
    """Returns medians of both sides in microseconds, their ratio, and what was found and used."""
    samples: dict[str, list[float]] = {name: [] for name in SWEPT_SIDES}
    with without_collector():
        for turn in range(rounds):
            # Each side is the first one as often as the other.
            for name in SWEPT_SIDES[:: 1 if turn % 2 else -1]:
                side = swept.sides[name]
                samples[name].append(time_block(side.advance, side.synchronise, swept.case.calls))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    found = swept.sides["equivalent"].list_replacements()
    return {
        "microseconds": medians,
        "equivalent / xla": medians["equivalent"] / medians["xla"],
        "difference": swept.difference,
        # What has become NaN is another program to measure.
        "diverged": swept.is_finite and not all(s.is_finite() for s in swept.sides.values()),
        "found": found,
        "used": [line for line in found if ": used" in line],
    }


def work(names: Any, gate: Any, lock: Any, results: Any, is_dry: bool, rounds: int) -> None:
    """Captures programs until there are no more; times its own when all others are captured.

    Args:
        names: queue of programs.
        gate: barrier of all workers.
        lock: held while something is timed; a call that is timed may capture again.
        results: queue of (name, row).
        is_dry: small cases.
        rounds: turns of each side.
    """
    time_in_turns = fastest_variant.time_in_turns

    def take_turns(*args: Any) -> Any:
        with lock:
            return time_in_turns(*args)

    # Not by other processes at the same time: both would be slower, and not alike.
    fastest_variant.time_in_turns = take_turns
    captured: dict[str, Swept] = {}
    with contextlib.suppress(queue.Empty):
        while True:
            name = names.get(timeout=1)
            try:
                captured[name] = _prepare(find_maker(name, is_dry=is_dry))
            except Exception as error:  # noqa: BLE001 - what fails is a row, and the others go on
                results.put((name, {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}))
    # Broken where a worker has ended early: what the others have is timed.
    with contextlib.suppress(threading.BrokenBarrierError):
        gate.wait()
    for name, swept in captured.items():
        with lock:
            row = measure(swept, rounds)
        results.put((name, row))


def _prepare(make: Callable[[], NumericsCase]) -> Swept:
    with warnings.catch_warnings():
        # Of libraries that are older than the JAX here, and about donated arrays.
        warnings.simplefilter("ignore")
        return capture(make())


def sweep(names: Sequence[str], workers: int, *, is_dry: bool, rounds: int) -> dict[str, Any]:
    """Returns the row of each program, also of those whose worker ended early."""
    context = multiprocessing.get_context("spawn")
    waiting, results, lock = context.Queue(), context.Queue(), context.RLock()
    gate = context.Barrier(workers)
    for name in names:
        waiting.put(name)
    args = (waiting, gate, lock, results, is_dry, rounds)
    processes = [context.Process(target=work, args=args, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    rows: dict[str, Any] = {}
    while len(rows) < len(names):
        try:
            name, rows[name] = results.get(timeout=0.5)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                gate.abort()
            if not any(process.is_alive() for process in processes):
                rows |= {each: {"failed": "its worker ended"} for each in {*names} - {*rows}}
            continue
        print(f"{name:44} {format_row(rows[name])}", flush=True)
    for process in processes:
        process.join()
    return rows


def repeat_alone(name: str, rounds: int) -> dict[str, Any]:
    """Captures and times a program by itself; returns the median row, with the ratios of all."""
    rows = [sweep([name], 1, is_dry=False, rounds=rounds)[name] for _ in range(REPEATS)]
    rows.sort(key=lambda row: row.get("equivalent / xla", math.inf))
    return {**rows[REPEATS // 2], "alone": [row.get("equivalent / xla") for row in rows]}


def format_row(row: dict[str, Any]) -> str:
    """Returns a row as a line."""
    if "failed" in row:
        return f"not timed: {row['failed']}"
    times = row["microseconds"]
    used = f"; {len(row['used'])} of {len(row['found'])} used" if row["found"] else ""
    diverged = "; diverged" if row["diverged"] else ""
    ratio = f"{row['equivalent / xla']:.3f}"
    return f"{times['xla']:.1f} {times['equivalent']:.1f} us; {ratio}{used}{diverged}"


def main(argv: Sequence[str]) -> None:
    """Sweeps over the programs, repeats those that seem slower, and writes one file of results."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    options: Any = flags.FLAGS
    is_dry = options["dry-run"].value
    # Several processes share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not is_dry and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    start = time.perf_counter()
    for name in options.case:
        try:
            find_maker(name, is_dry=is_dry)
        except KeyError:
            raise app.UsageError(f"no program {name}") from None
    names = options.case or choose_names(is_dry=is_dry, count=_CORPUS.value)
    workers = min(_WORKERS.value or min(16, (os.cpu_count() or 2) // 2), len(names))
    rounds = 1 if is_dry else ROUNDS
    found = sweep(names, workers, is_dry=is_dry, rounds=rounds)
    rows = {name: found[name] for name in names}
    slower = [name for name, row in rows.items() if row.get("equivalent / xla", 0) > LIMIT]
    for name in [] if is_dry else slower:
        with_others = rows[name]["equivalent / xla"]
        rows[name] = {**repeat_alone(name, rounds), "with others": with_others}
    ratios = {name: row["equivalent / xla"] for name, row in rows.items() if "failed" not in row}
    record = {
        **numerics.describe_run(is_dry=is_dry),
        "workers": workers,
        "seconds": time.perf_counter() - start,
        "timed": len(ratios),
        "replaced something": sum(bool(rows[name]["used"]) for name in ratios),
        "slower": {name: ratio for name, ratio in ratios.items() if ratio > LIMIT},
        # The same program is compiled for both sides there: the ratio is that of two of them.
        "nothing used in": [name for name in ratios if not rows[name]["used"]],
        "programs": rows,
    }
    path = pathlib.Path(options.output) / "numerics_sweep_gpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(ratios)} timed, slower than {LIMIT} x: {record['slower'] or 'none'}")


if __name__ == "__main__":
    app.run(main)
