"""Command line: ``python -m tests.conformance [--group G] [--sample N] [--json FILE]``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import jax
from absl import app, flags, logging

from tests.conformance import harnesses, report, runner
from tests.conformance.results import Result

_GROUP = flags.DEFINE_list("group", [], "run only these groups, separated by commas")
_SAMPLE = flags.DEFINE_integer("sample", 0, "run so many cases, all groups present; 0: all", 0)
_SEED = flags.DEFINE_integer("seed", 0, "seed of the sample")
_FAIL_FAST = flags.DEFINE_bool("fail-fast", False, "stop at the first case that differs")
_JSON = flags.DEFINE_string("json", None, "write the figures to this file as the run goes on")
_SUBJECT = flags.DEFINE_enum(
    "subject", "capture", ["capture", "jit"], "what is held against jax.jit; jit tests the runner"
)
PROGRESS_CASES = 100


def main(argv: Sequence[str]) -> None:
    """Runs the chosen cases, prints the table, and exits with 1 when one differs."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    cases = _choose_cases()
    results = _run_with_progress(cases)
    print(report.format_report(results))
    if _JSON.value:
        report.write_json(_JSON.value, results)
    if not report.is_acceptable(results):
        sys.exit(1)


def _choose_cases() -> tuple[harnesses.Case, ...]:
    cases = harnesses.load_cases(jax.devices()[0].platform)
    if _GROUP.value:
        unknown = set(_GROUP.value) - {case.group for case in cases}
        if unknown:
            raise app.UsageError(f"no such group: {', '.join(sorted(unknown))}")
        cases = tuple(case for case in cases if case.group in _GROUP.value)
    if _SAMPLE.value:
        cases = harnesses.sample_cases(cases, _SAMPLE.value, _SEED.value)
    return cases


def _run_with_progress(cases: Sequence[harnesses.Case]) -> list[Result]:
    results: list[Result] = []
    start = time.monotonic()
    make_callable = runner.capture_unverified if _SUBJECT.value == "capture" else runner.jit_again
    for result in runner.run_cases(cases, make_callable):
        results.append(result)
        if len(results) % PROGRESS_CASES == 0:
            seconds = time.monotonic() - start
            print(f"{len(results)} of {len(cases)} cases, {seconds:.0f} s", file=sys.stderr)
            if _JSON.value:
                report.write_json(_JSON.value, results)
        if _FAIL_FAST.value and not report.is_acceptable([result]):
            break
    return results


if __name__ == "__main__":
    app.run(main)
