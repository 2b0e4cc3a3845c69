"""Overlap: work for the calling thread while XLA compiles in another one.

XLA holds no lock of Python while it compiles, which is most of the time of a capture. All else
stays in the calling thread, with what that keeps for itself: streams, JAX's settings, the stack.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Preparation: TypeAlias = tuple[str, Callable[[], object]]


class Overlap:
    """Work that may go on while XLA compiles, and is done once.

    Args:
        stage: what to call the time that it takes when the compilation is over.
        work: what it raises comes before what the compilation raises. None: there is no work.
        preparations: what later stages would do themselves, each with its stage; begun only as long
            as XLA compiles.
    """

    def __init__(
        self,
        stage: str = "",
        work: Callable[[], None] | None = None,
        preparations: Sequence[Preparation] = (),
    ) -> None:
        self.stage = stage
        self._work = work
        self._preparations = list(preparations)

    @property
    def is_done(self) -> bool:
        """True when the work has been begun, with whatever outcome."""
        return self._work is None

    def finish(self) -> None:
        """Does the work, unless it has been begun before."""
        work, self._work = self._work, None
        if work is not None:
            work()

    def run(self, compile_program: Callable[[], T], on_late: Callable[[str], None]) -> T:
        """Compiles while the calling thread does the work; returns when both are done.

        Args:
            compile_program: for any thread; see `carry_settings`.
            on_late: called with the stage of the work if the compilation ends before it.

        Raises:
            Exception: the work or the compilation failed. If both did it is the error of the work,
                which tells what is wrong with the program that was compiled.

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
                compiled.set_result(compile_program())
            except BaseException as error:  # noqa: BLE001 the calling thread raises it
                compiled.set_exception(error)
            with lock:
                if is_working:
                    on_late(self.stage)

        # Not of a pool of threads: that takes no work once the main thread has ended, while a
        # thread which is still there may go on to capture.
        thread = threading.Thread(target=compile_and_tell, name="tracegraph-compile")
        try:
            thread.start()
        except RuntimeError:
            # Some releases of Python 3.12 start no thread at all by then; the work is left over.
            return compile_program()
        try:
            self.finish()
            self._prepare(until=compiled.done)
        finally:
            with lock:
                is_working = False
            # Nothing of a failed capture goes on.
            thread.join()
        return compiled.result()

    def _prepare(self, until: Callable[[], bool]) -> None:
        """Makes the preparations one after another, until a condition holds."""
        while self._preparations and not until():
            self.stage, prepare = self._preparations.pop(0)
            prepare()
