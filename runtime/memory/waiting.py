"""Whether what a thread allocates may wait for the work of the device.

The one who knows is the owner of an arena, and the one who asks is a provider. Between them are the
pool, the allocator and its search, which need not know.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Thread(threading.local):
    may_wait = False


_thread = _Thread()


@contextlib.contextmanager
def allow_waiting() -> Iterator[None]:
    """Lets what this thread allocates wait for the work of the device.

    Example:
        >>> with allow_waiting():
        ...     print(may_wait())
        True
        >>> may_wait()
        False
    """
    before, _thread.may_wait = _thread.may_wait, True
    try:
        yield
    finally:
        _thread.may_wait = before


def may_wait() -> bool:
    """True where what this thread allocates may wait for the work of the device."""
    return _thread.may_wait
