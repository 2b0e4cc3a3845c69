"""EventPoller: a thread that makes freed pinned blocks reusable between allocations."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

PERIOD_S = 1e-3


class Pollable(Protocol):
    """What is polled from time to time."""

    def poll(self) -> None:
        """Looks at events; never waits."""
        ...


class EventPoller:
    """Calls ``poll`` of an object a thousand times a second, until it dies or this is stopped.

    Args:
        pollable: the thread does not keep it alive.
    """

    def __init__(self, pollable: Pollable) -> None:
        self._stopped = threading.Event()
        # Also at interpreter exit: the thread must not call into objects that are being destroyed.
        weakref.finalize(pollable, self._stopped.set)
        self._thread = threading.Thread(
            target=_poll, args=(weakref.ref(pollable), self._stopped), daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True until it has stopped."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread and waits for its last call."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _poll(reference: weakref.ref[Pollable], stopped: threading.Event) -> None:
    while not stopped.wait(PERIOD_S):
        pollable = reference()
        if pollable is None:
            return
        pollable.poll()
        del pollable
