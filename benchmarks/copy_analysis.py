"""XLA's option `xla_gpu_copy_insertion_use_region_analysis`: what it saves, in one run.

    PYTHONPATH=. python benchmarks/copy_analysis.py [--output DIR] [--case NAME] [--dry-run]

A GPT step of 2 layers and one of 12, each captured without and with the option; blocks of both and
of `jax.jit` take turns, and figures are medians. The last line is the decision about
`FIRST_OPTIONS` in `lowering/compile_gpu.py`, by the rule of `decide`.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import app, flags
from gpu_models import Case, make_cases
from gpu_sides import JaxSide, find_difference, read_capture_seconds, read_sizes, run_once
from machine import read_driver, read_version

import tracegraph as tg
from tracegraph.lowering import compile_gpu

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result file")
_CASES = flags.DEFINE_multi_string("case", ["gpt_2x128", "gpt_12x128"], "cases of gpu_replay.py")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "blocks of each side", 1)
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on any device, few rounds")

OPTION = ("xla_gpu_copy_insertion_use_region_analysis", True)
WITHOUT, WITH, JIT = "without", "with", "jax.jit"
# A difference below this share of the time is noise between two runs.
NOISE, GAIN = 0.005, 0.02


def decide(cases: Mapping[str, Mapping[str, Any]]) -> tuple[bool, str]:
    """Returns whether the option is to be set, and why.

    It is set if it makes one case faster by `GAIN`, none slower by more than `NOISE`, and adds no
    node to any; of two equal programs XLA's default stays.
    """
    ratios = {name: case["ratio"] for name, case in cases.items()}
    more = [n for n, each in cases.items() if each["nodes"][WITH] > each["nodes"][WITHOUT]]
    slower = [name for name, ratio in ratios.items() if ratio > 1 + NOISE]
    if more or slower:
        return False, f"it adds nodes to {more} and time to {slower}"
    faster = [name for name, ratio in ratios.items() if ratio <= 1 - GAIN]
    if not faster:
        return False, f"no case is faster by {GAIN:.0%}"
    return True, f"faster: {', '.join(faster)}; none is slower by {NOISE:.1%}"


def measure_case(case: Case) -> dict[str, Any]:
    """Returns nodes, bytes, seconds of the compilation and medians of a case, and their ratio.

    Raises:
        RuntimeError: results differ.
    """
    calls: dict[str, Any] = {JIT: jax.jit(case.function, donate_argnums=0)}
    wanted = run_once(case, calls[JIT])
    figures: dict[str, Any] = {"nodes": {}, "kinds": {}, "pool_bytes": {}, "compile_seconds": {}}
    for name, options in ((WITHOUT, ()), (WITH, (OPTION,))):
        calls[name] = tg.capture(case.function, donate_argnums=0)
        before, compile_gpu.FIRST_OPTIONS = compile_gpu.FIRST_OPTIONS, options
        try:
            difference = find_difference(case.tolerance, wanted, run_once(case, calls[name]))
        finally:
            compile_gpu.FIRST_OPTIONS = before
        if difference:
            raise RuntimeError(f"{case.name} {name} it: {difference}")
        sizes = read_sizes(calls[name])
        figures["nodes"][name], figures["kinds"][name] = sizes.nodes, sizes.kinds
        figures["pool_bytes"][name] = sizes.pool_bytes
        figures["compile_seconds"][name] = read_capture_seconds(calls[name])["compile"]
    sides = {name: JaxSide(case, call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(2 if _DRY_RUN.value else _ROUNDS.value):
        for name in sorted(sides, reverse=bool(index % 2)):
            samples[name].append(sides[name].time_total(case.calls))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        **figures,
        "microseconds": medians,
        "ratio": medians[WITH] / medians[WITHOUT],
        "ratio to jax.jit": {name: medians[name] / medians[JIT] for name in (WITHOUT, WITH)},
    }


def main(argv: Sequence[str]) -> None:
    """Measures the cases, and prints the decision."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not _DRY_RUN.value and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    found: dict[str, dict[str, Any]] = {}
    for case in make_cases(is_dry=_DRY_RUN.value):
        if case.name in _CASES.value:
            found[case.name] = measure_case(case)
            print(case.name, json.dumps(found[case.name]), flush=True)
    is_set, reason = decide(found)
    print(f"{OPTION[0]}: {'set it' if is_set else 'leave it'}, {reason}")
    record = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(sys.argv),
        "device": jax.devices()[0].device_kind,
        "driver": read_driver(),
        "jax": read_version("jax"),
        "is_set": is_set,
        "reason": reason,
        "cases": found,
    }
    if not _DRY_RUN.value:
        path = pathlib.Path(_OUTPUT.value) / "copy_analysis.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
