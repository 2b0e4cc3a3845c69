"""One GPU for several workers of pytest-xdist: a part of its memory each, and turns."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import time
from collections.abc import Iterator, MutableMapping
from typing import IO

import pytest

# Either says how much of the GPU JAX takes in a process; the second is refused beside the first.
FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
# The rest is for the driver's own needs and for programs in processes of their own.
SHARED = 0.6
LIMIT_S = 600.0
PAUSE_S = 0.02


def share_memory(environment: MutableMapping[str, str]) -> None:
    """Gives this process its part of the GPU; to be called before JAX looks for one.

    By default each process takes three quarters. What the user has set stays.
    """
    count = int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count > 1 and not any(name in environment for name in FRACTIONS):
        environment[FRACTIONS[0]] = f"{SHARED / count:.3f}"


def find_shared_folder(factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a folder of this run that all of its workers see."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextlib.contextmanager
def hold_gpu(folder: pathlib.Path, *, alone: bool, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Holds the GPU alone, or together with all others that do not ask to be alone.

    Args:
        folder: the same for all processes that share the GPU.
        alone: tests that count or use up the bytes of the whole GPU, or depend on time, need it.
        limit_s: how long it may take.

    Raises:
        TimeoutError: others held it for too long.
    """
    end = time.monotonic() + limit_s
    with (folder / "gpu_queue").open("w") as queue, (folder / "gpu_lock").open("w") as lock:
        # The queue is closed while one waits, so that those who come later cannot overtake it.
        _lock(queue, fcntl.LOCK_EX, end)
        _lock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, end)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


def _lock(file: IO[str], kind: int, end: float) -> None:
    while True:
        try:
            return fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(f"other tests held {file.name} for too long") from None
        time.sleep(PAUSE_S)
