"""A lock that is taken only where no other thread has it."""

from __future__ import annotations

import threading
from collections.abc import Callable


def ask_if_free(lock: threading.RLock, ask: Callable[[], bool]) -> bool:
    """Returns an answer that needs a lock; False where another thread has the lock.

    Args:
        lock: taken without waiting.
        ask: called under it.

    Example:
        >>> ask_if_free(threading.RLock(), lambda: True)
        True
    """
    if lock._is_owned():  # type: ignore[attr-defined]
        return ask()
    try:
        if not lock.acquire(blocking=False):
            return False
        answer = ask()
        lock.release()
    except BaseException:
        # No `finally`: an interrupt may come before and after each of these calls.
        if lock._is_owned():  # type: ignore[attr-defined]
            lock.release()
        raise
    return answer
