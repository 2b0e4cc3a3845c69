"""CUDA graphs of tracegraph against `jax.jit` and against those of PyTorch, in one run.

    PYTHONPATH=. python benchmarks/gpu_replay.py [--output DIR] [--quick] [--case NAME] [--dry-run]

Blocks of the sides take turns, so that whatever else happens to the machine hits all of them; the
figures are medians over the rounds. A case is timed only if its results agree.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from gpu_models import Case, MlpShape, make_cases
from gpu_report import (
    JIT,
    LIMITS,
    TRACEGRAPH,
    CaseResult,
    Limit,
    SideFigures,
    format_report,
    to_document,
)
from gpu_sides import (
    JaxSide,
    MissingFigureError,
    PeerError,
    Side,
    TorchProcess,
    TorchSide,
    find_difference,
    measure_xla,
    read_capture_seconds,
    read_sizes,
    run_once,
)
from machine import describe_start, read_driver, write_files

import tracegraph as tg

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result files")
_CASES = flags.DEFINE_multi_string("case", [], "only these cases")
_QUICK = flags.DEFINE_bool("quick", False, "few rounds, and no compiled PyTorch")
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on the CPU, without PyTorch")
_TORCH = flags.DEFINE_bool("torch", True, "run the PyTorch peers")
_COMPILERS = flags.DEFINE_multi_enum(
    "compiler", ["compiled"], ["compiled", "autotuned"], "modes of torch.compile"
)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "blocks of each side", 1)

CHECKED_CALLS, QUICK_ROUNDS, DRY_ROUNDS = 5, 5, 2
# Two programs for one model round differently, and dropout draws other numbers.
PEER_TOLERANCE, DROPOUT_TOLERANCE = 5e-3, 2e-2
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "cuda-bindings"),
    *("torch", "triton", "numpy"),
)


def main(argv: Sequence[str]) -> None:
    """Runs the cases; ends with 1 when one was refused."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    # Half of the device's memory stays for the PyTorch process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    if _DRY_RUN.value:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    cases = choose_cases(make_cases(is_dry=_DRY_RUN.value), _CASES.value)
    peers = TorchProcess() if _TORCH.value and not _DRY_RUN.value else None
    # The limits are those of one H200.
    limits = () if _DRY_RUN.value else LIMITS
    results: list[CaseResult] = []
    try:
        run = describe_run(peers)
        for case in cases:
            report_progress(f"{case.name} ...")
            start = time.perf_counter()
            results.append(measure_case(case, peers))
            # After each case, so that a run that is cut short leaves what it has.
            write_results(run, results, limits)
            refusal = results[-1].refusal
            outcome = f"refused: {refusal}" if refusal else "done"
            report_progress(f"{case.name} {outcome} ({time.perf_counter() - start:.0f} s)")
    finally:
        if peers is not None:
            peers.close()
    print(format_report(run, results, limits))
    if any(result.refusal for result in results):
        sys.exit(1)


def choose_cases(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Returns the cases of these names, or all if there are none."""
    known = [case.name for case in cases]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise app.UsageError(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
    return [case for case in cases if not names or case.name in names]


def measure_case(case: Case, peers: TorchProcess | None) -> CaseResult:
    """Checks a case, and times it if its results agree."""
    result = CaseResult(case.name)
    donated = (0,) if case.has_state else ()
    capture = tg.capture(case.function, donate_argnums=donated)
    jit = jax.jit(case.function, donate_argnums=donated)
    try:
        result.refusal = check_case(case, capture, jit, result)
        if result.refusal:
            return result
        mine = {TRACEGRAPH: JaxSide(case, capture), JIT: JaxSide(case, jit)}
        values = {name: side.read_results(CHECKED_CALLS) for name, side in mine.items()}
        result.refusal = compare_values(values[JIT], values[TRACEGRAPH], PEER_TOLERANCE)
        if result.refusal:
            return result
        sides: dict[str, Side] = {**mine, **make_peers(case, peers, values[JIT], result)}
        time_sides(case, sides, result)
    except (tg.TracegraphError, jax.errors.JaxRuntimeError, MissingFigureError) as error:
        result.refusal = f"{type(error).__name__}: {error}"
    return result


def check_case(case: Case, capture: tg.GraphedFunction, jit: Any, result: CaseResult) -> str | None:
    """Captures, fills in what the capture holds and took; returns why the case is refused."""
    # The capture goes first: what XLA remembers of one compilation makes the next one faster.
    start = time.perf_counter()
    found = run_once(case, capture)
    result.capture["first_call_seconds"] = time.perf_counter() - start
    result.capture |= measure_xla(case, jit)
    difference = find_difference(case.tolerance, run_once(case, jit), found)
    if difference:
        return difference
    sizes = read_sizes(capture)
    if sizes.platform != jax.default_backend():
        return f"the graph is on {sizes.platform}, jax.jit computes on {jax.default_backend()}"
    result.capture |= dataclasses.asdict(sizes)
    try:
        result.capture["seconds"] = read_capture_seconds(capture)
    except MissingFigureError as error:
        result.notes["capture seconds"] = str(error)
    return None


def make_peers(
    case: Case, peers: TorchProcess | None, wanted: Sequence[float], result: CaseResult
) -> dict[str, Side]:
    """Captures the PyTorch variants of a case; one that fails or differs is noted, not timed."""
    if peers is None:
        return {}
    compilers = () if _QUICK.value else tuple(_COMPILERS.value)
    tolerance = DROPOUT_TOLERANCE if isinstance(case.shape, MlpShape) else PEER_TOLERANCE
    sides: dict[str, Side] = {}
    try:
        for name in peers.list_variants(case.shape, compilers):
            report_progress(f"{case.name}: preparing {name}")
            side = TorchSide(peers, name)
            difference = _prepare_peer(side, wanted, tolerance)
            if difference:
                result.notes[name] = difference
            else:
                sides[name] = side
    except PeerError as error:
        result.notes["torch"] = str(error)
    return sides


def _prepare_peer(side: TorchSide, wanted: Sequence[float], tolerance: float) -> str | None:
    try:
        return compare_values(wanted, side.read_results(CHECKED_CALLS), tolerance)
    except PeerError as error:
        return str(error)


def compare_values(wanted: Sequence[float], got: Sequence[float], tolerance: float) -> str | None:
    """Returns how the results of the first calls differ; None if they agree."""
    if np.allclose(got, wanted, rtol=tolerance, atol=tolerance):
        return None
    texts = [", ".join(f"{value:.5g}" for value in values) for values in (got, wanted)]
    return f"the first results are {texts[0]}; those of jax.jit are {texts[1]}"


def time_sides(case: Case, sides: Mapping[str, Side], result: CaseResult) -> None:
    """Times the sides in turns and fills in their figures.

    Raises:
        RuntimeError: the sides made different numbers of calls.
    """
    totals: dict[str, list[float]] = {name: [] for name in sides}
    hosts: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for index in range(count_rounds()):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            totals[name].append(sides[name].time_total(case.calls))
            hosts[name] += sides[name].time_each()
    counts = {name: side.count_calls() for name, side in sides.items()}
    if len(set(counts.values())) != 1:
        raise RuntimeError(f"the sides of {case.name} made different numbers of calls: {counts}")
    result.capture["calls_of_each_side"] = counts[JIT]
    for name, side in sides.items():
        launches = [] if name == JIT else time_launches(side, name, result)
        result.sides[name] = SideFigures(
            total_us=statistics.median(totals[name]),
            host_us=statistics.median(hosts[name]),
            launch_us=statistics.median(launches) if launches else None,
        )


def time_launches(side: Side, name: str, result: CaseResult) -> list[float]:
    """Returns microseconds of launches alone; none, with a note, where that is not possible."""
    try:
        return [sample for _ in range(count_rounds()) for sample in side.time_launch()]
    except MissingFigureError as error:
        result.notes[f"launch of {name}"] = str(error)
        return []


def count_rounds() -> int:
    """Returns how many blocks of each side are timed."""
    if _DRY_RUN.value:
        return DRY_ROUNDS
    return min(_ROUNDS.value, QUICK_ROUNDS) if _QUICK.value else _ROUNDS.value


def describe_run(peers: TorchProcess | None) -> dict[str, str]:
    """Returns date, versions, devices and command, without which a figure means nothing."""
    run = {
        **describe_start(__file__, PACKAGES),
        "device": jax.devices()[0].device_kind,
        "driver": read_driver(),
        "cores": str(os.cpu_count()),
        "rounds": str(count_rounds()),
    }
    if peers is not None:
        try:
            run |= peers.describe()
        except PeerError as error:
            run["torch failed"] = str(error)
    return run


def write_results(
    run: Mapping[str, Any], results: Sequence[CaseResult], limits: Sequence[Limit]
) -> None:
    """Writes what is known so far as JSON and as Markdown."""
    name = "gpu_replay_dry_run" if _DRY_RUN.value else "gpu_replay"
    page = format_report(run, results, limits)
    write_files(_OUTPUT.value, name, to_document(run, results, limits), page)


def report_progress(text: str) -> None:
    """Prints a line with the time since the start."""
    print(f"[{time.perf_counter() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


_START = time.perf_counter()

if __name__ == "__main__":
    app.run(main)
