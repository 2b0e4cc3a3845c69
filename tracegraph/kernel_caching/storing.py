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

# By the folder of the store and the key. One operation of a dict each: a fork needs no lock.
_underway: dict[tuple[pathlib.Path, str], threading.Thread] = {}


def store_behind(folder: pathlib.Path, key: str, store: Callable[[], None]) -> None:
    """Stores a file in a thread, or here where the process ends and has no more threads.

    Args:
        folder: of the store.
        key: of the file.
        store: writes it.

    Example:
        >>> store_behind(pathlib.Path("kernels"), "abc", lambda: print("written"))
        ... wait_for_stores()
        written
    """

    def run() -> None:
        try:
            store()
        finally:
            _underway.pop((folder, key), None)

    wait_for_store(folder, key)
    thread = _underway[folder, key] = threading.Thread(target=run, name="tracegraph-store")
    try:
        thread.start()
    except RuntimeError:
        run()


def wait_for_store(folder: pathlib.Path, key: str) -> None:
    """Waits for a file that is being written."""
    _wait(_underway.get((folder, key)))


def wait_for_stores() -> None:
    """Waits for all files that are being written."""
    for thread in list(_underway.values()):
        _wait(thread)


def _wait(thread: threading.Thread | None) -> None:
    # One that was just made is not alive before it is started; the interpreter waits for it.
    if thread is not None and thread is not threading.current_thread() and thread.is_alive():
        thread.join()
