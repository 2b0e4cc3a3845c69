"""Storing behind a capture: the file is written while the caller goes on.

Note [Stored behind]
A lowering becomes a file in 20 to 100 ms, most of them Python's. The call that captured it has its
results by then and need not wait; a loop that waits for its device hides the time wholly. The
interpreter waits for the thread when it ends. So do a capture of the same program, and a question
what the cache holds. A process that is killed meanwhile has stored nothing.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable

# The call that captured still replays once. Beside another thread of Python, each of its calls of
# the driver would wait up to 5 ms for Python's lock.
DELAY_S = 0.05
# By the folder of the store and the key. One operation of a dict each: a fork needs no lock.
_underway: dict[tuple[pathlib.Path, str], _Storing] = {}


class _Storing(threading.Thread):
    """Stores one file, once it is asked for or the call that captured it has ended."""

    def __init__(self, store: Callable[[], None], place: tuple[pathlib.Path, str]) -> None:
        super().__init__(name="tracegraph-store")
        self._store, self._place = store, place
        self._is_asked_for = threading.Event()

    def run(self) -> None:
        self._is_asked_for.wait(DELAY_S)
        try:
            self._store()
        finally:
            _underway.pop(self._place, None)

    def ask(self) -> None:
        """Ends the delay."""
        self._is_asked_for.set()

    def wait(self) -> None:
        """Waits for the file; not before the thread has started, nor in the thread itself."""
        self.ask()
        if self.is_alive() and self is not threading.current_thread():
            self.join()


def store_behind(folder: pathlib.Path, key: str, store: Callable[[], None]) -> None:
    """Stores a file in a thread, or here where the process ends and has no more threads.

    Args:
        folder: of the store.
        key: of the file.
        store: writes it.

    Example:
        >>> store_behind(pathlib.Path("kernels"), "abc", lambda: print("written"))
        >>> wait_for_stores()
        written
    """
    wait_for_stores(folder, key)
    storing = _underway[folder, key] = _Storing(store, (folder, key))
    try:
        storing.start()
    except RuntimeError:
        storing.ask()
        storing.run()


def wait_for_stores(folder: pathlib.Path | None = None, beginning: str = "") -> None:
    """Waits for files that are being written.

    Args:
        folder: of their store; None for those of all.
        beginning: of their keys.
    """
    for (place, key), storing in list(_underway.items()):
        if folder in (None, place) and key.startswith(beginning):
            storing.wait()
