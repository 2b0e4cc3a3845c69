"""What a benchmark runs on, and the files that it leaves."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable

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


def describe_start(script: str, packages: Iterable[str]) -> dict[str, str]:
    """Returns date, command and versions, without which a figure means nothing.

    Args:
        script: path of the benchmark.
        packages: whose versions count.
    """
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", f"benchmarks/{pathlib.Path(script).name}", *sys.argv[1:]]),
        "python": platform.python_version(),
        **{name: read_version(name) for name in packages},
    }


def write_files(folder: str, name: str, document: object, page: str | None = None) -> None:
    """Writes the figures of a benchmark as JSON, and its page as Markdown, if it has one.

    Args:
        folder: made where there is none.
        name: of the files, without their endings.
        document: plain values.
        page: the text.
    """
    place = pathlib.Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    if page is not None:
        (place / f"{name}.md").write_text(page)
