"""Pauses Python's garbage collector while a capture makes its records.

Note [Collector]
Python looks for cycles of dead objects whenever enough objects have been made, and at times among
all there are. Some steps of a capture make tens of thousands of records in a fraction of a second,
next to as many of JAX's, and all of them stay: the collector finds nothing and takes a quarter of
the time. One look at everything takes 0.1 s and more in a process with JAX: as long as all that a
capture does after XLA. It is paused for such steps only, which last for fractions of a second. Of
the user's code only eager parts and handlers run in them, and what other threads leave behind is
collected as soon as they are over.

The collector is on again whatever ends the step, an interrupt too: a `try` in the function itself,
since one in a generator is left where an interrupt comes between it and the `with`. Nothing is
counted: of two threads, the one that turned the collector off turns it on.

A look at everything that is due comes at the end of the first such step behind XLA. So it is made
ahead, while XLA compiles and the calling thread only waits. It holds Python's lock, which XLA needs
at its end: XLA takes 0.03 to 0.05 s for a small program, and one beside such a look 0.1 s (H200).
So a look waits until XLA has compiled for twice as long as it takes.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# A look takes 0.10 to 0.12 microseconds per block of memory in a process with JAX; XLA must have
# compiled for twice as long, see Note [Collector].
WAIT_SECONDS_PER_BLOCK = 0.25e-6
# A look at so many blocks of memory, a million objects, takes up to a second: as long as XLA may.
MAX_BLOCKS = 4_000_000


def hold_collector(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a function pause the collector while it runs, for all threads.

    A collector that is off stays off.

    Args:
        function: the step.

    Example:
        >>> hold_collector(gc.isenabled)()
        False
    """

    @functools.wraps(function)
    def held(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        was_enabled = gc.isenabled()
        try:
            gc.disable()
            return function(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return held


def find_wait_seconds() -> float:
    """Returns for how many seconds XLA must have compiled before `collect_ahead` is called."""
    return WAIT_SECONDS_PER_BLOCK * sys.getallocatedblocks()


def collect_ahead() -> None:
    """Looks for dead objects among all there are, unless the collector is off or they are many."""
    if gc.isenabled() and sys.getallocatedblocks() < MAX_BLOCKS:
        gc.collect()
