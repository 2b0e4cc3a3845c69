"""How soon a fresh process replays: with and without what other processes have compiled.

    PYTHONPATH=. python benchmarks/cold_start.py [--output DIR] [--case NAME] [--side NAME]
        [--repeats N] [--numerics equivalent]
    PYTHONPATH=. python benchmarks/cold_start.py --host

Every start is made in a process of its own (`cold_start_process.py`); the sides take turns, and the
figures are medians over the repeats. This process leaves the device alone.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags
from cold_start_process import CASES, DECODE, FIRST, GPT, HIT, LOAD, SIDES, STARTS, WARM_JIT
from gpu_report import format_table
from machine import describe_start, read_driver, read_processor, write_files
from peer_process import run_script

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result files")
_CASES = flags.DEFINE_multi_enum("case", list(STARTS), list(CASES), "these cases")
_SIDES = flags.DEFINE_multi_enum("side", list(SIDES), list(SIDES), "these ways to start")
_NUMERICS = flags.DEFINE_enum("numerics", "xla", ["xla", "equivalent"], "of what is captured")
_REPEATS = flags.DEFINE_integer("repeats", 5, "processes of each side", 1)
_HOST = flags.DEFINE_bool("host", False, "on the CPU: a GPT of four layers, eight decode shapes")
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on the CPU")

# The settings with which JAX keeps every program.
JAX_CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


@dataclasses.dataclass(frozen=True)
class Limit:
    """The highest value allowed of one figure of one case."""

    case: str
    figure: str
    highest: float


HIT_RATIO, BEYOND, REPLAY_RATIO = "hit / first", "hit beyond traces s", "replay loaded / first"
LOAD_RATIO, LOAD_SECONDS, LOAD_JIT = "load / first", "load s", "load / jax.jit warm"
FILE_RATIO = "file / kernels"
GPU_LIMITS = (
    Limit(GPT, LOAD_SECONDS, 0.5),
    Limit(GPT, LOAD_JIT, 0.3),
    Limit(GPT, HIT_RATIO, 0.35),
    Limit(GPT, BEYOND, 0.7),
    Limit(GPT, REPLAY_RATIO, 1.02),
    Limit(GPT, FILE_RATIO, 1.5),
    Limit(DECODE, LOAD_SECONDS, 1.5),
)
HOST_LIMITS = tuple(Limit(case, name, 0.5) for case in STARTS for name in (HIT_RATIO, LOAD_RATIO))


class StartError(Exception):
    """A start that was not what it should be: nothing is reported for it."""


def main(argv: Sequence[str]) -> None:
    """Runs the cases; ends with 1 when a limit is missed."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    cases = {name: measure_case(name) for name in _CASES.value}
    limits = () if _DRY_RUN.value else HOST_LIMITS if _HOST.value else GPU_LIMITS
    checks = check_limits(cases, limits)
    document = {"run": describe_run(cases), "cases": cases, "checks": checks}
    page = format_page(document)
    suffix = "_dry_run" if _DRY_RUN.value else "_host" if _HOST.value else ""
    suffix += "" if _NUMERICS.value == "xla" else f"_{_NUMERICS.value}"
    write_files(_OUTPUT.value, f"cold_start{suffix}", document, page)
    print(page)
    if not all(check["met"] for check in checks):
        sys.exit(1)


def measure_case(case: str) -> dict[str, Any]:
    """Returns the medians of all sides of a case, and what follows from them.

    Raises:
        StartError: a hit called XLA, or the results of two sides of ours differ.
    """
    sides: list[str] = _SIDES.value
    samples: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="cold_start_") as folder:
        shared = pathlib.Path(folder)
        # What the later ones find. They are no samples: each is the first process of its kind.
        code = shared / "code"
        filled = run_start(case, FIRST, shared, code, has_file=True)
        if WARM_JIT in sides:
            run_start(case, WARM_JIT, shared, code)
        for index in range(_REPEATS.value):
            for side in sides[:: -1 if index % 2 else 1]:
                with tempfile.TemporaryDirectory(prefix="cold_start_") as own:
                    place = pathlib.Path(own) if side == FIRST else shared
                    samples[side].append(run_start(case, side, place, code))
                print(f"[{case}, {side}: {samples[side][-1]['seconds']:.2f} s]", file=sys.stderr)
    samples.setdefault(FIRST, [filled])
    check_samples(filled, samples)
    return {"figures": compute_figures(filled, samples), "samples": samples}


def run_start(
    case: str, side: str, folder: pathlib.Path, code: pathlib.Path, *, has_file: bool = False
) -> dict[str, Any]:
    """Makes one start in a process of its own.

    Args:
        case: what is started.
        side: how.
        folder: of both caches, and of the saved file.
        code: folder of what Python compiles, for all starts.
        has_file: True to save what was captured.

    Raises:
        subprocess.CalledProcessError: it failed; its messages went to the standard error.
    """
    script = pathlib.Path(__file__).with_name("cold_start_process.py")
    command = [str(script), side, case, f"--numerics={_NUMERICS.value}"]
    command += [f"--file={folder / 'step.tg'}"] if has_file or side == LOAD else []
    command += ["--host"] if _HOST.value else []
    command += ["--dry-run"] if _DRY_RUN.value else []
    return run_script(command, make_environment(side, folder, code))


def make_environment(side: str, folder: pathlib.Path, code: pathlib.Path) -> dict[str, str]:
    """Returns the environment of a start: its own cache, if it is to have one, and no other."""
    kept = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    # As an installed package, ours is compiled once.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    # A dry run has no figures that depend on it, and compiling all of JAX takes seconds.
    variables = kept if _DRY_RUN.value else {**kept, "PYTHONPYCACHEPREFIX": str(code)}
    variables |= {"JAX_PLATFORMS": "cpu"} if _HOST.value or _DRY_RUN.value else {}
    if side == WARM_JIT:
        return {**variables, **JAX_CACHE, "JAX_COMPILATION_CACHE_DIR": str(folder / "jax")}
    if side not in (FIRST, HIT):
        return variables | {"TRACEGRAPH_KERNEL_CACHE": "0"}
    kernels = {"TRACEGRAPH_KERNEL_CACHE_PATH": str(folder / "kernels")}
    return {**variables, "TRACEGRAPH_KERNEL_CACHE": "1", **kernels}


def check_samples(filled: Mapping[str, Any], samples: Mapping[str, Sequence[Any]]) -> None:
    """Raises `StartError` for a side that did not do what its name says."""
    stores = filled["stores"]
    first, hit, loaded = (samples.get(side, []) for side in (FIRST, HIT, LOAD))
    if any((each["hits"], each["stores"]) != (0, stores) for each in first):
        raise StartError("a first capture found its program, or did not store it")
    if any((each["hits"], each["stores"]) != (stores, 0) for each in hit):
        raise StartError("a start with a filled cache did not find all of its programs there")
    if any("compile" in each["phases"] for each in hit):
        raise StartError("a start with a filled cache called XLA")
    # Each first capture on a GPU may choose other kernels of a library.
    if len({each["digest"] for each in (filled, *hit, *loaded)}) > 1:
        raise StartError("a cached or loaded program has other results than a first capture")


def compute_figures(
    filled: Mapping[str, Any], samples: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Returns medians and ratios."""
    seconds = {side: _take_median(samples[side], "seconds") for side in samples}
    replays = {side: _take_median(samples[side], "replay us") for side in samples}
    # The phases are those of the last signature.
    hits = samples.get(HIT, [])
    names = list(dict.fromkeys(name for each in hits for name in each["phases"]))
    phases = {
        name: statistics.median(each["phases"].get(name, 0.0) for each in hits) for name in names
    }
    figures = {
        "seconds": seconds,
        "replay us": replays,
        "hit phases": phases,
        "file bytes": filled["file bytes"],
    }
    if HIT in seconds:
        figures[HIT_RATIO] = seconds[HIT] / seconds[FIRST]
        # JAX traces as for a first capture: once, and again to check.
        figures[BEYOND] = seconds[HIT] - _take_median(hits, "trace seconds")
    if LOAD in seconds:
        figures[LOAD_SECONDS] = seconds[LOAD]
        figures[LOAD_RATIO] = seconds[LOAD] / seconds[FIRST]
        figures[REPLAY_RATIO] = replays[LOAD] / replays[FIRST]
    if LOAD in seconds and WARM_JIT in seconds:
        figures[LOAD_JIT] = seconds[LOAD] / seconds[WARM_JIT]
    # On the host device kernels are a part of XLA's executable.
    if filled["stores"] == 1 and filled["kernel bytes"]:
        figures[FILE_RATIO] = filled["file bytes"] / filled["kernel bytes"]
    return figures


def _take_median(samples: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(each[name] for each in samples)


def check_limits(
    cases: Mapping[str, Mapping[str, Any]], limits: Sequence[Limit]
) -> list[dict[str, Any]]:
    """Returns one row per limit of a case that was measured."""
    rows = []
    for limit in limits:
        figures = cases[limit.case]["figures"] if limit.case in cases else {}
        if limit.figure in figures:
            value = figures[limit.figure]
            row = dataclasses.asdict(limit)
            rows.append({**row, "measured": value, "met": value <= limit.highest})
    return rows


def describe_run(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns date, versions and devices, without which a figure means nothing."""
    found = next(iter(cases.values()))["samples"][FIRST][0]
    return {
        **describe_start(__file__, ["jax"]),
        "device": found["device"],
        "driver": read_driver(),
        "processor": f"{read_processor()}, {os.cpu_count()} cores",
        "repeats": str(_REPEATS.value),
        "numerics": _NUMERICS.value,
    }


def format_page(document: Mapping[str, Any]) -> str:
    """Returns the document as a Markdown page."""
    cases: Mapping[str, Any] = document["cases"]
    rows, phases = [], []
    for name, case in cases.items():
        figures = case["figures"]
        for side, seconds in figures["seconds"].items():
            ratio = seconds / figures["seconds"][FIRST]
            replay = figures["replay us"][side]
            rows.append([name, side, f"{seconds:.3f}", f"{ratio:.3f}", f"{replay:.1f}"])
        text = ", ".join(f"{phase} {value:.3f}" for phase, value in figures["hit phases"].items())
        phases.append(f"* {name}: {text}; file {figures['file bytes']:,} bytes")
    checks = [
        [each["case"], each["figure"], f"{each['highest']:.2f}", f"{each['measured']:.3f}"]
        + ["met" if each["met"] else "missed"]
        for each in document["checks"]
    ]
    parts = [
        "# Cold starts",
        "\n".join(f"* {key}: {value}" for key, value in document["run"].items()),
        format_table(["case", "side", "first call s", "/ first capture", "replay us"], rows),
        "Seconds of the phases of a cache hit, of its last signature, and bytes of the saved file:",
        "\n".join(phases),
    ]
    if checks:
        parts.append(format_table(["case", "figure", "limit", "measured", ""], checks))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    app.run(main)
