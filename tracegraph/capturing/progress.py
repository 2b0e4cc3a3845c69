"""The progress line: shown when a capture takes longer than a second, gone when it is done."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from tracegraph.runtime.environment import read_progress

_DELAY_SECONDS = 1.0
_PERIOD_SECONDS = 0.5


class Progress:
    """Shows what a capture is doing, on a terminal only.

    Args:
        title: what is going on, as ``capturing `step```.

    Attributes:
        seconds: of each phase, by name; a phase that is entered again adds up.

    Example:
        >>> with Progress("capturing `step`") as progress:
        ...     progress.enter("trace")
    """

    def __init__(self, title: str) -> None:
        self.seconds: dict[str, float] = {}
        self._title = title
        self._phase = self._detail = ""
        self._start = self._entered = time.perf_counter()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_written = False

    def enter(self, phase: str, detail: str = "") -> None:
        """Begins a phase; the detail says which part of it."""
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._entered
        self._phase, self._detail, self._entered = phase, detail, now

    def __enter__(self) -> Progress:
        if is_shown():
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
        if self._thread is not None:
            self._thread.join()
        if self._has_written:
            outcome = "failed" if error is not None else "done"
            self._write(f"{outcome} in {time.perf_counter() - self._start:.1f} s", end="\n")

    def _show(self) -> None:
        if self._done.wait(_DELAY_SECONDS):
            return
        self._has_written = True
        while not self._done.wait(_PERIOD_SECONDS):
            seconds = time.perf_counter() - self._start
            phase = f"{self._phase} {self._detail}".rstrip()
            self._write(f"{phase}, {seconds:.0f} s", end="")

    def _write(self, text: str, *, end: str) -> None:
        sys.stderr.write(f"\r\x1b[K{self._title}: {text}{end}")
        sys.stderr.flush()


def is_shown() -> bool:
    """True when the progress line is wanted: by the environment, else on a terminal."""
    choice = read_progress()
    return choice == "1" or (choice == "auto" and sys.stderr.isatty())
