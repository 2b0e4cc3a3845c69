"""Interrupts at any point of a call: a `KeyboardInterrupt` is raised in the thread that calls.

It is raised as the interpreter raises one for a signal: between two steps of Python, never inside
of a call of C. Each attempt has a thread of its own, because JAX keeps what it is tracing per
thread, and an interrupt inside of JAX can leave that in disorder.

By hand, with as many as wanted:

    python -m tests.fuzz.interrupts --replays 20000 --captures 300 --steps 300 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import functools
import gc
import logging
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tracegraph as tg
from tests.fuzz.interrupted_functions import CALLS, Subjects
from tests.fuzz.stepping import Stepper
from tests.paths import ROOT
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.providers.host import HostProvider

WATCHDOG_SECONDS = 240.0


@dataclasses.dataclass
class Counts:
    """What happened.

    Attributes:
        attempts: actions that were begun.
        interrupted: those that ended by the interrupt.
        others: errors of other types, by the end of their traceback.
        unraisable: errors in finalisers, by type, text and object; an interrupt is none.
    """

    attempts: int = 0
    interrupted: int = 0
    others: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unraisable: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class WatchdogError(Exception):
    """A thread did not end: a lock is held, or an interrupt left something waiting."""


def attempt(action: Callable[[], Any], delay: float, counts: Counts) -> None:
    """Runs an action in a thread, and interrupts it once after some seconds.

    Raises:
        WatchdogError: it does not end.
    """
    # Python keeps a thread for ever that was interrupted before it ran; not what is tested with it.
    actions = [action]

    def run() -> None:
        try:
            actions[0]()
        except KeyboardInterrupt:
            counts.interrupted += 1
        except Exception as error:  # noqa: BLE001, shown by the caller
            if "KeyboardInterrupt" in str(error):
                # JAX makes an error of its own of one that comes in a callback.
                counts.interrupted += 1
            else:
                counts.others["".join(traceback.format_exception(error)[-4:])] += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    counts.attempts += 1
    thread.join(delay)
    if thread.is_alive():
        _interrupt(thread.ident or 0)
    thread.join(WATCHDOG_SECONDS)
    if thread.is_alive():
        raise WatchdogError(_describe_waiting(thread))
    actions.clear()


def _interrupt(identity: int) -> None:
    """Interrupts a thread, but not while it starts another one.

    Up to Python 3.11 a thread that has not begun yet has the number of the one that starts it, and
    gets the interrupt in its place. It dies without a word, and the other waits for it for ever.
    """
    error = ctypes.py_object(KeyboardInterrupt)
    with _starting:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(identity), error)


_starting = threading.Lock()
_start = threading.Thread.start


def _start_alone(thread: threading.Thread) -> None:
    """Starts a thread while nothing is interrupted."""
    with _starting:
        _start(thread)


def run_in_thread(action: Callable[[], Any]) -> None:
    """Runs an action in another thread, where locks that this one holds show.

    Raises:
        WatchdogError: it does not end.
        Exception: what the action raises.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001, raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WATCHDOG_SECONDS)
    if thread.is_alive():
        raise WatchdogError(_describe_waiting(thread))
    if errors:
        raise errors[0]


def _is_of_thread(found: Any) -> bool:
    """True for an error of Python's own start or end of a thread, which an interrupt cut short."""
    frames = traceback.extract_tb(found.exc_traceback)
    return bool(frames) and all(frame.filename == threading.__file__ for frame in frames)


def _describe_waiting(thread: threading.Thread) -> str:
    """Returns where a thread waits."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread} waits:\n" + "".join(traceback.format_stack(frame))


@contextlib.contextmanager
def watching(counts: Counts) -> Iterator[None]:
    """Lets threads interrupt each other soon; counts errors in finalisers, does not print them."""
    hook, thread_hook = sys.unraisablehook, threading.excepthook

    def count(found: Any) -> None:
        # One that comes while a finaliser runs is lost; Python does so with each finaliser. A file
        # of which `with` has not begun yet is closed by its finaliser, with a warning.
        is_expected = found.exc_type in (KeyboardInterrupt, ResourceWarning)
        if not is_expected and not _is_of_thread(found):
            counts.unraisable[f"{found.exc_type.__name__}: {found.exc_value}, {found.object}"] += 1

    def pass_interrupts(found: Any) -> None:
        # One that comes after the action has ended.
        if found.exc_type is not KeyboardInterrupt:
            thread_hook(found)

    sys.unraisablehook, threading.excepthook = count, pass_interrupts
    # JAX logs every error of a callback.
    logger = logging.getLogger("jax._src.callback")
    logger.disabled = True
    # Else a thread runs for 5 ms before another can interrupt it.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threading.Thread.start = _start_alone  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = _start  # type: ignore[method-assign]
        sys.setswitchinterval(interval)
        sys.unraisablehook, threading.excepthook = hook, thread_hook
        logger.disabled = False


def check_locks(locks: Sequence[tuple[str, Any]]) -> None:
    """Raises WatchdogError if a lock is held.

    For a thread that is older than those that were interrupted: a new one may have the number of
    one that has ended, and then has its locks.
    """
    for name, lock in locks:
        if not lock.acquire(timeout=WATCHDOG_SECONDS):
            raise WatchdogError(f"the lock of {name} is held: {lock}")
        lock.release()


def interrupt_allocations(count: int, rng: random.Random, counts: Counts) -> None:
    """Interrupts allocations; after each, another thread can have the allocator's lock."""
    for _ in range(count):
        allocator = CachingAllocator(HostProvider())

        def allocate(allocator: CachingAllocator = allocator) -> None:
            for _ in range(CALLS):
                allocator.free(allocator.allocate(1000))

        attempt(allocate, rng.uniform(0, 3e-4), counts)
        run_in_thread(allocator.lock.__enter__)


def interrupt_replays(subjects: Subjects, count: int, rng: random.Random, counts: Counts) -> None:
    """Interrupts replays; now and then the functions are called again and compared."""
    locks = subjects.list_locks()
    for number in range(count):
        replays = subjects.make_replays()
        attempt(replays[number % len(replays)], rng.uniform(0, 3e-4), counts)
        check_locks(locks)
        if number % 50 == 0:
            run_in_thread(subjects.check)
    run_in_thread(subjects.check)


def interrupt_captures(subjects: Subjects, count: int, rng: random.Random, counts: Counts) -> None:
    """Interrupts captures at every phase; the functions and a new one are right afterwards."""
    begin = time.perf_counter()
    subjects.capture()
    seconds = time.perf_counter() - begin
    locks = subjects.list_locks()
    for _ in range(count):
        attempt(subjects.capture, rng.uniform(0, seconds), counts)
        check_locks(locks)
    run_in_thread(subjects.capture)
    run_in_thread(subjects.check)


def step_captures(subjects: Subjects, count: int, first: float = 0.5) -> Iterator[Stepper]:
    """Interrupts captures at points that lie evenly between the first and the last.

    Args:
        subjects: whose functions are right afterwards, as is a new one.
        count: of captures.
        first: the first point, from 0 to 1 in steps between two.

    Yields:
        After each: where it was.
    """
    counter, locks = Stepper(ROOT), subjects.list_locks()
    run_in_thread(lambda: counter.run(subjects.capture))
    for number in range(count):
        stepper = Stepper(ROOT, int(counter.points * (number + first) / count))
        # A thread of its own: see above.
        run_in_thread(functools.partial(_run_interrupted, stepper, subjects.capture))
        check_locks(locks)
        yield stepper
    run_in_thread(subjects.capture)
    run_in_thread(subjects.check)


def _run_interrupted(stepper: Stepper, action: Callable[[], Any]) -> None:
    """Runs an action that is interrupted; JAX makes an error of its own of some interrupts."""
    try:
        stepper.run(action)
    except Exception as error:
        if "KeyboardInterrupt" not in str(error):
            raise


def count_pool_bytes() -> int:
    """Returns the bytes that graphs hold, when what is dropped is gone."""
    gc.collect()
    return int(tg.memory.memory_allocated())


def main(arguments: Sequence[str] | None = None) -> int:
    """Interrupts, and prints what happened; 1 if anything did that must not."""
    parser = argparse.ArgumentParser(description="Interrupts calls of captured functions.")
    parser.add_argument("--replays", type=int, default=20000)
    parser.add_argument("--captures", type=int, default=200)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng, counts, subjects = random.Random(options.seed), Counts(), Subjects()
    before = count_pool_bytes()
    with watching(counts):
        interrupt_replays(subjects, options.replays, rng, counts)
        interrupt_captures(subjects, options.captures, rng, counts)
        for stepper in step_captures(subjects, options.steps, rng.random()):
            print(f"interrupted at {stepper.place}")
        left = count_pool_bytes() - before
    print(f"{counts.interrupted} of {counts.attempts} attempts were interrupted")
    print(f"{left} bytes are left in pools")
    for text, number in (counts.others + counts.unraisable).items():
        print(f"{number} times: {text}")
    return int(bool(counts.others or counts.unraisable or left))


if __name__ == "__main__":
    raise SystemExit(main())
