"""Programs in a process of their own: settings that are read once, and interpreter exit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from tests.paths import ROOT

TIMEOUT_S = 240


def run_program(program: str, *arguments: object, **variables: str) -> str:
    """Runs a program in the checkout, warnings as errors, and returns what it printed.

    It must end with exit status 0 and an empty standard error.

    Args:
        program: of Python; it is dedented.
        arguments: in ``sys.argv`` from 1 on.
        variables: of the environment, beside those of this process.
    """
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    options = ["-X", "faulthandler", "-W", "error", "-c", textwrap.dedent(program)]
    done = subprocess.run(
        [sys.executable, *options, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout
