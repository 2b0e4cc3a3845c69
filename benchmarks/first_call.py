"""What the first call of a captured function takes beyond that of `jax.jit`.

    PYTHONPATH=. python benchmarks/first_call.py [--output DIR] [--case NAME] [--side NAME]
        [--repeats N] [--profile DIR]
    PYTHONPATH=. python benchmarks/first_call.py --host

Every first call is made in a process of its own, for what XLA, CUDA and tracegraph remember of one
makes the next one faster. The kernel cache is on, as it is for users, in a new folder for each
process: each looks for its program, does not find it, and stores it. The sides take turns; the
figures are medians over the repeats. One more process goes ahead and is no sample: it reads the
files and writes the bytecode that all others use.
Cases are also the programs of `whole_programs.py`, by their names.
"""

from __future__ import annotations

import cProfile
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import app, flags
from gpu_models import Case, GptShape, make_cases, make_gpt_step
from gpu_report import JIT, MODELS, TRACEGRAPH, format_table
from gpu_sides import JaxSide, read_capture_seconds
from machine import describe_start, read_driver, read_processor, write_files
from peer_process import run_script
from whole_models import PROGRAMS, WholeProgram

import tracegraph as tg

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result files")
_CASES = flags.DEFINE_multi_string("case", list(MODELS), "these cases")
_SIDES = flags.DEFINE_multi_enum("side", [JIT, TRACEGRAPH], [JIT, TRACEGRAPH], "these sides")
_REPEATS = flags.DEFINE_integer("repeats", 3, "processes of each side", 1)
_HOST = flags.DEFINE_bool("host", False, "on the CPU: a GPT of four layers")
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on the CPU")
_PROFILE = flags.DEFINE_string(
    "profile", None, "write what cProfile says of each side's last call, which it slows, to here"
)
_WORKER = flags.DEFINE_enum("worker", None, [JIT, TRACEGRAPH], "make one first call, print JSON")

# What `jax.jit` does as well.
SHARED_PHASES = ("trace", "compile")
LIMIT = 0.10
# On the host device: of the whole first call, relative to that of `jax.jit`.
HOST_LIMIT = 1.3
# Of the processes that are measured.
_ENVIRONMENT = dict(os.environ)


def main(argv: Sequence[str]) -> None:
    """Runs the cases; ends with 1 when a limit is missed."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not _WORKER.value:
        # This process leaves the memory to the others.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
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
    run_worker(names[0], TRACEGRAPH)
    figures: dict[str, Any] = {}
    page = ""
    for name in names:
        figures[name] = measure_case(name)
        # After each case: a run that is cut off keeps what it has measured.
        page = write_results(figures)
    print(page)
    # Tiny sizes on a CPU have no limit.
    key, limit = (
        ("first call / jax.jit", HOST_LIMIT) if _HOST.value else ("beyond / compile", LIMIT)
    )
    measured = [each[key] for each in figures.values() if key in each]
    if not measured:
        print(f"no side of this run has a limit: {key} is not measured", file=sys.stderr)
    if not _DRY_RUN.value and any(value > limit for value in measured):
        sys.exit(1)


def write_results(figures: Mapping[str, Any]) -> str:
    """Writes the figures of the cases so far, and returns them as a page."""
    document = {"run": describe_run(), "cases": figures}
    page = format_page(document)
    suffix = "_dry_run" if _DRY_RUN.value else "_host" if _HOST.value else ""
    write_files(_OUTPUT.value, f"first_call{suffix}", document, page)
    return page


def list_cases() -> list[Case | WholeProgram]:
    """Returns the cases of this run."""
    if _HOST.value:
        shape = GptShape(4, 128, 4, 256, 64, (4, 64))
        return [Case("gpt_4x128", shape, make_gpt_step(shape.heads), True, 1, 5e-3)]
    return [*make_cases(is_dry=_DRY_RUN.value), *PROGRAMS]


def measure_first_call(case: Case | WholeProgram, name: str) -> dict[str, float]:
    """Returns the seconds of one first call, and of each phase, where the side has them."""
    wrap = jax.jit if name == JIT else tg.capture
    captured, call_once = make_call(case, wrap)
    # Arguments that are still on their way would be waited for in the call.
    jax.block_until_ready(jax.live_arrays())
    start = time.perf_counter()
    if _PROFILE.value:
        profile = cProfile.Profile()
        profile.runcall(call_once)
        folder = pathlib.Path(_PROFILE.value)
        folder.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(folder / f"{case.name}_{name}.pstats")
    else:
        call_once()
    seconds = {"first call": time.perf_counter() - start}
    return seconds if name == JIT else {**seconds, **read_capture_seconds(captured)}


def make_call(
    case: Case | WholeProgram, wrap: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[[], object]]:
    """Returns the wrapped function, and what calls it and waits for its results."""
    if isinstance(case, Case):
        donated = (0,) if case.has_state else ()
        side = JaxSide(case, wrap(case.function, donate_argnums=donated))
        return side.call, functools.partial(side.read_results, 1)
    setup = case.make(_DRY_RUN.value)
    arguments = jax.device_put((setup.state, *setup.batch))
    wrapped = wrap(setup.function, donate_argnums=0)
    return wrapped, lambda: jax.block_until_ready(wrapped(*arguments))


def measure_case(name: str) -> dict[str, Any]:
    """Returns the medians of both sides of a case, and what follows from them."""
    samples: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES.value}
    for index in range(_REPEATS.value):
        for side in sorted(samples, reverse=bool(index % 2)):
            samples[side].append(run_worker(name, side))
            print(f"[{name}, {side}: {samples[side][-1]['first call']:.2f} s]", file=sys.stderr)
    medians = {side: take_medians(each) for side, each in samples.items()}
    first_calls = {side: each["first call"] for side, each in medians.items()}
    figures: dict[str, Any] = {"first call": first_calls, "phases": {}, "samples": samples}
    if TRACEGRAPH in samples:
        figures |= compute_beyond(samples[TRACEGRAPH], medians[TRACEGRAPH])
    if len(samples) > 1:
        figures["first call / jax.jit"] = first_calls[TRACEGRAPH] / first_calls[JIT]
    return figures


def compute_beyond(
    samples: Sequence[Mapping[str, float]], median: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the medians of the phases, and of what a capture takes beyond XLA."""
    phases = {phase: value for phase, value in median.items() if phase != "first call"}
    own = [phase for phase in phases if phase not in SHARED_PHASES]
    ratios = [sum(each[phase] for phase in own) / each["compile"] for each in samples]
    return {
        "phases": phases,
        "beyond": statistics.median(sum(each[phase] for phase in own) for each in samples),
        "beyond / compile": statistics.median(ratios),
        "range": (min(ratios), max(ratios)),
    }


def take_medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each figure."""
    return {name: statistics.median(each[name] for each in samples) for name in samples[0]}


def run_worker(name: str, side: str) -> dict[str, float]:
    """Makes one first call in a process of its own, with an empty kernel cache.

    Raises:
        subprocess.CalledProcessError: it failed; its messages went to the standard error.
    """
    command = [__file__, f"--case={name}", f"--worker={side}"]
    command += ["--dry-run"] if _DRY_RUN.value else []
    command += ["--host"] if _HOST.value else []
    command += [f"--profile={_PROFILE.value}"] if _PROFILE.value else []
    with tempfile.TemporaryDirectory() as folder:
        cache = {"TRACEGRAPH_KERNEL_CACHE": "1", "TRACEGRAPH_KERNEL_CACHE_PATH": folder}
        return run_script(command, {**_ENVIRONMENT, **cache})


def describe_run() -> dict[str, str]:
    """Returns date, versions and devices, without which a figure means nothing."""
    return {
        **describe_start(__file__, ["jax"]),
        "device": jax.devices()[0].device_kind,
        "driver": read_driver(),
        "processor": f"{read_processor()}, {os.cpu_count()} cores",
        "repeats": str(_REPEATS.value),
        "kernel cache": "on, without the program",
    }


def format_page(document: Mapping[str, Any]) -> str:
    """Returns the document as a Markdown page."""
    cases: Mapping[str, Any] = document["cases"]
    phases = list(dict.fromkeys(phase for each in cases.values() for phase in each["phases"]))
    header = ["case", *(f"{side} s" for side in _SIDES.value), *phases]
    header += ["beyond s", "beyond / compile", "least, most", "first call / jax.jit"]
    rows = []
    for name, each in cases.items():
        seconds = [*each["first call"].values(), *(each["phases"].get(s, 0.0) for s in phases)]
        cells = [f"{value:.3f}" for value in seconds]
        # A side that was not run leaves its cells empty.
        keys = ("beyond", "beyond / compile", "range", "first call / jax.jit")
        rows.append([name, *cells, *(format_figure(each.get(key, ())) for key in keys)])
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


def format_figure(value: float | Sequence[float]) -> str:
    """Returns a figure, or several, as a cell of the table."""
    values = value if isinstance(value, Sequence) else [value]
    return ", ".join(f"{each:.3f}" for each in values)


if __name__ == "__main__":
    app.run(main)
