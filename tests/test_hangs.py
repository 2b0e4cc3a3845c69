"""A test that hangs ends the run."""

from __future__ import annotations

import pathlib
import textwrap

from tests.paths import ROOT
from tests.processes import run_copy

HANGS = """
import threading

def test_before():
    assert True

def test_that_hangs():
    threading.Event().wait(60)
"""
RUN = """
import sys
import pytest
from tests import conftest
conftest.HANG_S, conftest.WATCH_AGAIN_S = 1.0, 0.0
sys.exit(pytest.main(["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", sys.argv[1]]))
"""


def test_a_run_that_hangs_ends_with_what_each_thread_was_doing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "test_hang.py"
    path.write_text(textwrap.dedent(HANGS))
    ran = run_copy(["-c", RUN, str(path)], variables={"PYTHONPATH": str(ROOT)})
    assert ran.returncode == 1, ran.stderr
    assert "Timeout (0:00:01)!" in ran.stderr
    assert "in test_that_hangs" in ran.stderr
