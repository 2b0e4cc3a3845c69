"""The corpus in several processes at once, for devices on which compiling takes long."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Sequence

from tests.ecosystem.runner import Outcome

Found = dict[str, tuple[Outcome, ...]]
Run = Callable[[Sequence[object]], subprocess.CompletedProcess[str]]
# What becomes of a program whose process wrote no report.
DIED = "died"


def run_in_processes(names: Sequence[str], count: int, run: Run) -> Found:
    """Returns what becomes of each program, run as ``python -m tests.ecosystem`` runs it.

    Args:
        names: of the programs.
        count: how many processes at once; each gets programs of every file.
        run: runs Python with these arguments and waits for its end.
    """
    shares = [names[first::count] for first in range(count) if names[first::count]]
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        parts = threads.map(functools.partial(_run_share, run), shares)
        return {name: outcomes for part in parts for name, outcomes in part.items()}


def _run_share(run: Run, names: Sequence[str]) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        done = run(["-m", "tests.ecosystem", *names, "--json", report])
        if not report.exists():
            reason = f"its process ended with status {done.returncode}: {done.stderr[-500:]}"
            return {name: (Outcome(DIED, reason),) for name in names}
        programs = json.loads(report.read_text())["programs"]
    missing = (Outcome(DIED, "its process did not run it"),)
    return {
        name: tuple(Outcome(**each) for each in programs[name]) if name in programs else missing
        for name in names
    }
