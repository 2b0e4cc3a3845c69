"""NVIDIA's checking tool over the small cases: ``python -m tests.gpu.checking_tool FOLDER``.

The tool has to be alone on the GPU, and takes as long as the workers of a run take to import all
tests. So a run of the whole folder starts it before them.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import MutableMapping

from tests.gpu.sharing import hold_gpu, wait_for_file
from tests.gpu.subprocesses import MODEST
from tests.processes import start_python

FOUND_FAULTS = 86
LIMIT_S, KILLED_AFTER_S = 150, 5
# What `timeout` ends with, by itself and where it has to kill.
NOT_ENDED = (124, 137)
# Of each tool; racecheck takes ten times as long.
CASES = {"memcheck": None, "racecheck": ("softmax", "state", "streams")}
# One allocation of the driver per array: then an access behind an array's end shows.
ALLOCATE_APART = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
# Where the reports of tools that were started before the tests are.
REPORTS = "TRACEGRAPH_TOOL_REPORTS"


def find_tool() -> str | None:
    """Returns the path of ``compute-sanitizer``, or None."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    places = [pathlib.Path("/usr/local"), *map(pathlib.Path, site.getsitepackages())]
    patterns = ("cuda*/bin/compute-sanitizer", "nvidia/*/bin/compute-sanitizer")
    hits = [hit for place in places for pattern in patterns for hit in place.glob(pattern)]
    return str(sorted(hits)[-1]) if hits else None


def run_tool(path: str, tool: str) -> dict[str, object]:
    """Returns the exit status and the text of small cases under a tool.

    Args:
        path: of ``compute-sanitizer``.
        tool: a name of `CASES`.
    """
    # Trying out kernels takes most of the time under the tool and is not ours.
    variables = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    options = ["--tool", tool, "--error-exitcode", str(FOUND_FAULTS)]
    if tool == "memcheck":
        variables |= ALLOCATE_APART
        # A look for a function that an older driver does not have is no fault.
        options += ["--report-api-errors", "no"]
    limit = ["timeout", f"--kill-after={KILLED_AFTER_S}", f"{LIMIT_S}"]
    # A file, for a pipe is open as long as one of the tool's children has it.
    with tempfile.TemporaryFile("w+") as output:
        process = start_python(
            ["-m", "tests.gpu.small_cases", *(CASES[tool] or ())],
            before=[*limit, path, *options],
            variables={**MODEST, **variables},
            output=output,
        )
        try:
            status = process.wait(LIMIT_S + 3 * KILLED_AFTER_S)
        except subprocess.TimeoutExpired:
            # What hangs in the driver cannot be killed, and is left.
            status = NOT_ENDED[-1]
        output.seek(0)
        return {"status": status, "text": output.read()}


def start_early(
    environment: MutableMapping[str, str], folder: pathlib.Path
) -> subprocess.Popen[bytes] | None:
    """Starts the tools where there are any; they hold the GPU until they have ended.

    Args:
        environment: of this process and its workers, which says that reports are coming.
        folder: that all of them share.
    """
    if find_tool() is None:
        return None
    environment[REPORTS] = str(folder)
    return start_python(["-m", "tests.gpu.checking_tool", folder])


def read_report(tool: str) -> dict[str, object] | None:
    """Returns what an early run of a tool has found, or None where there was none."""
    if REPORTS not in os.environ:
        return None
    path = pathlib.Path(os.environ[REPORTS], f"{tool}.json")
    wait_for_file(path, limit_s=2 * LIMIT_S)
    return json.loads(path.read_text())


def main(folder: str) -> None:
    """Runs all tools alone on the GPU, and leaves a report of each.

    After one that does not end the next is not tried, and has the same report.
    """
    path = find_tool()
    assert path is not None
    found: dict[str, object] | None = None
    with hold_gpu(pathlib.Path(folder), alone=True):
        for tool in CASES:
            if found is None or found["status"] not in NOT_ENDED:
                found = run_tool(path, tool)
            report = pathlib.Path(folder, f"{tool}.part")
            report.write_text(json.dumps(found))
            report.rename(report.with_suffix(".json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
