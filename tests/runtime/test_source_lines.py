"""Which line of a stack a message names: the user's own first, then the library's."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys

import jax
import numpy as np
import pytest

from tests.paths import ROOT
from tracegraph.runtime.source_lines import (
    Line,
    is_own_file,
    is_own_line,
    is_user_file,
    locate_lines,
    locate_stack,
    shorten_path,
)

LIBRARY = Line(
    "/venv/lib/python3.13/site-packages/optax/transforms/_c.py", 253, "a.<locals>.update"
)
OWN = Line(str(ROOT / "models" / "train.py"), 41, "fit.<locals>.step")
HIDDEN = [
    Line(jax.__file__, 1, "jit"),
    Line(np.__file__, 2, "sum"),
    Line(json.__file__, 3, "loads"),
    Line(str(ROOT / "tracegraph" / "decorator.py"), 4, "capture"),
    Line("<frozen importlib._bootstrap>", 5, "_load"),
    Line("/elsewhere/site-packages/jax/_src/core.py", 6, "bind"),
    Line("<string>", 7, "__create_fn__.<locals>.__init__"),
]


def test_the_user_s_own_line_comes_first_and_the_library_s_in_brackets():
    outer = Line(str(ROOT / "main.py"), 3, "main")
    assert locate_lines([HIDDEN[0], LIBRARY, HIDDEN[1], OWN, outer]) == (
        "models/train.py:41 in step (in optax/transforms/_c.py:253 `update`)"
    )


def test_a_library_that_calls_the_user_back_is_not_named():
    assert locate_lines([OWN, LIBRARY, Line(str(ROOT / "main.py"), 3, "main")]) == (
        "models/train.py:41 in step"
    )


def test_a_library_alone_is_named_from_its_package():
    assert locate_lines([*HIDDEN, LIBRARY]) == "optax/transforms/_c.py:253 in update"


@pytest.mark.parametrize("line", HIDDEN, ids=lambda line: line.function)
def test_hidden_lines_are_never_named(line: Line):
    assert locate_lines([line]) is None
    assert not is_own_line(line)


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/train.py",
        "train.py",
        "<ipython-input-3-9e1f>",
        "/tmp/ipykernel_77/1234567.py",
        "<stdin>",
        "<string>",
        "<doctest README.md[3]>",
        __file__,
    ],
)
def test_files_of_the_user_and_code_without_a_file(file: str):
    assert is_own_file(file)


def test_scripts_of_the_environment_and_libraries_are_not_the_user_s_own():
    script = str(pathlib.Path(sys.executable).parent / "pytest")
    assert not is_own_file(script)
    assert is_user_file(pytest.__file__)
    assert not is_own_file(pytest.__file__)


def test_paths_are_relative_to_the_working_directory_where_they_are_inside(tmp_path: pathlib.Path):
    file = tmp_path / "inner" / "a.py"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "inner")
    file.parent.mkdir()
    file.touch()
    assert shorten_path(str(file)) == str(file)
    with contextlib.chdir(tmp_path):
        assert shorten_path(str(file)) == str(pathlib.Path("inner", "a.py"))
        assert shorten_path("<stdin>") == "<stdin>"
        assert shorten_path("a.py") == "a.py"
    with contextlib.chdir(tmp_path / "inner"):
        assert shorten_path(str(link / "a.py")) == "a.py"


def test_a_working_directory_that_was_removed(tmp_path: pathlib.Path):
    gone = tmp_path / "gone"
    gone.mkdir()
    with contextlib.chdir(tmp_path):
        os.chdir(gone)
        gone.rmdir()
        assert shorten_path(__file__) == __file__


def test_the_stack_of_code_that_was_compiled_from_a_text():
    space = {"locate_stack": locate_stack, "sys": sys}
    exec(compile("where = locate_stack(sys._getframe())", "<ipython-input-1-0a>", "exec"), space)
    assert space["where"] == "<ipython-input-1-0a>:1 in <module>"
