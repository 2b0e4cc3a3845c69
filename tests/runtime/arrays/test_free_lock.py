"""A lock that is taken only where it is free is given back, also after an interrupt."""

from __future__ import annotations

import pathlib
import threading

from tests.fuzz.stepping import step_through
from tracegraph.runtime.arrays import free_lock
from tracegraph.runtime.arrays.free_lock import ask_if_free


def is_free(lock: threading.RLock) -> bool:
    """Asks another thread, while this one lives: its lock would be as good as free to itself."""
    found: list[bool] = []

    def look() -> None:
        with_lock = lock.acquire(blocking=False)
        found.append(with_lock)
        if with_lock:
            lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found == [True]


def test_it_is_free_afterwards():
    lock = threading.RLock()
    assert ask_if_free(lock, lambda: not is_free(lock))
    assert is_free(lock)


def test_the_owner_is_answered_and_keeps_it():
    lock = threading.RLock()
    with lock:
        assert ask_if_free(lock, lambda: True)
        assert not is_free(lock)


def test_another_thread_is_not_waited_for():
    lock = threading.RLock()
    found: list[bool] = []
    with lock:
        thread = threading.Thread(target=lambda: found.append(ask_if_free(lock, lambda: True)))
        thread.start()
        thread.join()
    assert found == [False]


def test_an_interrupt_at_any_point_leaves_it_free():
    lock = threading.RLock()
    for stepper in step_through(
        pathlib.Path(free_lock.__file__), lambda: lambda: ask_if_free(lock, lambda: True)
    ):
        assert is_free(lock), stepper.place


def test_one_that_an_interrupt_leaves_held_is_found():
    text = """
def ask(lock):
    lock.acquire(blocking=False)
    try:
        return True
    finally:
        lock.release()
"""
    lock, space = threading.RLock(), {}
    exec(compile(text, free_lock.__file__, "exec"), space)
    free = []
    for _ in step_through(pathlib.Path(free_lock.__file__), lambda: lambda: space["ask"](lock)):
        free.append(is_free(lock))
        if not free[-1]:
            lock.release()
    assert False in free
