"""Why a function was captured anew: what differs from the nearest graph that was kept."""

from __future__ import annotations

import collections
import dataclasses
import logging
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Protocol

import jax

from tracegraph.constraints.frames import locate_caller
from tracegraph.reports.differences import find_differences
from tracegraph.runtime.environment import read_explain_recaptures
from tracegraph.runtime.errors import RecaptureWarning, format_error
from tracegraph.runtime.source_lines import is_own_file
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import Signature

# So many captures within so many calls are a warning.
MANY_CAPTURES, MANY_CALLS = 8, 100
# Of those that a record keeps, and of those that a log shows.
MAX_DIFFERENCES, LOGGED = 40, 3

LOGGER = logging.getLogger("tracegraph")

FIXES = {
    "shape": "pad to a few sizes, so that few shapes occur",
    "dtype": "convert to one dtype before the call, as with jnp.asarray(x, jnp.float32)",
    "weak type": "convert Python numbers before the call, as with jnp.asarray(x, jnp.float32)",
    "memory": "put arguments in one kind of memory before the call, with jax.device_put",
    "sharding": "put arguments on one mesh in one way before the call, with jax.device_put",
    "static value": "pass what changes from call to call as an array, not as a static argument",
    "tree": "pass trees of one structure: the same keys, types and number of leaves",
    "setting": "set JAX's options once, before the first call",
    "signature": "pass arguments of the same types and structure at each call",
    "reset": "call reset() less often",
}


@dataclasses.dataclass(frozen=True)
class Recapture:
    """Why a function was captured anew; texts and numbers only, which keep nothing alive.

    Attributes:
        captures: of the function, this one included.
        calls: of the function before it.
        where: the user's line of the call.
        kind: of the first difference; a key of ``FIXES``.
        differences: from the nearest graph that was kept, one text each.
        is_full: True when the graph that was unused for longest was dropped for it.
    """

    captures: int
    calls: int
    where: str
    kind: str
    differences: tuple[str, ...]
    is_full: bool

    def __str__(self) -> str:
        dropped = " (one graph was dropped for it)" if self.is_full else ""
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'}"
        return f"capture {self.captures} after {calls}{dropped}, at {self.where}"


class ComparedGraph(Protocol):
    """A graph that a call is compared with; `CapturedGraph` is one."""

    signature: Signature
    names: tuple[str, ...]


class RecaptureLog:
    """Records the captures of one function, logs them when asked to, and warns of too many.

    Args:
        name: the function's name.
        expected: captures that it was made for, which are not too many.

    Attributes:
        latest: why the function was captured anew the last time; None before that.
    """

    def __init__(self, name: str, *, expected: int = 0) -> None:
        self.latest: Recapture | None = None
        self._name = name
        self._captures = 0
        self._expected = expected
        # Calls before each of the latest captures.
        self._calls: collections.deque[int] = collections.deque(maxlen=MANY_CAPTURES)
        self._has_warned = False

    def explain(
        self, prepared: PreparedCall, kept: Iterable[ComparedGraph], *, calls: int, is_full: bool
    ) -> Recapture | None:
        """Returns why a call needs a capture, None for the function's first; logs it if asked to.

        Args:
            prepared: the call.
            kept: the function's graphs, the most recently used last.
            calls: of the function before this one.
            is_full: True when one of the graphs will be dropped for the new one.
        """
        is_logged = read_explain_recaptures() or _explains_cache_misses()
        if not self._captures:
            return None
        found = [find_differences(prepared, each.names, each.signature) for each in kept]
        if found:
            # Of several that are as near, the one that was used last.
            nearest = min(reversed(found), key=len)
            kind, differences = nearest[0].kind, tuple(map(str, nearest[:MAX_DIFFERENCES]))
        else:
            kind, differences = "reset", ("no graph was left after reset()",)
        recapture = Recapture(
            self._captures + 1, calls, locate_caller(), kind, differences, is_full
        )
        if is_logged:
            lines = [f"capturing `{self._name}` anew: {recapture}", *differences[:LOGGED]]
            lines += ["and more differences"] if len(differences) > LOGGED else []
            LOGGER.warning("%s", "\n  ".join(lines))
        return recapture

    def add(self, recapture: Recapture | None, calls: int) -> None:
        """Records a capture that has succeeded; warns, once, when there are too many.

        Args:
            recapture: what `explain` returned for it.
            calls: of the function before it.
        """
        self._captures += 1
        self._calls.append(calls)
        self.latest = recapture or self.latest
        passed = calls - self._calls[0] + 1
        is_often = len(self._calls) == MANY_CAPTURES and passed <= MANY_CALLS
        is_often = is_often and self._captures > self._expected
        if recapture is not None and is_often and not self._has_warned:
            self._has_warned = True
            _warn(self._name, recapture, passed)

    def forget(self) -> None:
        """Counts from here on: what is captured after a reset is what the user asked for."""
        self._calls.clear()


def _explains_cache_misses() -> bool:
    return jax.config.jax_explain_cache_misses  # pyright: ignore[reportAttributeAccessIssue]


def _warn(name: str, recapture: Recapture, passed: int) -> None:
    message = format_error(
        f"`{name}` was captured {MANY_CAPTURES} times within {passed} calls",
        f"{recapture.where}, {recapture.differences[0]}",
        "each capture traces and compiles the function, and each graph has memory of its own",
        FIXES[recapture.kind],
        anchor="recaptures",
    )
    warnings.warn(message, RecaptureWarning, stacklevel=_count_own_frames())


def _count_own_frames() -> int:
    """Returns how many frames above the caller the user's own line is."""
    frame: FrameType | None = sys._getframe(1)
    count = 1
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        frame, count = frame.f_back, count + 1
    return count
