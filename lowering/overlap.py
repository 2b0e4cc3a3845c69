"""Overlap: work for the calling thread while XLA compiles in another one.

XLA holds no lock of Python while it compiles, which is most of the time of a capture. All other
work stays in the calling thread, which has the streams, JAX's settings and the stack.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Preparation(NamedTuple):
    """What a later phase of a capture would do otherwise.

    Attributes:
        phase: that would do it.
        prepare: does it.
        after_seconds: how long XLA must have compiled before, so that it is worth its time.
    """

    phase: str
    prepare: Callable[[], object]
    after_seconds: float = 0.0


class Overlap:
    """Work that may go on while XLA compiles, and is done once.

    Args:
        phase: that the time counts to which the work takes after the compilation has ended; empty
            while it waits.
        work: what it raises comes before what the compilation raises. None: there is no work.
        preparations: one after another; each started only while XLA compiles.
    """

    def __init__(
        self,
        phase: str = "",
        work: Callable[[], None] | None = None,
        preparations: Sequence[Preparation] = (),
    ) -> None:
        self.phase = phase
        self._work = work
        self._preparations = list(preparations)

    @property
    def is_done(self) -> bool:
        """True when the work was started, even if it failed."""
        return self._work is None

    def finish(self) -> None:
        """Does the work, unless it was started before."""
        work, self._work = self._work, None
        if work is not None:
            work()

    def run(self, compile_program: Callable[[], T], on_late: Callable[[str], None]) -> T:
        """Compiles while the calling thread does the work; returns when both are done.

        Args:
            compile_program: for any thread; see `carry_settings`.
            on_late: called with the phase of the work if the compilation ends before it.

        Raises:
            Exception: the work or the compilation failed. If both did it is the error of the work,
                which says what is wrong with the program that was compiled.

        Example:
            >>> Overlap("check", lambda: print("checked")).run(lambda: 6 * 7, print)
            checked
            42
        """
        if self.is_done:
            return compile_program()
        lock = threading.Lock()
        is_working = True
        compiled: Future[T] = Future()

        def compile_and_tell() -> None:
            try:
                program = compile_program()
            except BaseException as error:  # noqa: BLE001 the calling thread raises it
                compiled.set_exception(error)
            else:
                compiled.set_result(program)
            with lock:
                if is_working and self.phase:
                    on_late(self.phase)

        # No thread pool: it takes no work once the main thread has ended, but other threads may
        # still capture.
        thread = threading.Thread(target=compile_and_tell, name="tracegraph-compile")
        try:
            thread.start()
        except RuntimeError:
            # Some releases of Python 3.12 start no thread by then; the work is left to the caller.
            return compile_program()
        begin = time.monotonic()
        try:
            self.finish()
            self._prepare(compiled, begin)
        finally:
            with lock:
                is_working = False
            # No compilation outlives a failed capture.
            wait([compiled])
        return compiled.result()

    def _prepare(self, compiled: Future[T], begin: float) -> None:
        """Makes the preparations one after another, until the compilation has ended."""
        while self._preparations and not compiled.done():
            each = self._preparations[0]
            early_seconds = begin + each.after_seconds - time.monotonic()
            if early_seconds > 0:
                self.phase = ""
                wait([compiled], early_seconds)
                continue
            self.phase, prepare, _ = self._preparations.pop(0)
            prepare()
