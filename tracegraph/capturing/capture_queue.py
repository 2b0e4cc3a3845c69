"""CaptureQueue: the captures of one function that a thread makes beside its calls.

Note [The thread of captures]
One thread makes the captures of a function, in the order of the first calls. It ends when there is
nothing left, so that nothing waits at the end of the process, and a forked process starts its own.
It is no daemon, since one inside of XLA would abort a process that ends: such a process waits until
the phase has ended that is under way. Between two phases a capture is given up if the process ends,
`reset` was called or the captured function is gone: the thread refers to it weakly.
"""

from __future__ import annotations

import collections
import copy
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tracegraph.capturing.capture_cache import MAX_SIGNATURES
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.lazy_call import (
    LazyCall,
    LazyPipeline,
    LazyProgram,
    are_deleted,
)
from tracegraph.capturing.pipeline import Capture
from tracegraph.capturing.progress import Progress
from tracegraph.jax_internals import drop_unit_axes
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import CaptureError, ReplayError, TracegraphError
from tracegraph.runtime.jax_interop import carry_settings
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import Signature

LOGGER = logging.getLogger("tracegraph")
ANCHOR = "lazy-capture"


class AbandonedSignal(Exception):
    """Ends a capture that is not wanted any more."""


class CaptureQueue:
    """The signatures of one function that run as `jax.jit`, and the thread that captures them.

    Of more than ``MAX_SIGNATURES`` the one that was not called for longest is dropped, as a graph
    is: its next call begins anew.

    Args:
        name: of the captured function.
        keep: a weak method of its owner: adds a capture to the graphs, while `is_wanted`.
    """

    def __init__(self, name: str, keep: weakref.WeakMethod[Callable[..., None]]) -> None:
        self._name, self._keep = name, keep
        self._changed = threading.Condition()
        # By signature, the one that was called last at the end.
        self._calls: collections.OrderedDict[Signature, LazyCall] = collections.OrderedDict()
        # What to do for each call that waits, in order, and the one that the thread is at.
        self._waiting: dict[LazyCall, Callable[[], Capture]] = {}
        self._current: LazyCall | None = None
        self._thread: threading.Thread | None = None

    def find(self, signature: Signature) -> LazyCall | None:
        """Returns the call of a signature that has no graph yet, if there is one."""
        with self._changed:
            call = self._calls.get(signature)
            if call is not None:
                self._calls.move_to_end(signature)
            return call

    def add(self, signature: Signature) -> LazyCall:
        """Returns the call of a signature, a new one if there is none."""
        with self._changed:
            call = self._calls.setdefault(signature, LazyCall())
            self._calls.move_to_end(signature)
            if len(self._calls) > MAX_SIGNATURES:
                _, dropped = self._calls.popitem(last=False)
                self._waiting.pop(dropped, None)
                self._changed.notify_all()
            return call

    def drop(self, signature: Signature) -> None:
        """Drops the call of a signature: it has failed before it had a program."""
        with self._changed:
            self._calls.pop(signature, None)

    def submit(
        self, call: LazyCall, prepared: PreparedCall, device: Device, pool: FunctionPool
    ) -> None:
        """Has a call captured beside, unless it waits already or is not wanted any more.

        Args:
            call: which has a program.
            prepared: the same call with values, see `hold_values`.
            device: that it is captured for.
            pool: that the memory of the graph comes from.
        """
        assert call.program is not None
        progress = _WatchedProgress(self._name, weakref.ref(self), call, call.program.seconds)
        work = functools.partial(_capture, call.program, prepared, device, pool, progress)
        # Under the settings of this thread, as they are now.
        work = carry_settings(work)
        with self._changed:
            if call.wants_values and self._is_kept(call):
                call.error, call.wants_values = None, False
                self._waiting[call] = work
                self._start_thread()

    def is_wanted(self, call: LazyCall) -> bool:
        """True when the capture of a call is to go on."""
        with self._changed:
            return self._is_kept(call)

    def clear(self) -> None:
        """Drops all; a capture that is under way ends with its phase."""
        with self._changed:
            self._calls.clear()
            self._waiting.clear()
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Waits until nothing is to be captured; returns False if it takes longer.

        Args:
            timeout: in seconds; None for no limit.

        Raises:
            TracegraphError: a capture has failed; the first one, if there are several.
        """
        with self._changed:
            self._start_thread()
            is_done = self._changed.wait_for(self._is_idle, timeout)
            errors = self._list_errors()
            # After the end of the main thread nothing is captured any more.
            is_left = bool(self._waiting)
        if errors:
            # A copy: its traceback refers to the caller's frames, the error stays here.
            raise copy.copy(errors[0])
        return is_done and not is_left

    def describe(self, signature: Signature) -> str:
        """Returns what a signature without a graph does meanwhile; an empty text of any other."""
        with self._changed:
            call = self._calls.get(signature)
            if call is None or call.program is None:
                return ""
            if call.error is not None:
                where = call.error.where
                return f"calls run: as jax.jit, the capture failed: {call.error.what} ({where})"
            state = "is under way" if call is self._current else "waits for its turn"
            return f"calls run: as jax.jit, the capture in a thread beside {state}"

    def take(self) -> tuple[LazyCall, Callable[[], Capture]] | None:
        """Returns what the thread is to do next; None ends it."""
        with self._changed:
            self._current = None
            if not self._waiting or not threading.main_thread().is_alive():
                self._thread = None
                self._changed.notify_all()
                return None
            # It stays there until it is finished: a forked process begins it anew.
            self._current = next(iter(self._waiting))
            return self._current, self._waiting[self._current]

    def finish(self, call: LazyCall, outcome: Capture | TracegraphError | None) -> None:
        """Keeps a capture, or the reason why there is none; None of one that was given up."""
        keep = self._keep()
        if isinstance(outcome, Capture) and keep is not None:
            # First among the graphs, so that no call finds neither.
            keep(call, outcome)
        with self._changed:
            self._waiting.pop(call, None)
            if isinstance(outcome, TracegraphError):
                call.error = outcome
                call.has_lost_values = call.wants_values = _is_about_values(outcome)
            elif outcome is not None:
                self._forget(call)

    # Loops are not spelled out under the lock: an interrupt may leave it held there.
    def _list_errors(self) -> list[TracegraphError]:
        return [call.error for call in self._calls.values() if call.error is not None]

    def _forget(self, call: LazyCall) -> None:
        for signature in [key for key, each in self._calls.items() if each is call]:
            del self._calls[signature]

    def _is_kept(self, call: LazyCall) -> bool:
        return any(each is call for each in self._calls.values())

    def _is_idle(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def _start_thread(self) -> None:
        """Starts the thread if there is work and none is alive; the caller holds the lock."""
        if not self._waiting or not self._is_idle() or not threading.main_thread().is_alive():
            return
        self._thread = threading.Thread(
            target=_make_captures,
            args=(weakref.ref(self),),
            name=f"tracegraph-capture-{self._name}",
            # Also where a daemon calls.
            daemon=False,
        )
        self._thread.start()


class _WatchedProgress(Progress):
    """Counts the seconds of a capture, and ends it between two phases if nothing needs it."""

    def __init__(
        self,
        name: str,
        queue: weakref.ref[CaptureQueue],
        call: LazyCall,
        seconds: Any,
    ) -> None:
        super().__init__(f"capturing `{name}`", is_quiet=True)
        self.seconds.update(seconds)
        self._queue, self._call = queue, call
        self._own_thread = 0

    def __enter__(self) -> Progress:
        self._own_thread = threading.get_ident()
        return super().__enter__()

    def enter(self, phase: str, detail: str = "") -> None:
        """Begins a phase, in the thread of captures only where it is wanted."""
        super().enter(phase, detail)
        # XLA's thread tells the phase, too.
        if not phase or threading.get_ident() != self._own_thread:
            return
        queue = self._queue()
        is_wanted = queue is not None and queue.is_wanted(self._call)
        if not is_wanted or not threading.main_thread().is_alive():
            raise AbandonedSignal


def _make_captures(reference: weakref.ref[CaptureQueue]) -> None:
    """Makes captures until there is nothing to capture, or no function to capture it for."""
    while (queue := reference()) is not None:
        job = queue.take()
        name = queue._name
        del queue
        if job is None:
            return
        call, work = job
        outcome = _run(work, name)
        # With it go the values of the call.
        del job, work
        queue = reference()
        if queue is not None:
            queue.finish(call, outcome)
        del queue, call, outcome


def _run(work: Callable[[], Capture], name: str) -> Capture | TracegraphError | None:
    """Returns a capture, why there is none, or None if it was given up."""
    try:
        return work()
    except AbandonedSignal:
        return None
    except TracegraphError as error:
        # Its frames refer to the values of the call.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        LOGGER.warning(
            "the capture of `%s` failed, its calls go on as jax.jit: %s (%s)",
            name,
            error.what,
            error.where,
        )
        return error
    except Exception as error:
        # The thread must not end: others wait for it.
        LOGGER.warning(
            "the capture of `%s` failed, its calls go on as jax.jit", name, exc_info=True
        )
        return _make_failure_error(name, error)


def _capture(
    program: LazyProgram,
    prepared: PreparedCall,
    device: Device,
    pool: FunctionPool,
    progress: Progress,
) -> Capture:
    try:
        with drop_unit_axes(prepared.leaves), progress:
            pipeline = LazyPipeline(program, prepared, device, pool, progress)
            return pipeline.capture(_ignore)
    except AbandonedSignal:
        raise
    except Exception:
        if not are_deleted(prepared.leaves):
            raise
        raise _make_lost_error(prepared.options.name) from None


def _is_about_values(error: TracegraphError) -> bool:
    return isinstance(error, ReplayError) and error.anchor == ANCHOR


def _ignore(graph: Any) -> None:
    """Is told of the new graph, which no call waits for."""


def _make_lost_error(name: str) -> ReplayError:
    return ReplayError(
        f"the arguments of the first call of `{name}` were deleted before its graph was verified",
        where="the thread that captures it, verification at capture",
        why="a new graph is compared on the arguments of a call, and these were donated elsewhere",
        fix=f"call `{name}` again: it is captured with the arguments of that call",
        anchor=ANCHOR,
    )


def _make_failure_error(name: str, error: Exception) -> CaptureError:
    first = str(error).partition("\n")[0]
    return CaptureError(
        f"the capture of `{name}` failed: {type(error).__name__}: {first}",
        where="the thread that captures it",
        why="with warm=False the capture is made beside the calls, which go on as jax.jit",
        fix=f"capture `{name}` with warm=True, which shows where it is raised; reset() tries again",
        anchor=ANCHOR,
    )
