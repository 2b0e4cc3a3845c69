"""Programs in a process of their own, beside one that already holds the GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from tests import processes

# By default JAX takes three quarters of the GPU, which the process of the tests already has.
MODEST = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}


def run_python(
    arguments: Sequence[object],
    *,
    before: Sequence[str] = (),
    timeout_s: float = processes.TIMEOUT_S,
    variables: Mapping[str, str] = processes.NONE,
) -> subprocess.CompletedProcess[str]:
    """As `tests.processes.run_python`, with room left on the GPU."""
    return processes.run_python(
        arguments, before=before, timeout_s=timeout_s, variables={**MODEST, **variables}
    )
