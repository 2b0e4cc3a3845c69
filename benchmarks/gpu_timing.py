"""How `gpu_replay.py` times one side of a case; the same code runs in every process."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

Advance = Callable[[], object]

# So few that the queue of launches never fills: what is timed is the host's work alone.
HOST_CALLS = 20
WARM_CALLS = 3


def time_total(advance: Advance, synchronise: Advance, calls: int) -> float:
    """Returns microseconds per call of calls one after another, the device's work included.

    Args:
        advance: makes one call and waits for nothing.
        synchronise: waits until the device is idle.
        calls: how many.
    """
    with without_collector():
        return time_block(advance, synchronise, calls)


def time_block(advance: Advance, synchronise: Advance, calls: int) -> float:
    """Returns what `time_total` does, for a caller that is `without_collector`."""
    _warm_up(advance, synchronise)
    start = time.perf_counter_ns()
    for _ in range(calls):
        advance()
    synchronise()
    return (time.perf_counter_ns() - start) / calls / 1000


def time_each(advance: Advance, synchronise: Advance) -> list[float]:
    """Returns the microseconds that the host spends in each of a few calls, from an idle device."""
    samples: list[float] = []
    with without_collector():
        _warm_up(advance, synchronise)
        for _ in range(HOST_CALLS):
            start = time.perf_counter_ns()
            advance()
            samples.append((time.perf_counter_ns() - start) / 1000)
    synchronise()
    return samples


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Collects once, and not again inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _warm_up(advance: Advance, synchronise: Advance) -> None:
    """Makes this side's code, clocks and device context the current ones."""
    for _ in range(WARM_CALLS):
        advance()
    synchronise()
