"""Names lines of code in messages: the user's own first, the library's that was called after it.

A line is the user's own unless its file is installed (``site-packages``), Python's, JAX's, NumPy's
or ours. Code that has no file, as that of a notebook or of ``exec``, is the user's own, too.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sysconfig
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import NamedTuple

import jax
import jaxlib
import numpy as np

from tracegraph.runtime.own_folders import OWN_FOLDERS

UNKNOWN_PLACE = "<unknown>"
_SITE_FOLDERS = ("site-packages", "dist-packages")
# Python writes the methods of a dataclass itself; these names come from libraries that do so, too.
_GENERATED = ("<frozen ", "<attrs generated", "<__array_function__", "<@beartype")
_GENERATED_SCOPE = "__create_fn__."


class Line(NamedTuple):
    """One frame of a stack or of a traceback.

    Attributes:
        file: as Python names it: a path, or a text such as ``<stdin>``.
        number: of the line, from 1.
        function: qualified name of the function.
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{shorten_path(self.file)}:{self.number} in {_name_function(self.function)}"


def locate_lines(lines: Iterable[Line]) -> str | None:
    """Returns where a stack comes from, as messages name it, or None if all of it is hidden.

    Args:
        lines: from the innermost frame outwards. The frames of JAX, NumPy, Python and tracegraph
            are left out.

    Returns:
        The user's own innermost line, and in brackets a library's line that is further inside.

    Example:
        >>> library = Line("/venv/site-packages/optax/losses.py", 5, "huber_loss")
        >>> locate_lines([library, Line("train.py", 41, "step")])
        'train.py:41 in step (in optax/losses.py:5 `huber_loss`)'
    """
    library: Line | None = None
    for line in lines:
        if is_own_line(line):
            return str(line) if library is None else f"{line} ({_name_library_line(library)})"
        if library is None and is_user_file(line.file) and _GENERATED_SCOPE not in line.function:
            library = line
    return None if library is None else str(library)


def locate_stack(frame: FrameType | None) -> str:
    """Returns where a frame was called from, as `locate_lines` names it."""
    return locate_lines(walk_frames(frame)) or UNKNOWN_PLACE


def walk_frames(frame: FrameType | None) -> Iterator[Line]:
    """Yields the lines of a stack from a frame outwards."""
    while frame is not None:
        yield make_line(frame.f_code, frame.f_lineno)
        frame = frame.f_back


def make_line(code: CodeType, number: int) -> Line:
    """Returns a line of a function's code."""
    return Line(code.co_filename, number, code.co_qualname)


def is_own_line(line: Line) -> bool:
    """True for a line that the user wrote."""
    return is_own_file(line.file) and _GENERATED_SCOPE not in line.function


@functools.lru_cache(maxsize=4096)
def is_own_file(file: str) -> bool:
    """True for a file that the user wrote, or code that has no file.

    Example:
        >>> [is_own_file(file) for file in ("train.py", "<ipython-input-1-0a>", os.__file__)]
        [True, True, False]
    """
    return is_user_file(file) and not (
        _is_installed(file) or file.startswith(sysconfig.get_path("scripts") + os.sep)
    )


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """True for a file that is not a part of JAX, NumPy, tracegraph or Python itself."""
    if file.startswith((*_GENERATED, *_HIDDEN_FOLDERS)) or any(p in file for p in _HIDDEN_PACKAGES):
        return False
    return _is_installed(file) or not file.startswith(_STANDARD_FOLDERS)


def shorten_path(file: str) -> str:
    """Returns a path from its package's root, from the working directory, or as it is.

    Example:
        >>> shorten_path(str(pathlib.Path("models/gpt.py").absolute()))
        'models/gpt.py'
        >>> shorten_path("/venv/lib/python3.13/site-packages/optax/losses.py")
        'optax/losses.py'
    """
    try:
        return _shorten_path(file, pathlib.Path.cwd())
    except OSError:  # the directory has been removed
        return _leave_site_folder(file) or file


@functools.lru_cache(maxsize=4096)
def _shorten_path(file: str, here: pathlib.Path) -> str:
    short = _leave_site_folder(file)
    if short:
        return short
    path = pathlib.Path(file)
    absolute = (path, path.resolve()) if path.is_absolute() else ()
    inside = (str(each.relative_to(here)) for each in absolute if here in each.parents)
    return next(inside, file)


def _leave_site_folder(file: str) -> str:
    """Returns the path of an installed file from its package's root; of others an empty text."""
    for folder in _SITE_FOLDERS:
        _, found, rest = file.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return rest
    return ""


def _name_library_line(line: Line) -> str:
    return f"in {shorten_path(line.file)}:{line.number} `{_name_function(line.function)}`"


def _name_function(qualified: str) -> str:
    return qualified.rpartition("<locals>.")[2]


def _is_installed(file: str) -> bool:
    return any(f"{os.sep}{folder}{os.sep}" in file for folder in _SITE_FOLDERS)


def _find_folders(*modules: ModuleType) -> tuple[str, ...]:
    files = [pathlib.Path(module.__file__) for module in modules if module.__file__]
    folders = {path.parent for file in files for path in (file, file.resolve())}
    return tuple(f"{folder}{os.sep}" for folder in folders)


_HIDDEN_FOLDERS = (*_find_folders(jax, jaxlib, np), *OWN_FOLDERS)
# A program that was compiled elsewhere names the files of that place.
_HIDDEN_PACKAGES = tuple(
    f"{os.sep}{folder}{os.sep}{package}{os.sep}"
    for folder in _SITE_FOLDERS
    for package in ("jax", "jaxlib", "numpy", "tracegraph")
)
_STANDARD_FOLDERS = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
