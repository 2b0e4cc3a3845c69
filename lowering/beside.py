"""Beside: work for the calling thread while XLA compiles in another one.

XLA holds no lock of Python while it compiles, which is most of the time of a capture. All else
stays in the calling thread, with what that keeps for itself: streams, JAX's settings, the stack.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Beside:
    """Work that may go on beside a compilation, and is done once.

    Args:
        stage: what to call the time that it takes when the compilation is over.
        work: what it raises comes before what the compilation raises.
    """

    def __init__(self, stage: str, work: Callable[[], None]) -> None:
        self.stage = stage
        self._work: Callable[[], None] | None = work

    @property
    def is_done(self) -> bool:
        """True when the work has been begun, with whatever outcome."""
        return self._work is None

    def finish(self) -> None:
        """Does the work, unless it has been begun before."""
        work, self._work = self._work, None
        if work is not None:
            work()


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

    def compile_and_tell() -> T:
        try:
            return compile_program()
        finally:
            with lock:
                if is_working:
                    on_stage(beside.stage, "")

    # Leaving the block waits for the thread, so that nothing of a failed capture goes on.
    with ThreadPoolExecutor(1, thread_name_prefix="tracegraph-compile") as threads:
        compiled = threads.submit(compile_and_tell)
        try:
            beside.finish()
        finally:
            with lock:
                is_working = False
        return compiled.result()
