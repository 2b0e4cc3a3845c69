"""Keeps what JAX traces in a block apart from what it traces elsewhere.

Note [Kept traces]. JAX keeps the trace of a `jax.jit` function, of a `jax.checkpoint`, of the body
of a loop, and finds it by the function, the types and the settings. If the function closes over a
static input, its trace in a block has what stands for the input there, which means nothing in
another block, nor outside. A trace from outside has a value for ever, so that replays would not
follow the input. So a block has a number among the settings. To trace each function of `jax.numpy`
anew costs time: blocks have the same number one after another, until a trace of one has read an
array of a block.
"""

from __future__ import annotations

import itertools
import threading

from tracegraph.jax_internals import make_setting

# 0 outside of blocks.
_setting = make_setting("tg.graph", 0)
_numbers = itertools.count(1)
_free: list[int] = []
_lock = threading.Lock()


class KeptTraces:
    """What JAX traces for one block of this thread; from now on."""

    def __init__(self) -> None:
        with _lock:
            self._number = _free.pop() if _free else next(_numbers)
        self._before = _setting.swap_local(self._number)

    def leave(self, *, has_read: bool) -> None:
        """Ends the block.

        Args:
            has_read: a trace that JAX keeps has read an array of the block, or one of outside that
                stands for its buffer: no other block may find it.
        """
        _setting.set_local(self._before)
        if not has_read:
            with _lock:
                _free.append(self._number)
