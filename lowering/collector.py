"""Pauses Python's garbage collector while a capture makes its records.

Note [Collector]
Python looks for cycles of dead objects whenever enough objects have been made, and at times among
all there are. Some steps of a capture make tens of thousands of records in a fraction of a second,
next to as many of JAX's, and all of them stay: the collector finds nothing and takes a quarter of
the time. One look at everything takes 0.1 s and more in a process with JAX: as long as all that a
capture does after XLA. It is paused for such steps only, which last for fractions of a second. Of
the user's code only eager parts and handlers run in them, and what other threads leave behind is
collected as soon as they are over.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextlib.contextmanager
def hold_collector() -> Iterator[None]:
    """Pauses the collector in the body, for all threads; may be nested.

    A collector that is off stays off.

    Example:
        >>> with hold_collector():
        ...     gc.isenabled()
        False
    """
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(count: int) -> None:
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += count
        if _holders == 0 and _was_enabled:
            gc.enable()
