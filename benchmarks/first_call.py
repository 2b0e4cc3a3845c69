"""What the first call of a captured function takes beyond that of `jax.jit`.

    PYTHONPATH=. python benchmarks/first_call.py [--output DIR] [--case NAME] [--repeats N]
    PYTHONPATH=. python benchmarks/first_call.py --host

Every first call is made in a process of its own, for what XLA, CUDA and tracegraph remember of one
makes the next one faster. The sides take turns; the figures are medians over the repeats.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import app, flags
from gpu_models import Case, GptShape, make_cases, make_gpt_step
from gpu_report import JIT, MODELS, TRACEGRAPH, format_table
from gpu_sides import JaxSide, read_capture_seconds
from machine import read_processor

import tracegraph as tg

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result files")
_CASES = flags.DEFINE_multi_string("case", list(MODELS), "these cases")
_REPEATS = flags.DEFINE_integer("repeats", 3, "processes of each side", 1)
_HOST = flags.DEFINE_bool("host", False, "on the CPU: a GPT of four layers")
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on the CPU")
_WORKER = flags.DEFINE_enum("worker", None, [JIT, TRACEGRAPH], "make one first call, print JSON")

# What `jax.jit` does as well.
SHARED_PHASES = ("trace", "compile")
LIMIT = 0.10
# On the host device: of the whole first call, relative to that of `jax.jit`.
HOST_LIMIT = 1.3


def main(argv: Sequence[str]) -> None:
    """Runs the cases; ends with 1 when a limit is missed."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if _DRY_RUN.value or _HOST.value:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    cases = {case.name: case for case in list_cases()}
    names = list(cases) if _HOST.value else _CASES.value
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise app.UsageError(f"no case {', '.join(unknown)}; there are {', '.join(cases)}")
    if _WORKER.value:
        (name,) = names
        print(json.dumps(measure_first_call(cases[name], _WORKER.value)))
        return
    figures = {name: measure_case(name) for name in names}
    document = {"run": describe_run(), "cases": figures}
    page = format_page(document)
    suffix = "_dry_run" if _DRY_RUN.value else "_host" if _HOST.value else ""
    folder = pathlib.Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"first_call{suffix}.json").write_text(json.dumps(document, indent=2) + "\n")
    (folder / f"first_call{suffix}.md").write_text(page)
    print(page)
    # Tiny sizes on a CPU have no limit.
    key, limit = (
        ("first call / jax.jit", HOST_LIMIT) if _HOST.value else ("beyond / compile", LIMIT)
    )
    if not _DRY_RUN.value and any(each[key] > limit for each in figures.values()):
        sys.exit(1)


def list_cases() -> list[Case]:
    """Returns the cases of this run."""
    if _HOST.value:
        shape = GptShape(4, 128, 4, 256, 64, (4, 64))
        return [Case("gpt_4x128", shape, make_gpt_step(shape.heads), True, 1, 5e-3)]
    return make_cases(is_dry=_DRY_RUN.value)


def measure_first_call(case: Case, name: str) -> dict[str, float]:
    """Returns the seconds of one first call, and of each phase, where the side has them."""
    donated = (0,) if case.has_state else ()
    wrap = jax.jit if name == JIT else tg.capture
    side = JaxSide(case, wrap(case.function, donate_argnums=donated))
    # Arguments that are still on their way would be waited for in the call.
    jax.block_until_ready(jax.live_arrays())
    start = time.perf_counter()
    side.read_results(1)
    seconds = {"first call": time.perf_counter() - start}
    return seconds if name == JIT else {**seconds, **read_capture_seconds(side.call)}


def measure_case(name: str) -> dict[str, Any]:
    """Returns the medians of both sides of a case, and what follows from them."""
    samples: dict[str, list[dict[str, float]]] = {JIT: [], TRACEGRAPH: []}
    for index in range(_REPEATS.value):
        for side in sorted(samples, reverse=bool(index % 2)):
            samples[side].append(run_worker(name, side))
            print(f"[{name}, {side}: {samples[side][-1]['first call']:.2f} s]", file=sys.stderr)
    (jit, mine) = (take_medians(samples[side]) for side in (JIT, TRACEGRAPH))
    phases = {phase: value for phase, value in mine.items() if phase != "first call"}
    beyond = sum(value for phase, value in phases.items() if phase not in SHARED_PHASES)
    return {
        "first call": {JIT: jit["first call"], TRACEGRAPH: mine["first call"]},
        "phases": phases,
        "beyond": beyond,
        "beyond / compile": beyond / phases["compile"],
        "first call / jax.jit": mine["first call"] / jit["first call"],
        "samples": samples,
    }


def take_medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each figure."""
    return {name: statistics.median(each[name] for each in samples) for name in samples[0]}


def run_worker(name: str, side: str) -> dict[str, float]:
    """Makes one first call in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; its messages went to the standard error.
    """
    command = [sys.executable, __file__, f"--case={name}", f"--worker={side}"]
    command += ["--dry-run"] if _DRY_RUN.value else []
    command += ["--host"] if _HOST.value else []
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def describe_run() -> dict[str, str]:
    """Returns date, versions and devices, without which a figure means nothing."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/first_call.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "processor": f"{read_processor()}, {os.cpu_count()} cores",
        "repeats": str(_REPEATS.value),
    }


def format_page(document: Mapping[str, Any]) -> str:
    """Returns the document as a Markdown page."""
    cases: Mapping[str, Any] = document["cases"]
    phases = list(dict.fromkeys(phase for each in cases.values() for phase in each["phases"]))
    header = ["case", *(f"{side} s" for side in (JIT, TRACEGRAPH)), *phases]
    header += ["beyond s", "beyond / compile", "first call / jax.jit"]
    rows = []
    for name, each in cases.items():
        seconds = [*each["first call"].values(), *(each["phases"].get(s, 0.0) for s in phases)]
        ratios = (each["beyond / compile"], each["first call / jax.jit"])
        cells = [f"{value:.2f}" for value in (*seconds, each["beyond"])]
        rows.append([name, *cells, *(f"{value:.3f}" for value in ratios)])
    return (
        "\n\n".join(
            [
                "# The first call",
                "\n".join(f"* {key}: {value}" for key, value in document["run"].items()),
                format_table(header, rows),
                "*Beyond* is every phase but `trace` and `compile`, which `jax.jit` has as well. "
                f"At most {LIMIT:.2f} of `compile` is wanted on a GPU, and a first call of at most "
                f"{HOST_LIMIT:.2f} of that of `jax.jit` on the host device.",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    app.run(main)
