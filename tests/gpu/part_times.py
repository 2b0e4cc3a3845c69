"""How long each module of the GPU tests took, at the end of a run, also with several workers."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

FOLDER = "tests/gpu/"
PHASES = ("setup", "call", "teardown")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints a line per module; nothing where all tests were skipped."""
    reports = [each for reports in terminalreporter.stats.values() for each in reports]
    lines = list(format_times(reports))
    if lines:
        terminalreporter.section("seconds of the GPU tests")
        for line in lines:
            terminalreporter.write_line(line)


def format_times(reports: Iterable[Any]) -> Iterator[str]:
    """Yields the seconds, the number of tests and the slowest test of each module, slowest first.

    Args:
        reports: of pytest, for setup, call and teardown of each test, and others, which do not
            count. Time that a test waits for its turn on the GPU is part of it.
    """
    seconds: dict[str, collections.Counter[str]] = {}
    ran = set()
    for report in reports:
        module, _, test = getattr(report, "nodeid", "").partition("::")
        is_of_a_test = getattr(report, "when", "") in PHASES
        if not module.startswith(FOLDER) or not is_of_a_test:
            continue
        seconds.setdefault(module, collections.Counter())[test] += report.duration
        if report.when == "call" or report.failed:
            ran.add(module)
    modules = sorted(ran, key=lambda module: -seconds[module].total())
    for module in modules:
        ((slowest, most),) = seconds[module].most_common(1)
        yield (
            f"{seconds[module].total():7.1f}  {pathlib.PurePath(module).stem}, "
            f"{len(seconds[module])} tests, most {most:.1f} in {slowest}"
        )
    if modules:
        total = sum(seconds[module].total() for module in modules)
        yield f"{total:7.1f}  all, added up over the workers"
