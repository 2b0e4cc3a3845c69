"""Work that overlaps with a compilation: in which thread and order, and whose error is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.processes import run_program
from tracegraph.lowering import overlap as overlap_module
from tracegraph.lowering.overlap import Overlap, Preparation

SECONDS = 240.0


class Compilation:
    """A compilation that ends when a test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.may_end, self.has_ended = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self) -> str:
        self.thread = threading.current_thread()
        assert self.may_end.wait(SECONDS)
        self.has_ended.set()
        if self.error is not None:
            raise self.error
        return "program"


def ignore(phase: str) -> None:
    """Takes a phase, and does nothing."""


def fail(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_the_work_goes_on_in_the_calling_thread_while_the_other_compiles():
    compilation = Compilation()
    threads = []

    def work() -> None:
        threads.append(threading.current_thread())
        assert not compilation.has_ended.is_set()
        compilation.may_end.set()

    overlap = Overlap("trace", work)
    assert overlap.run(compilation, ignore) == "program"
    assert threads == [threading.current_thread()]
    assert compilation.thread not in (None, threading.current_thread())
    assert overlap.is_done


@pytest.mark.parametrize("has_work", [False, True])
def test_without_work_there_is_no_other_thread(has_work: bool):
    overlap = Overlap("trace", lambda: None) if has_work else Overlap()
    overlap.finish()
    compilation = Compilation()
    compilation.may_end.set()
    assert overlap.run(compilation, ignore) == "program"
    assert compilation.thread is threading.current_thread()


def test_work_is_done_once():
    count: list[int] = []
    overlap = Overlap("trace", lambda: count.append(1))
    for _ in range(2):
        assert overlap.run(lambda: "program", ignore) == "program"
    overlap.finish()
    assert count == [1]


def test_work_that_failed_is_not_done_again():
    overlap = Overlap("trace", fail(ValueError("differs")))
    with pytest.raises(ValueError, match="differs"):
        overlap.finish()
    overlap.finish()
    assert overlap.is_done


@pytest.mark.parametrize("has_failed_compilation", [False, True])
def test_the_error_of_the_work_comes_first_and_waits_for_the_compilation(
    has_failed_compilation: bool,
):
    compilation = Compilation(RuntimeError("XLA") if has_failed_compilation else None)

    def work() -> None:
        compilation.may_end.set()
        raise ValueError("differs")

    with pytest.raises(ValueError, match="differs") as caught:
        Overlap("trace", work).run(compilation, ignore)
    assert caught.value.__context__ is None
    assert compilation.has_ended.is_set()
    assert compilation.thread is not None
    # It has compiled; the thread itself ends a moment later.
    compilation.thread.join(SECONDS)
    assert not compilation.thread.is_alive()


def test_the_error_of_the_compilation_is_raised_when_the_work_is_done():
    done: list[int] = []
    compilation = Compilation(RuntimeError("XLA"))
    compilation.may_end.set()

    def work() -> None:
        assert compilation.has_ended.wait(SECONDS)
        done.append(1)

    with pytest.raises(RuntimeError, match="XLA"):
        Overlap("trace", work).run(compilation, ignore)
    assert done == [1]


def test_the_time_after_the_compilation_belongs_to_the_work():
    entered: list[str] = []
    is_entered = threading.Event()
    compilation = Compilation()
    compilation.may_end.set()

    def enter(phase: str) -> None:
        entered.append(phase)
        is_entered.set()

    Overlap("trace", lambda: _await(is_entered)).run(compilation, enter)
    assert entered == ["trace"]


def test_the_time_before_its_end_belongs_to_the_compilation(monkeypatch: pytest.MonkeyPatch):
    entered: list[str] = []
    compilation = Compilation()

    def wait(futures: Any) -> None:
        """Ends the compilation once the calling thread has nothing left but to wait."""
        compilation.may_end.set()
        futures_wait(futures)

    futures_wait = overlap_module.wait
    monkeypatch.setattr(overlap_module, "wait", wait)
    Overlap("trace", lambda: None).run(compilation, entered.append)
    assert entered == []


def test_preparations_are_begun_only_while_the_other_compiles():
    compilation = Compilation()
    done: list[str] = []

    def end() -> None:
        done.append("second")
        compilation.may_end.set()
        assert compilation.thread is not None
        compilation.thread.join(SECONDS)

    overlap = Overlap(
        "trace",
        lambda: done.append("work"),
        [
            Preparation("lower", lambda: done.append("first")),
            Preparation("lower", end),
            Preparation("verify", lambda: done.append("third")),
        ],
    )
    assert overlap.run(compilation, ignore) == "program"
    assert done == ["work", "first", "second"]


@pytest.mark.parametrize(("seconds", "is_begun"), [(0.01, True), (SECONDS, False)])
def test_a_preparation_is_begun_once_the_other_has_compiled_for_so_long(
    seconds: float, is_begun: bool
):
    compilation, has_begun = Compilation(), threading.Event()

    def prepare() -> None:
        has_begun.set()
        compilation.may_end.set()

    overlap = Overlap("trace", lambda: None, [Preparation("lower", prepare, seconds)])
    late = list[str]()
    if not is_begun:
        threading.Timer(0.1, compilation.may_end.set).start()
    assert overlap.run(compilation, late.append) == "program"
    assert has_begun.is_set() is is_begun
    # While it only waits, no work is late.
    assert is_begun or late == []


def test_the_time_of_a_preparation_belongs_to_its_phase():
    entered: list[str] = []
    is_entered = threading.Event()
    compilation = Compilation()

    def enter(phase: str) -> None:
        entered.append(phase)
        is_entered.set()

    def prepare() -> None:
        compilation.may_end.set()
        _await(is_entered)

    Overlap("trace", lambda: None, [Preparation("verify", prepare)]).run(compilation, enter)
    assert entered == ["verify"]


def test_a_thread_that_outlives_the_main_one_may_compile():
    text = """
import threading
from tracegraph.lowering.overlap import Overlap

def compile_late():
    threading.main_thread().join()
    print(Overlap("trace", lambda: None).run(lambda: "compiled", print))

threading.Thread(target=compile_late).start()
"""
    assert run_program(text).splitlines()[-1:] == ["compiled"]


def _await(event: threading.Event) -> None:
    assert event.wait(SECONDS)
