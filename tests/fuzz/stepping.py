"""Interrupts at each point of a call, one after the other: no timer, no thread, nothing by chance.

The interpreter looks for an interrupt when a function begins, after a call of C, and when a loop
goes back. A trace function that sees each instruction knows these points: it raises at the n-th,
for each n in turn.
"""

from __future__ import annotations

import dis
import functools
import inspect
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

# Called by C, so the interpreter looks for an interrupt after they return.
_CALLED_BY_C = frozenset(("__init__", "__enter__", "__exit__", "__new__", "__hash__", "__eq__"))


class Stepper:
    """Counts the points of calls in some files, and raises `KeyboardInterrupt` at one of them.

    Args:
        folder: of the files; with those of the folders in it.
        at: the number of the point; None to count only.

    Attributes:
        points: so many were passed.
        place: where it was raised, or None.
    """

    def __init__(self, folder: pathlib.Path, at: int | None = None) -> None:
        self.folder, self.at = str(folder), at
        self.points = 0
        self.place: str | None = None
        # Of each frame: the last instruction and its place.
        self._last: dict[FrameType, tuple[str, int]] = {}

    def run(self, action: Callable[[], Any]) -> bool:
        """Runs an action; says whether it was interrupted."""
        tracer = sys.gettrace()
        # Python 3.12 traces opcodes only if a frame had asked for it before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._enter)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(tracer)
            self._last.clear()
        return False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        caller = frame.f_back
        if caller in self._last and frame.f_code.co_name not in _CALLED_BY_C:
            self._last[caller] = ("inlined", 0)
        if self.place is not None or not frame.f_code.co_filename.startswith(self.folder):
            return None
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            # Where C runs it, or closes it, an interrupt becomes a warning.
            return None
        # In this order: Python 3.13 heeds the second only where there is the first.
        frame.f_trace = self._step
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._last[frame] = ("RESUME", 0)
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        if event != "opcode" or self.place is not None:
            return self._step
        before, place = self._last[frame]
        self._last[frame] = (_read_names(frame.f_code)[frame.f_lasti], frame.f_lasti)
        if _is_looked_after(before, has_jumped=frame.f_lasti < place):
            if self.points == self.at:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self.points += 1
        return self._step


def step_through(
    folder: pathlib.Path, make: Callable[[], Callable[[], Any]], stride: int = 1
) -> Iterator[Stepper]:
    """Interrupts an action at each of its points in turn.

    Args:
        folder: of the files with the points.
        make: returns the action, each time with all that it changes made anew.
        stride: from one point to the next that is tried.

    Yields:
        After each interrupted action: where it was.
    """
    counter = Stepper(folder)
    assert not counter.run(make())
    assert counter.points > 2
    for number in range(0, counter.points, stride):
        stepper = Stepper(folder, number)
        if stepper.run(make()):
            yield stepper


def _is_looked_after(name: str, *, has_jumped: bool) -> bool:
    if "JUMP_BACKWARD" in name:
        return has_jumped and "NO_INTERRUPT" not in name
    return name == "RESUME" or (name.startswith("CALL") and not name.startswith("CALL_INTRINSIC"))


@functools.cache
def _read_names(code: CodeType) -> dict[int, str]:
    return {each.offset: each.opname for each in dis.get_instructions(code)}
