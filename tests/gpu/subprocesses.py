"""Programs in a process of their own, beside one that already holds the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.paths import ROOT

# By default JAX takes three quarters of the GPU, which the process of the tests already has.
MODEST = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}


def run_python(
    arguments: Sequence[str],
    *,
    before: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    timeout_seconds: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Runs Python in the checkout and returns its exit status and its two texts.

    Args:
        arguments: of the interpreter, as ``["-c", program]``.
        before: a command that runs the interpreter, as a checking tool does.
        variables: of the environment, beside those that leave room on the GPU.
        timeout_seconds: after which it is ended and the test fails.
    """
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, **MODEST, "PYTHONPATH": path, **(variables or {})}
    return subprocess.run(
        [*before, sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
