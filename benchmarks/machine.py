"""The machine that a benchmark runs on."""

from __future__ import annotations

import pathlib
import platform


def read_processor() -> str:
    """Returns the name of the processor, as the system gives it."""
    path = pathlib.Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    lines = [line for line in path.read_text().splitlines() if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.machine()
