"""Beside: work for the calling thread while XLA compiles in another one.

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


class Beside:
    """Work that may go on beside a compilation, and is done once.

    Args:
        stage: what to call the time that it takes when the compilation is over.
        work: what it raises comes before what the compilation raises.
        preparations: what later stages would do themselves, each with its stage; begun only as long
            as XLA compiles.
    """

    def __init__(
        self, stage: str, work: Callable[[], None], preparations: Sequence[Preparation] = ()
    ) -> None:
        self.stage = stage
        self._work: Callable[[], None] | None = work
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

    def prepare(self, until: Callable[[], bool]) -> None:
        """Makes the preparations one after another, until a condition holds."""
        while self._preparations and not until():
            self.stage, prepare = self._preparations.pop(0)
            prepare()


def run_beside(
    compile_program: Callable[[], T], beside: Beside | None, on_stage: Callable[[str, str], None]
) -> T:
    """Compiles while the calling thread does other work; returns when both are done.

    Args:
        compile_program: for any thread; see `carry_settings`.
        beside: the work; without any left there is no other thread.
        on_stage: called with the work's stage if the compilation ends before it.

    Raises:
        Exception: the work or the compilation failed. If both did it is the error of the work,
            which tells what is wrong with the program that was compiled.

    Example:
        >>> run_beside(lambda: 6 * 7, None, on_stage=lambda stage, name: None)
        42
    """
    if beside is None or beside.is_done:
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
                on_stage(beside.stage, "")

    # Not of a pool of threads: that takes no work once the main thread has ended, while a thread
    # which is still there may go on to capture.
    thread = threading.Thread(target=compile_and_tell, name="tracegraph-compile")
    try:
        thread.start()
    except RuntimeError:
        # Some releases of Python 3.12 start no thread at all by then; the work is left over.
        return compile_program()
    try:
        beside.finish()
        beside.prepare(until=compiled.done)
    finally:
        with lock:
            is_working = False
        # Nothing of a failed capture goes on.
        thread.join()
    return compiled.result()
