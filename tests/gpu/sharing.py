"""One GPU for several workers of pytest-xdist: a part of its memory each, and turns."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import IO, TypeVar

import pytest

# Either says how much of the GPU JAX takes in a process; the second is refused beside the first.
FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
# The rest is for the driver's own needs and for programs in processes of their own.
SHARED = 0.72
LIMIT_S = 600.0
PAUSE_S = 0.02
BEGIN_S = 20.0
# Ten of sixteen cores; programs of their own take memory, too.
WORKERS, WORKER_BYTES = 10, 7 << 30
T = TypeVar("T")


def share_memory(environment: MutableMapping[str, str]) -> None:
    """Gives this process its part of the GPU; to be called before JAX looks for one.

    By default each process takes three quarters. What the user has set stays.
    """
    count = int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count > 1 and not any(name in environment for name in FRACTIONS):
        environment[FRACTIONS[0]] = f"{SHARED / count:.3f}"


def choose_workers(config: pytest.Config, environment: Mapping[str, str], gpu_bytes: int) -> bool:
    """Makes a run of a whole folder one with several workers, unless its command says how many.

    It returns True if it has done so.

    To be called before pytest-xdist reads its options; without that plugin there is one process.

    Args:
        config: of pytest.
        environment: of this process.
        gpu_bytes: memory of the GPU that they share.
    """
    option = config.option
    is_chosen = getattr(option, "numprocesses", 0) is not None or option.usepdb
    is_worker = "PYTEST_XDIST_WORKER" in environment
    is_whole = all(pathlib.Path(path).is_dir() for path in config.args)
    if not is_whole or is_chosen or is_worker:
        return False
    count = max(1, min(WORKERS, gpu_bytes // WORKER_BYTES))
    option.numprocesses, option.dist = count, "worksteal"
    return True


def spread(items: Sequence[T], long: Sequence[T], count: int) -> list[T]:
    """Returns all items with the long ones at the beginnings of all parts but the first.

    Args:
        items: the others, in order.
        long: the longest first.
        count: pytest-xdist gives that many workers one part each, of equal length.
    """
    if count == 1:
        return [*items, *long]
    length = -(-(len(items) + len(long)) // count)
    rest, found = iter(items), list[T]()
    for part in range(count):
        mine = long[part - 1 :: count - 1] if part else ()
        found += [*mine, *itertools.islice(rest, max(length - len(mine), 0))]
    return [*found, *rest]


class Turns:
    """The turns that the tests of one process take on the GPU.

    Tests that are alone on it one after the other share a turn: between two turns, the tests of
    other processes begin, and the next one has to wait for the longest of them.

    Args:
        folder: the same for all processes that share the GPU.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._held = contextlib.ExitStack()
        self._is_alone = False

    def begin(self, worker: str, *, alone: bool) -> None:
        """Takes the first turn of a process; to be called before JAX starts in it.

        One worker begins with the tests that are alone on the GPU, and takes it alone before the
        others begin: else it would wait for their longest tests, and they for it. Which one it is
        depends on which worker is ready first.

        Args:
            worker: its name, as pytest-xdist says it; empty without others.
            alone: the first test of this process is alone on the GPU.
        """
        mark = self._folder / "gpu_begun"
        if alone:
            self.take(alone=True)
            mark.touch()
            return
        end = time.monotonic() + BEGIN_S
        # Without such a worker nothing is lost but time.
        while worker and not mark.exists() and time.monotonic() < end:
            time.sleep(PAUSE_S)
        self.take(alone=False)

    def take(self, *, alone: bool) -> None:
        """Waits for a turn; goes on with the last one if both are alone on the GPU."""
        if alone and self._is_alone:
            return
        self._held.close()
        self._held.enter_context(hold_gpu(self._folder, alone=alone))
        self._is_alone = alone

    def end(self, *, keeps_alone: bool) -> None:
        """Ends a turn, but not one alone on the GPU that the next test goes on with."""
        if self._is_alone and keeps_alone:
            return
        self._held.close()
        self._is_alone = False


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


def wait_for_file(path: pathlib.Path, *, limit_s: float) -> None:
    """Waits until another process has made a file.

    Args:
        path: of the file.
        limit_s: how long it may take.

    Raises:
        TimeoutError: it was not made.
    """
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no other process made {path}")
        time.sleep(PAUSE_S)


@contextlib.contextmanager
def hold_file(path: pathlib.Path, *, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Holds a file that other processes wait for; it is made if there is none.

    Args:
        path: of the file.
        limit_s: how long it may take.

    Raises:
        TimeoutError: others held it for too long.
    """
    with path.open("w") as file:
        _lock(file, fcntl.LOCK_EX, time.monotonic() + limit_s)
        yield


def _lock(file: IO[str], kind: int, end: float) -> None:
    while True:
        try:
            return fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(f"other tests held {file.name} for too long") from None
        time.sleep(PAUSE_S)
