"""The machine and the packages that a benchmark runs on."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess

# Times of captures are those of first ones, unless a benchmark is of the cache itself.
os.environ.setdefault("TRACEGRAPH_KERNEL_CACHE", "0")


def read_processor() -> str:
    """Returns the name of the processor, as the system gives it."""
    path = pathlib.Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    lines = [line for line in path.read_text().splitlines() if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.machine()


def read_version(package: str) -> str:
    """Returns the version of a package, or that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def read_driver() -> str:
    """Returns the GPU and its driver as `nvidia-smi` names them."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "no nvidia-smi"
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    ran = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    lines = ran.stdout.splitlines()
    return lines[0].strip() if lines else "nvidia-smi finds no GPU"
