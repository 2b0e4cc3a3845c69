"""Ranges around captures and replays that NVIDIA's profilers show, with ``TRACEGRAPH_NVTX=1``.

Note [Ranges]. Whether there are ranges is decided when a graph is instantiated: what it launches is
then wrapped, once. So a replay without ranges costs what it costs. NVIDIA's package `nvtx` does
nothing as long as no profiler is attached.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tracegraph.runtime.environment import read_nvtx
from tracegraph.runtime.errors import ConfigError

DOMAIN = "tracegraph"


def find_domain() -> Any:
    """Returns the NVTX domain of our ranges; None where there are to be none.

    Raises:
        ConfigError: ranges are wanted, and NVIDIA's package is missing.
    """
    if not read_nvtx():
        return None
    try:
        nvtx: Any = importlib.import_module("nvtx")
    except ImportError:
        raise ConfigError(
            "ranges for profilers are on, and the package `nvtx` is missing",
            where="TRACEGRAPH_NVTX in the environment of this process",
            why="ranges are made with NVIDIA's own package",
            fix="pip install nvtx, or unset TRACEGRAPH_NVTX",
            anchor="config",
        ) from None
    return nvtx.get_domain(DOMAIN)


def mark_call(call: Callable[..., Any], message: str) -> Callable[..., Any]:
    """Returns a call inside of a range; the call itself where there are none, see Note [Ranges].

    Args:
        call: takes positional arguments.
        message: that the profiler shows.
    """
    domain = find_domain()
    if domain is None:
        return call
    push, pop = domain.push_range, domain.pop_range
    attributes = domain.get_event_attributes(message=message)

    def marked(*args: Any) -> Any:
        push(attributes)
        try:
            return call(*args)
        finally:
            pop()

    return marked


class OpenRanges:
    """Ranges inside one another, each ended by hand, on any thread."""

    def __init__(self) -> None:
        self._domain = find_domain()
        self._started: list[Any] = []

    def start(self, message: str) -> None:
        """Starts a range inside of the others.

        Args:
            message: that the profiler shows.
        """
        if self._domain is not None:
            attributes = self._domain.get_event_attributes(message=message)
            self._started.append(self._domain.start_range(attributes))

    def end(self, count: int) -> None:
        """Ends the latest ranges until so many are left.

        Args:
            count: of those that stay.
        """
        while len(self._started) > count:
            self._domain.end_range(self._started.pop())
