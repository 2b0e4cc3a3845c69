"""Harnesses on a GPU: ``python -m tests.gpu --sample 650 --output FILE``."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

import jax
from absl import app, flags, logging

from tests.conformance import report
from tests.conformance.results import Result
from tests.gpu import harness_report, harness_runner, harness_workers

_SAMPLE = flags.DEFINE_integer("sample", 650, "run so many cases, all groups present", 1)
_SEED = flags.DEFINE_integer("seed", 0, "seed of the sample")
_WORKERS = flags.DEFINE_integer("workers", 8, "how many processes share the GPU", 1)
_OUTPUT = flags.DEFINE_string("output", None, "write the Markdown table to this file")
_ONLY = flags.DEFINE_string("only", None, "run the cases of this JSON list in this process")
PROGRESS_CASES = 50


def main(argv: Sequence[str]) -> None:
    """Runs the sample, prints the table, and exits with 1 when a case differs or fails."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    if _ONLY.value:
        work(json.loads(pathlib.Path(_ONLY.value).read_text()))
        return
    results = run_sample()
    text = harness_report.format_markdown(results, _describe_command(), _find_device_name())
    print(text)
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text(text)
    if not report.is_acceptable(results):
        sys.exit(1)


def run_sample() -> list[Result]:
    """Runs the sample in worker processes; returns the results in order of the cases."""
    cases = harness_runner.choose_cases(_SAMPLE.value, _SEED.value)
    # Read when a process starts, so it must be set before the first worker starts.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    found: dict[str, Result] = {}
    start = time.monotonic()

    def keep(result: Result) -> None:
        found[result.name] = result
        if len(found) % PROGRESS_CASES == 0:
            seconds = time.monotonic() - start
            print(f"{len(found)} of {len(cases)} cases, {seconds:.0f} s", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        harness_workers.run_workers(
            [case.name for case in cases],
            lambda names: _make_command(names, pathlib.Path(folder)),
            _WORKERS.value,
            keep,
        )
    return [found[case.name] for case in cases]


def work(names: Sequence[str]) -> None:
    """Runs the named cases in order and writes what becomes of each; ends after an error."""
    cases = {case.name: case for case in harness_runner.choose_cases(_SAMPLE.value, _SEED.value)}
    for name in names:
        harness_workers.write_begun(name, sys.stdout)
        result = harness_runner.run_case(cases[name])
        harness_workers.write_done(result, sys.stdout)
        if harness_workers.is_last(result):
            return


def _make_command(names: Sequence[str], folder: pathlib.Path) -> list[str]:
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump(list(names), file)
    options = [f"--sample={_SAMPLE.value}", f"--seed={_SEED.value}", f"--only={file.name}"]
    return [sys.executable, "-m", "tests.gpu", *options]


def _describe_command() -> str:
    return f"python -m tests.gpu --sample {_SAMPLE.value} --seed {_SEED.value}"


def _find_device_name() -> str:
    # Asked only now: until then this process takes no memory of the GPU from its workers.
    return jax.devices()[0].device_kind


if __name__ == "__main__":
    app.run(main)
