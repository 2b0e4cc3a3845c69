"""Interrupts at any point: later calls are right, no lock is held, no memory is lost."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time
import types
import weakref

import pytest

from tests.fuzz import interrupts
from tests.fuzz.interrupted_functions import Subjects
from tests.fuzz.interrupts import Counts, count_pool_bytes, watching
from tracegraph.constraints.source_watch import move_sources
from tracegraph.constraints.sources import get_watch

REPLAYS = 2000
CAPTURES = 8
ALLOCATIONS = 500


@pytest.fixture(scope="module")
def subjects() -> Subjects:
    return Subjects()


def check(counts: Counts, attempts: int) -> None:
    assert counts.attempts == attempts
    assert not counts.others
    assert not counts.unraisable


def test_interrupted_replays(subjects: Subjects, capfd: pytest.CaptureFixture[str]):
    counts = Counts()
    before = count_pool_bytes()
    with watching(counts):
        interrupts.interrupt_replays(subjects, REPLAYS, random.Random(0), counts)
        assert count_pool_bytes() == before
    check(counts, REPLAYS)
    # How many are over before their interrupt comes depends on what else the machine does.
    assert counts.interrupted
    assert not capfd.readouterr().err


def test_interrupted_captures(subjects: Subjects, capfd: pytest.CaptureFixture[str]):
    """Not by a timer: which points it meets would depend on what else the machine does."""
    counts = Counts()
    before = count_pool_bytes()
    points, places = list[int](), set()
    with watching(counts):
        for stepper in interrupts.step_captures(subjects, CAPTURES):
            assert count_pool_bytes() == before, stepper.place
            assert gc.isenabled(), stepper.place
            assert get_watch() is None, stepper.place
            points.append(stepper.points)
            places.add(stepper.place)
    check(counts, 0)
    assert None not in places
    # Each at a point of its own; in a long loop, some of them on one line.
    assert points == sorted(set(points))
    assert len(points) == CAPTURES
    assert len(places) > 1
    # The end of the next trace sets right what an interrupt has left.
    with move_sources(check):
        assert type(time) is not types.ModuleType
    assert type(time) is types.ModuleType
    assert not capfd.readouterr().err


def test_interrupted_allocations():
    counts = Counts()
    with watching(counts):
        interrupts.interrupt_allocations(ALLOCATIONS, random.Random(0), counts)
    check(counts, ALLOCATIONS)
    assert counts.interrupted


def test_a_lock_that_is_held_is_found(subjects: Subjects, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interrupts, "WATCHDOG_SECONDS", 0.1)
    (capture,) = subjects.mix._cache.list_latest()
    with capture.graph.lock, pytest.raises(interrupts.WatchdogError):
        interrupts.run_in_thread(
            lambda: subjects.mix._cache.clear() or capture.graph.lock.acquire()
        )


def test_a_lock_of_a_thread_that_ended_is_found(
    subjects: Subjects, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(interrupts, "WATCHDOG_SECONDS", 0.1)
    monkeypatch.setattr(subjects.mix, "_lock", threading.RLock())
    thread = threading.Thread(target=subjects.mix._lock.acquire)
    thread.start()
    thread.join()
    with pytest.raises(interrupts.WatchdogError, match="lock of mix is held"):
        interrupts.check_locks(subjects.list_locks())


def test_what_is_interrupted_goes_though_python_keeps_its_thread(monkeypatch: pytest.MonkeyPatch):
    """One that was interrupted before it ran stays in `threading._limbo` for ever."""
    kept = list[threading.Thread]()
    monkeypatch.setattr(threading.Thread, "run", lambda thread: kept.append(thread))
    subject = threading.Event()
    left = weakref.ref(subject)
    interrupts.attempt(functools.partial(repr, subject), 0.0, Counts())
    del subject
    gc.collect()
    assert len(kept) == 1
    assert left() is None


def test_an_error_in_a_finaliser_is_found():
    class Half:
        missing: list[int]

        def __del__(self) -> None:
            self.missing.clear()

    counts = Counts()
    with watching(counts):
        Half.__new__(Half)
    assert list(counts.unraisable) != []
