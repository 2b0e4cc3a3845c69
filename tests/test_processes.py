"""Copies of a process that has imported JAX run what a fresh interpreter would run."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from tests import processes
from tests.processes import run_copies, run_copy, run_program, run_python

SHOW = """
import os, sys
import tests.paths
print(__name__, sys.argv[1:], os.getcwd(), os.environ["FIRST"], sys.stdin.read() == "")
print(repr(sys.path[0]))
sys.modules["__main__"].sys.exit(len(sys.argv))
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_copy_is_as_a_fresh_process(kind: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "show_itself.py"
    script.write_text(SHOW)
    start = {"-c": ["-c", SHOW], "-m": ["-m", "show_itself"], "script": [script]}[kind]
    variables = {"FIRST": "1"}
    if kind == "-m":
        variables["PYTHONPATH"] = f"{tmp_path}:{processes.ROOT}"
    fresh = run_python([*start, "a", 2], folder=tmp_path, variables=variables)
    copy = run_copy([*start, "a", 2], folder=tmp_path, variables=variables)
    assert copy.returncode == fresh.returncode == 3, fresh.stderr + copy.stderr
    assert copy.stdout == fresh.stdout


def test_a_copy_knows_nothing_of_the_one_before() -> None:
    assert run_program("import sys; sys.left = 1; print(hasattr(sys, 'before'))") == "False\n"
    assert run_program("import sys; print(hasattr(sys, 'left'))") == "False\n"


def test_a_copy_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    run_program("")
    with monkeypatch.context() as patch:
        patch.setattr(processes, "TIMEOUT_S", 0.2)
        with pytest.raises(subprocess.TimeoutExpired):
            run_program("import time; time.sleep(600)")
        with pytest.raises(subprocess.TimeoutExpired):
            run_copies([["-c", "import time; time.sleep(600)"] for _ in range(2)])
    assert run_program("print(1)") == "1\n"


MEET = """
import pathlib, sys, time
own, other = map(pathlib.Path, sys.argv[1:])
own.touch()
while not other.exists():
    time.sleep(0.01)
sys.exit(f"{own.name} met {other.name}")
"""


def test_copies_run_at_the_same_time(tmp_path: pathlib.Path) -> None:
    pairs = [(tmp_path / "a", tmp_path / "b"), (tmp_path / "b", tmp_path / "a")]
    done = run_copies([["-c", MEET, *pair] for pair in pairs])
    assert [(each.returncode, each.stderr) for each in done] == [(1, "a met b\n"), (1, "b met a\n")]


def test_warnings_and_signals_end_a_copy() -> None:
    assert "UserWarning: mine" in run_copy(["-c", "import warnings; warnings.warn('mine')"]).stderr
    assert run_copy(["-c", "import os; os.kill(os.getpid(), 9)"]).returncode == -9
