"""Two checkouts compared on one GPU: `gpu_replay.py` of each, in turns and in fresh processes.

    python benchmarks/two_trees.py --before ../tracegraph-before --output benchmarks/results/x.json

The sides of one process cannot be two versions of one package. Processes differ from one another,
so that the sides take turns and the figure is the ratio of the two medians. What takes microseconds
differs by a half where some processors are slow: those are left out, and the least is shown, too.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags
from machine import keep_to_fast_processors

_BEFORE = flags.DEFINE_string("before", None, "the other checkout", required=True)
_CASES = flags.DEFINE_multi_string(
    "case", ["tiny", "one_in_one_out", "gpt_2x128", "gpt_12x128"], "these cases"
)
_PAIRS = flags.DEFINE_integer("pairs", 3, "runs of each side", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "rounds of a run", 1)
_OUTPUT = flags.DEFINE_string("output", None, "write all figures to this JSON file")
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on the CPU")

HERE = pathlib.Path(__file__).resolve().parents[1]
FIGURES = ("total_us", "host_us", "launch_us", "jit_total_us", "pool_bytes", "capture_seconds")
SUMMARIES: tuple[Callable[[list[float]], float], ...] = statistics.median, min


def main(argv: Sequence[str]) -> None:
    """Runs both checkouts in turns and prints the medians with their ratio."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    processors = keep_to_fast_processors()
    print(f"on {len(processors)} of {os.cpu_count()} processors", file=sys.stderr)
    trees = {"before": pathlib.Path(_BEFORE.value).resolve(), "after": HERE}
    runs: list[dict[str, Any]] = []
    for number in range(_PAIRS.value):
        # What runs first alternates, too.
        for side in sorted(trees, reverse=number % 2 == 0):
            found = run_tree(trees[side], _CASES.value)
            runs.append({"side": side, **found})
            print(f"run {number + 1} of {_PAIRS.value}, {side}: done", file=sys.stderr)
            # After each run, so that a benchmark that is cut short leaves what it has.
            write_runs(runs, processors)
    print(format_table(runs))


def run_tree(tree: pathlib.Path, cases: Sequence[str]) -> dict[str, Any]:
    """Returns what one run of a checkout measured: versions, and the figures of each case."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "benchmarks/gpu_replay.py", "--notorch", f"--output={folder}"]
        command += [f"--rounds={_ROUNDS.value}", *(f"--case={case}" for case in cases)]
        command += ["--dry-run"] if _DRY_RUN.value else []
        paths = filter(None, [str(tree), os.environ.get("PYTHONPATH")])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        (file,) = pathlib.Path(folder).glob("*.json")
        found = json.loads(file.read_text())
    figures = {case["name"]: read_figures(case) for case in found["cases"]}
    return {"run": found["run"], "figures": figures}


def write_runs(runs: Sequence[dict[str, Any]], processors: Sequence[int]) -> None:
    """Writes the figures of all runs so far to the output file, if there is one."""
    if _OUTPUT.value:
        command = " ".join(["python benchmarks/two_trees.py", *sys.argv[1:]])
        found = {"command": command, "processors": [*processors], "runs": runs}
        text = json.dumps(found, indent=1)
        pathlib.Path(_OUTPUT.value).write_text(text + "\n")


def read_figures(case: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of one case; a refused one has none."""
    if case["refusal"]:
        raise RuntimeError(f"{case['name']} was refused: {case['refusal']}")
    mine, seconds = case["sides"]["tg.capture"], case["capture"]["seconds"]
    beyond = sum(seconds.get(s, 0.0) for s in ("check", "lower", "instantiate", "verify"))
    return {
        "total_us": mine["total_us"],
        "host_us": mine["host_us"],
        "launch_us": mine["launch_us"],
        "jit_total_us": case["sides"]["jax.jit"]["total_us"],
        "pool_bytes": case["capture"]["pool_bytes"],
        "capture_seconds": beyond,
    }


def format_table(runs: Sequence[dict[str, Any]]) -> str:
    """Returns one line per case and figure: medians, the least, and their ratios."""
    lines = [
        "| case | figure | before | after | ratio | least before | after | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in runs[0]["figures"]:
        for figure in FIGURES:
            values = {
                side: [run["figures"][case][figure] for run in runs if run["side"] == side]
                for side in ("before", "after")
            }
            if any(value is None for each in values.values() for value in each):
                continue
            cells = [
                _format_pair(summarize(values["before"]), summarize(values["after"]))
                for summarize in SUMMARIES
            ]
            lines.append(f"| {case} | {figure} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_pair(before: float, after: float) -> str:
    return f"{before:,.2f} | {after:,.2f} | {after / before:.3f}"


if __name__ == "__main__":
    app.run(main)
