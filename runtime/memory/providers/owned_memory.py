"""OwnedMemory: memory that goes back to where it came from exactly once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class OwnedMemory:
    """What a segment holds as its storage: gives the memory back by `close`, or when it is dropped.

    What gives it back holds all that it needs, a driver or a library, so that whatever handed out
    the memory may be gone by then.

    Args:
        give_back: called once.
        arguments: for it; none of them may lead back to the storage.

    Example:
        >>> memory = OwnedMemory(print, "gone")
        >>> memory.close()
        gone
        >>> memory.close()
    """

    def __init__(self, give_back: Callable[..., object], *arguments: Any) -> None:
        self._give_back = weakref.finalize(self, give_back, *arguments)
        # At interpreter exit the process gives all memory back by itself.
        self._give_back.atexit = False

    @property
    def is_closed(self) -> bool:
        """True once the memory was given back."""
        return not self._give_back.alive

    def close(self) -> None:
        """Gives the memory back. May be called again; nothing happens then."""
        self._give_back()
