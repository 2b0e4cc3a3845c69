"""Finds the user's own line in a traceback or on the stack."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import jax

from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.own_folders import OWN_FOLDERS
from tracegraph.runtime.source_lines import (
    is_user_file,
    locate_lines,
    locate_stack,
    make_line,
    walk_frames,
)

P = ParamSpec("P")
R = TypeVar("R")


def locate_error(error: BaseException, function: Callable[..., Any]) -> str:
    """Returns the user's innermost line in an error's traceback, as `locate_lines` names it.

    Args:
        error: an exception that was raised while ``function`` was traced, caught in our own code.
        function: where it starts stands in for an error that has not reached the user's code.
    """
    entries = list(traceback.walk_tb(error.__traceback__))
    lines = [make_line(frame.f_code, line) for frame, line in reversed(entries)]
    if not any(is_user_file(line.file) for line in lines):
        return locate_function(function)
    # The traceback begins in our own code: what called it is on the stack.
    return locate_lines([*lines, *walk_frames(sys._getframe(1))]) or locate_function(function)


def locate_function(function: Callable[..., Any]) -> str:
    """Returns where a function starts, as ``train.py:38 in step``, or its name alone."""
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    plain = inspect.unwrap(plain)
    if not hasattr(plain, "__code__"):
        plain = getattr(plain, "__func__", None) or type(plain).__call__
    code = getattr(plain, "__code__", None)
    if code is None:
        return getattr(function, "__name__", type(function).__name__)
    return str(make_line(code, code.co_firstlineno))


def locate_caller() -> str:
    """Returns the user's innermost line on this thread's stack, as `locate_lines` names it."""
    return locate_stack(sys._getframe(1))


def hides_own_frames(method: Callable[P, R]) -> Callable[P, R]:
    """Removes tracegraph's own frames from the errors that a method raises."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    return call


def hide_own_frames(error: BaseException) -> None:
    """Removes the frames of tracegraph from an error's traceback; use a bare `raise` afterwards.

    An error that starts in our own code, and is not a `TracegraphError`, keeps them: it is a bug in
    tracegraph. ``JAX_TRACEBACK_FILTERING=off`` keeps all frames.

    Args:
        error: caught in tracegraph's outermost function.
    """
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    is_fault = bool(entries) and _is_own(entries[-1]) and not isinstance(error, TracegraphError)
    if is_fault:
        return
    kept: TracebackType | None = None
    for entry in reversed(entries):
        if not _is_own(entry):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = kept


def _is_own(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(OWN_FOLDERS)
