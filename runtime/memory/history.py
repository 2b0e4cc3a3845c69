"""What an allocator did, step by step: a ring of trace entries, and the call stacks behind them.

Off by default. An allocator asks `is_enabled` first, so an unused history costs one attribute read.
A call stack is kept as code objects and line numbers, which holds no local variable alive, and
becomes dictionaries only when it is read.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, TypeAlias

from tracegraph.runtime.errors import ConfigError

# One call stack, innermost first. Opaque to allocators: made by History, read by `format_frames`.
Frames: TypeAlias = tuple[tuple[CodeType, int], ...]
_Entry: TypeAlias = tuple[str, int, int, int, int, tuple[int, ...], Frames | None]

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
)
# Each context records the stacks of those before it too.
_CONTEXTS = (None, "state", "alloc", "all")
_STATE, _ALLOC, _ALL = 1, 2, 3
_UNLIMITED = 2**63 - 1


class History:
    """The recorded history of one allocator. The allocator's lock guards the calls of `note`.

    Attributes:
        is_enabled: False until `record` turns it on. While False nothing below needs a call.

    Example:
        >>> history = History()
        >>> history.record()
        >>> history.note("alloc", 4096, 100, 0, (0, 0), history.capture_frames())
        >>> [(entry["action"], entry["addr"], entry["size"]) for entry in history.read_entries()]
        [('alloc', 4096, 100)]
    """

    def __init__(self) -> None:
        self.is_enabled = False
        self._has_trace = False
        self._level = 0
        self._hides_own_callers = False
        self._skipped: frozenset[str] = frozenset()
        self._entries: collections.deque[_Entry] = collections.deque()

    def record(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = _UNLIMITED,
        clear_history: bool = False,
        skip_actions: Iterable[str] = (),
    ) -> None:
        """Starts, changes or ends recording; the arguments are those of ``torch.cuda.memory``.

        Args:
            enabled: "all" keeps a trace entry for every action, "state" only the stacks of the
                blocks in use, None records nothing and forgets what was recorded.
            context: which call stacks are kept: "state" those of blocks in use, "alloc" also those
                of allocations in the trace, "all" also those of frees; None keeps none.
            stacks: "all" keeps every frame but the allocator's own, "python" begins with the
                user's line, also where tracegraph allocates on the user's behalf.
            max_entries: length of the trace; the oldest entries are dropped.
            clear_history: forgets what was recorded before.
            skip_actions: actions that are left out of the trace.

        Raises:
            ConfigError: a value is none of these.
        """
        skipped = _check_arguments(enabled, context, stacks, max_entries, skip_actions)
        kept = () if enabled is None or clear_history else self._entries
        self._entries = collections.deque(kept, min(max_entries, sys.maxsize))
        self._skipped = skipped
        self._hides_own_callers = stacks == "python"
        self._level = _CONTEXTS.index(context) if enabled is not None else 0
        self._has_trace = enabled == "all"
        self.is_enabled = enabled is not None

    def capture_frames(self) -> Frames | None:
        """Returns the call stack of an allocation, or None where the context keeps none."""
        return self._walk_stack(sys._getframe(1)) if self._level >= _STATE else None

    def capture_free_frames(self) -> Frames | None:
        """Returns the call stack of a free, or None unless the context is "all".

        Without it PyTorch shows the stack of the allocation with the free: pass the block's frames.
        """
        return self._walk_stack(sys._getframe(1)) if self._level >= _ALL else None

    def note(
        self,
        action: str,
        address: int,
        nbytes: int,
        stream: int,
        pool_id: tuple[int, ...],
        frames: Frames | None = None,
        device_free: int | None = None,
    ) -> None:
        """Adds one entry to the trace, if there is one.

        Args:
            action: one of ``ACTIONS``.
            address: of the block or segment; 0 for "snapshot".
            nbytes: requested bytes of a block, all bytes of a segment, wanted bytes of an "oom".
            stream: number of the stream.
            pool_id: pair of integers; (0, 0) is the default pool.
            frames: of `capture_frames` or `capture_free_frames`.
            device_free: bytes that the device had left; for "oom" only, in place of an address.
        """
        if not self._has_trace or action in self._skipped:
            return
        place = address if device_free is None else device_free
        kept_frames = frames if self._level >= _ALLOC else None
        now_us = time.time_ns() // 1000
        self._entries.append((action, place, nbytes, stream, now_us, tuple(pool_id), kept_frames))

    def read_entries(self) -> list[dict[str, Any]]:
        """Returns the trace, oldest entry first, as the dictionaries of a snapshot file."""
        return [_format_entry(entry) for entry in self._entries.copy()]

    def _walk_stack(self, frame: FrameType | None) -> Frames:
        is_hidden = _is_own if self._hides_own_callers else _is_allocator
        while frame is not None and is_hidden(frame.f_globals.get("__name__", "")):
            frame = frame.f_back
        found = []
        while frame is not None:
            found.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return tuple(found)


def format_frames(frames: Frames | None) -> list[dict[str, Any]]:
    """Returns a call stack as a snapshot file holds it: innermost first, empty for None.

    Example:
        >>> format_frames(((format_frames.__code__, 7),))[0]["name"]
        'format_frames'
    """
    return [
        {"filename": code.co_filename, "line": line or 0, "name": code.co_name}
        for code, line in frames or ()
    ]


def _format_entry(entry: _Entry) -> dict[str, Any]:
    action, place, nbytes, stream, time_us, pool_id, frames = entry
    formatted: dict[str, Any] = {
        "action": action,
        "device_free" if action == "oom" else "addr": place,
        "size": nbytes,
        "stream": stream,
        "time_us": time_us,
        "pool_id": pool_id,
    }
    if frames is not None:
        formatted["frames"] = format_frames(frames)
    return formatted


def _is_allocator(module: str) -> bool:
    return module.startswith(("tracegraph.user_memory.", "tracegraph.runtime.memory."))


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == "tracegraph"


def _check_arguments(
    enabled: str | None,
    context: str | None,
    stacks: str,
    max_entries: int,
    skip_actions: Iterable[str],
) -> frozenset[str]:
    if enabled not in (None, "state", "all"):
        raise _make_argument_error("enabled", enabled, '"all", "state" or None')
    if context not in _CONTEXTS:
        raise _make_argument_error("context", context, '"all", "alloc", "state" or None')
    if stacks not in ("python", "all"):
        raise _make_argument_error("stacks", stacks, '"all" or "python"')
    if not isinstance(max_entries, int) or max_entries < 1:
        raise _make_argument_error("max_entries", max_entries, "an integer of 1 or more")
    # A text is a sequence of letters, none of which is an action.
    actions: Sequence[str] = (skip_actions,) if isinstance(skip_actions, str) else [*skip_actions]
    for action in actions:
        if action not in ACTIONS:
            raise _make_argument_error("skip_actions", action, f"among {', '.join(ACTIONS)}")
    return frozenset(actions)


def _make_argument_error(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"`{name}` of record_memory_history is {value!r}",
        where=f"record_memory_history(..., {name}={value!r})",
        why=f"it is {allowed}",
        fix=f"pass {name} as {allowed}",
        anchor="snapshot",
    )
