"""Whole programs of users as one graph each, against `jax.jit`, in one run.

    PYTHONPATH=. python benchmarks/whole_programs.py [--output DIR] [--case NAME] [--serial]
    [--wide] [--dry-run]

Blocks of the sides take turns; figures are medians over the rounds. A program is timed only if a
first call of both sides gives equal results within its tolerance, and if it is one graph.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
from absl import app, flags, logging
from gpu_models import GptShape
from gpu_report import JIT, TRACEGRAPH, CaseResult, Limit, SideFigures, format_report, to_document
from gpu_sides import (
    MissingFigureError,
    PeerError,
    Side,
    TorchProcess,
    TorchSide,
    find_difference,
    name_leaves,
    read_capture_seconds,
    read_sizes,
)
from gpu_timing import time_each, time_total
from machine import describe_start, read_driver, read_processor, write_files
from whole_models import PROGRAMS, WholeProgram

import tracegraph as tg
from tracegraph.lowering import build_graph, plan_program
from tracegraph.lowering.device_program import DeviceProgram
from tracegraph.lowering.planning.lanes import Arrangement
from tracegraph.lowering.planning.widen import Wide

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result files")
_CASES = flags.DEFINE_multi_string("case", [], "only these programs")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "blocks of each side", 1)
_TORCH = flags.DEFINE_bool("torch", True, "run the PyTorch peers")
_SERIAL = flags.DEFINE_bool("serial", False, "also time graphs whose steps have XLA's own order")
_WIDE = flags.DEFINE_bool("wide", False, "also time graphs without lanes")
_EQUIVALENT = flags.DEFINE_bool("equivalent", False, 'also time graphs with numerics="equivalent"')
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "small sizes on any device, few calls, no PyTorch")

SERIAL, WIDE = "tg.capture, XLA's order", "tg.capture, without lanes"
EQUIVALENT = "tg.capture, equivalent"
CAPTURE_LIMIT, POOL_LIMIT = 0.10, 1.05
# What a segment rounds up to says nothing about the plan of a small pool.
LEAST_POOL_BYTES = 40 << 20
# The model of PyTorch that has the size of a program. It starts from other numbers, so that only
# its loss at the start is compared: that of guessing.
TORCH_SHAPES = {"gpt_scan_12": GptShape(12, 128, 4, 256, 64, (4, 64))}
TORCH_TOLERANCE = 0.1
# XLA's own errors are RuntimeErrors; cuDNN attention refuses what it cannot do with the others.
_REFUSALS = (tg.TracegraphError, RuntimeError, ValueError, NotImplementedError, MissingFigureError)
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "cuda-bindings", "torch"),
    *("nvmath-python", "nvidia-cudnn-cu13", "flax", "optax", "equinox", "diffrax"),
)


class ProgramSide:
    """A program under `jax.jit` or `tg.capture`, with its state from call to call.

    Args:
        state: before the first call; it is donated.
        batch: of every call.
        call: the program's function, wrapped.
    """

    def __init__(self, state: Any, batch: tuple[Any, ...], call: Callable[..., Any]) -> None:
        self._state, self._batch, self._call = state, batch, call
        self._result: Any = None
        self._calls = 0

    def advance(self) -> None:
        """Makes one call and waits for nothing."""
        self._calls += 1
        self._state, self._result = self._call(self._state, *self._batch)

    def _synchronise(self) -> None:
        jax.block_until_ready((jax.tree.leaves(self._state)[-1:], self._result))

    def time_total(self, calls: int) -> float:
        """See `gpu_timing.time_total`."""
        return time_total(self.advance, self._synchronise, calls)

    def time_each(self) -> list[float]:
        """See `gpu_timing.time_each`."""
        return time_each(self.advance, self._synchronise)

    def time_launch(self) -> list[float]:
        """Not timed here: `gpu_replay.py` does."""
        return []

    def count_calls(self) -> int:
        """Returns how many calls the state has gone through."""
        return self._calls


def measure_program(program: WholeProgram, peers: TorchProcess | None) -> CaseResult:
    """Checks a program, and times it if it is one graph and its results agree."""
    result = CaseResult(program.name)
    try:
        setup = program.make(_DRY_RUN.value)
        wraps: dict[str, Callable[..., Any]] = {
            TRACEGRAPH: tg.capture(setup.function, donate_argnums=0),
            JIT: jax.jit(setup.function, donate_argnums=0),
        }
        batch = jax.device_put(setup.batch)
        result.refusal = check_program(program, setup.state, batch, wraps, result)
        if result.refusal:
            return result
        for name, change, options in list_variants():
            wraps[name] = tg.capture(setup.function, donate_argnums=0, **options)
            with change:
                wraps[name](jax.device_put(setup.state), *batch)
        sides: dict[str, Side] = {
            name: ProgramSide(jax.device_put(setup.state), batch, call)
            for name, call in wraps.items()
        }
        time_sides(program, {**sides, **make_peers(program, peers, result)}, result)
    except _REFUSALS as error:
        result.refusal = f"{type(error).__name__}: {error}"
    return result


def list_variants() -> Iterator[
    tuple[str, contextlib.AbstractContextManager[Any], Mapping[str, Any]]
]:
    """Yields the names of further graphs, with what builds them in another way, and options."""
    if _SERIAL.value:
        yield SERIAL, mock.patch.object(plan_program, "widen", keep_order), {}
    if _WIDE.value:
        yield WIDE, mock.patch.object(build_graph, "arrange_in_lanes", leave_as_it_is), {}
    if _EQUIVALENT.value:
        yield EQUIVALENT, contextlib.nullcontext(), {"numerics": "equivalent"}


def keep_order(program: DeviceProgram, budget_bytes: int) -> Wide:
    """Returns steps in XLA's order, in place of `widen`."""
    del budget_bytes
    return Wide(program, program)


def leave_as_it_is(
    times: Sequence[float], edges: tuple[tuple[int, int], ...], *, has_two: bool
) -> Arrangement:
    """Returns steps as they are, in place of `arrange_in_lanes`."""
    del has_two
    return Arrangement(tuple(range(len(times))), edges)


def check_program(
    program: WholeProgram,
    state: Any,
    batch: tuple[Any, ...],
    wraps: Mapping[str, Callable[..., Any]],
    result: CaseResult,
) -> str | None:
    """Captures, fills in what the capture holds and took; returns why the program is not timed."""
    capture: Any = wraps[TRACEGRAPH]
    start = time.perf_counter()
    found = name_leaves(capture(jax.device_put(state), *batch))
    result.capture["first_call_seconds"] = time.perf_counter() - start
    result.capture |= dataclasses.asdict(read_sizes(capture))
    result.capture["seconds"] = read_capture_seconds(capture)
    compiled = wraps[JIT].lower(jax.device_put(state), *batch).compile()  # type: ignore[attr-defined]
    memory = compiled.memory_analysis()
    for name in ("argument", "output", "alias", "temp"):
        result.capture[f"{name}_bytes"] = getattr(memory, f"{name}_size_in_bytes")
    wanted = name_leaves(wraps[JIT](jax.device_put(state), *batch))
    return find_difference(program.tolerance, wanted, found)


def make_peers(
    program: WholeProgram, peers: TorchProcess | None, result: CaseResult
) -> dict[str, Side]:
    """Captures PyTorch's models of the same size; one that fails is noted, not timed."""
    shape = TORCH_SHAPES.get(program.name)
    if peers is None or shape is None:
        return {}
    sides: dict[str, Side] = {}
    try:
        for name in peers.list_variants(shape, ("compiled",)):
            side = TorchSide(peers, name)
            (loss,) = side.read_results(1)
            wanted = 5.545  # of guessing one of 256 tokens
            if abs(loss - wanted) > TORCH_TOLERANCE * wanted:
                result.notes[name] = f"its loss starts at {loss:.3f}, not at {wanted}"
                continue
            sides[name] = side
    except PeerError as error:
        result.notes["torch"] = str(error)
    return sides


def time_sides(program: WholeProgram, sides: Mapping[str, Side], result: CaseResult) -> None:
    """Times the sides in turns and fills in their figures."""
    rounds, calls = (1, 2) if _DRY_RUN.value else (_ROUNDS.value, program.calls)
    totals: dict[str, list[float]] = collections.defaultdict(list)
    hosts: dict[str, list[float]] = collections.defaultdict(list)
    names = list(sides)
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            totals[name].append(sides[name].time_total(calls))
            hosts[name] += sides[name].time_each()
    for name in names:
        medians = (statistics.median(samples[name]) for samples in (totals, hosts))
        result.sides[name] = SideFigures(*medians)
    result.capture["calls_of_each_side"] = sides[JIT].count_calls()


def list_limits(results: Sequence[CaseResult]) -> list[Limit]:
    """Returns the limits of the programs that were timed."""
    limits = []
    for result in results:
        (program,) = [each for each in PROGRAMS if each.name == result.name]
        limits.append(Limit(program.name, "total / jax.jit", program.limit))
        limits.append(Limit(program.name, "beyond / compile", CAPTURE_LIMIT, 3))
        if result.capture.get("pool_bytes", 0) >= LEAST_POOL_BYTES:
            limits.append(Limit(program.name, "pool / needed bytes", POOL_LIMIT, 3))
    return limits


def write_results(run: Mapping[str, Any], results: Sequence[CaseResult]) -> str:
    """Writes what is known so far as JSON and as Markdown, and returns the page."""
    name = "whole_programs_dry_run" if _DRY_RUN.value else "whole_programs"
    limits = () if _DRY_RUN.value else list_limits(results)
    page = format_report(run, results, limits, title="Whole programs as one graph")
    write_files(_OUTPUT.value, name, to_document(run, results, limits), page)
    return page


def main(argv: Sequence[str]) -> None:
    """Runs the programs; ends with 1 when one was refused or differs."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    # Half of the device's memory stays for the PyTorch process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    if not _DRY_RUN.value and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    names = [program.name for program in PROGRAMS]
    unknown = [name for name in _CASES.value if name not in names]
    if unknown:
        raise app.UsageError(f"no case {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [each for each in PROGRAMS if each.name in (_CASES.value or names)]
    has_peers = _TORCH.value and not _DRY_RUN.value
    has_peers = has_peers and any(each.name in TORCH_SHAPES for each in chosen)
    peers = TorchProcess() if has_peers else None
    run = {
        **describe_start(__file__, PACKAGES),
        "device": jax.devices()[0].device_kind,
        "driver": read_driver(),
        "processor": read_processor(),
        "rounds": str(_ROUNDS.value),
    }
    results: list[CaseResult] = []
    page = ""
    try:
        for program in chosen:
            start = time.perf_counter()
            results.append(measure_program(program, peers))
            # After each one, so that a run that is cut short leaves what it has.
            page = write_results(run, results)
            outcome = results[-1].refusal or "done"
            seconds = time.perf_counter() - start
            print(f"{program.name}: {outcome} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    finally:
        if peers is not None:
            peers.close()
    print(page)
    if any(result.refusal for result in results):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
