"""Finds the user's own line in a traceback or on the stack."""

from __future__ import annotations

import functools
import inspect
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

import jax
import jaxlib
import numpy as np

from tracegraph.runtime.errors import TracegraphError
from tracegraph.runtime.own_folders import OWN_FOLDERS

P = ParamSpec("P")
R = TypeVar("R")


def _find_folder(file: str | None) -> str:
    if file is None:
        raise ImportError("a module without a file has no folder")
    return str(pathlib.Path(file).resolve().parent) + "/"


_HIDDEN_FOLDERS = (
    *(_find_folder(module.__file__) for module in (jax, jaxlib, np)),
    *OWN_FOLDERS,
)
_SITE_FOLDERS = ("site-packages", "dist-packages")
_STANDARD_FOLDER = sysconfig.get_path("stdlib") + "/"


def locate_error(error: BaseException, function: Callable[..., Any]) -> str:
    """Returns the user's innermost line in an error's traceback, as ``train.py:41 in step``.

    Args:
        error: an exception that was raised while ``function`` was traced, caught in our own code.
        function: where it starts stands in for an error that has not reached the user's code.
    """
    lines = [
        name_line(frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_user_file(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else locate_function(function)


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
    return name_line(code, code.co_firstlineno)


def locate_caller() -> str:
    """Returns the user's innermost line on this thread's stack, as ``train.py:52 in main``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return name_line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return "<unknown>"


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


def is_user_file(filename: str) -> bool:
    """True for a file that is not a part of JAX, NumPy, tracegraph or Python itself."""
    if filename.startswith(("<frozen", *_HIDDEN_FOLDERS)):
        return False
    is_installed = any(folder in filename for folder in _SITE_FOLDERS)
    return is_installed or not filename.startswith(_STANDARD_FOLDER)


def name_line(code: CodeType, line: int) -> str:
    """Returns a line as our messages name it: file, line and function."""
    function = code.co_qualname.rpartition("<locals>.")[2]
    return f"{pathlib.Path(code.co_filename).name}:{line} in {function}"
