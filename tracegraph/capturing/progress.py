"""Progress of a capture of more than a second: one line of a terminal, or lines of a log."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO, TypeGuard

from tracegraph.runtime.environment import read_progress
from tracegraph.runtime.profiler_ranges import OpenRanges

_DELAY_SECONDS = 1.0
_PERIOD_SECONDS = 0.5
# Between two lines of a log that name the same phase.
_LOG_SECONDS = 10.0


class Progress:
    """Shows what a capture is doing.

    A terminal gets one line that is written over. A file or a pipe gets nothing, or, with
    ``TRACEGRAPH_PROGRESS=1``, a plain line per phase and every ten seconds.

    Args:
        title: what is going on, as ``capturing `step```.
        is_quiet: count the seconds only, as a part of what is shown already.

    Attributes:
        seconds: of each phase, by name; a phase that is entered again adds up.

    Example:
        >>> with Progress("capturing `step`") as progress:
        ...     progress.enter("trace")
    """

    def __init__(self, title: str, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self.seconds: dict[str, float] = {}
        self._title = title
        self._phase = self._detail = ""
        self._start = self._entered = time.perf_counter()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._stream: TextIO | None = None
        self._is_terminal = self._has_written = False
        self._ranges = OpenRanges()

    def enter(self, phase: str, detail: str = "") -> None:
        """Begins a phase; the detail says which part of it."""
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._entered
        self._phase, self._detail, self._entered = phase, detail, now
        self._ranges.end(1)
        if phase:
            self._ranges.start(f"{phase} {detail}".rstrip())

    def __enter__(self) -> Progress:
        self._ranges.start(self._title)
        # The same one to the end, even if the traced function replaces `sys.stderr`.
        self._stream = sys.stderr
        if not self._is_quiet and is_shown(self._stream):
            self._is_terminal = _is_terminal(self._stream)
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self.enter("")
        self._ranges.end(0)
        if self._thread is not None:
            self._thread.join()
        if self._has_written:
            outcome = "failed" if error is not None else "done"
            self._write(f"{outcome} in {time.perf_counter() - self._start:.1f} s", is_last=True)

    def _show(self) -> None:
        if self._done.wait(_DELAY_SECONDS):
            return
        logged, due = "", 0.0
        while not self._done.is_set():
            phase, seconds = self._phase, time.perf_counter() - self._start
            if phase and (self._is_terminal or phase != logged or seconds >= due):
                self._write(f"{f'{phase} {self._detail}'.rstrip()}, {seconds:.0f} s")
                logged, due = phase, seconds + _LOG_SECONDS
            self._done.wait(_PERIOD_SECONDS)

    def _write(self, text: str, *, is_last: bool = False) -> None:
        if self._stream is None:
            return
        start, end = ("\r\x1b[K", "\n" if is_last else "") if self._is_terminal else ("", "\n")
        try:
            self._stream.write(f"{start}{self._title}: {text}{end}")
            self._stream.flush()
        except (OSError, ValueError):
            # The reader of a pipe has left, or the file is closed: no reason to stop a capture.
            self._stream = None
        self._has_written = True


def is_shown(stream: TextIO | None) -> TypeGuard[TextIO]:
    """True when progress goes to a stream: by the environment, else if it is a terminal.

    Args:
        stream: None in a process without a console.
    """
    choice = read_progress()
    if stream is None:
        return False
    return choice == "1" or (choice == "auto" and _is_terminal(stream))


def _is_terminal(stream: TextIO) -> bool:
    # A user's own stream may have no more than `write`, and a closed one does not say what it was.
    return hasattr(stream, "isatty") and not stream.closed and stream.isatty()
