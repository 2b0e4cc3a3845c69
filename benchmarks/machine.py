"""What a benchmark runs on, and the files that it leaves."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

# Times of captures are those of first ones, unless a benchmark is of the cache itself.
os.environ.setdefault("TRACEGRAPH_KERNEL_CACHE", "0")

# A machine with an H200 had eleven processors of 56 to 65 ms for one loop, and five of 89 to 106.
SLOW_RATIO = 1.25
LOOP_TURNS, LOOP_SAMPLES = 20_000, 5


def read_processor() -> str:
    """Returns the name of the processor, as the system gives it."""
    path = pathlib.Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    lines = [line for line in path.read_text().splitlines() if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.machine()


def time_processor(number: int) -> float:
    """Returns the shortest seconds of a loop on one processor, where the thread stays.

    Args:
        number: of a processor that this process may use.
    """
    os.sched_setaffinity(0, {number})
    samples: list[float] = []
    for _ in range(LOOP_SAMPLES):
        start = time.perf_counter()
        for _ in range(LOOP_TURNS):
            pass
        samples.append(time.perf_counter() - start)
    return min(samples)


def keep_to_fast_processors(
    measure: Callable[[int], float] = time_processor,
) -> tuple[int, ...]:
    """Keeps this thread, and what it starts, off processors that are slower than most.

    Args:
        measure: returns the seconds that a processor takes.

    Returns:
        The numbers of those that are left.
    """
    seconds = {number: measure(number) for number in sorted(os.sched_getaffinity(0))}
    limit = SLOW_RATIO * statistics.median(seconds.values())
    fast = tuple(number for number, each in seconds.items() if each <= limit)
    os.sched_setaffinity(0, fast)
    return fast


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
