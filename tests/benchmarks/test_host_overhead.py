"""The benchmark runs and prints every row; what it measures is not a matter of tests."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

from tests.paths import ROOT
from tests.processes import run_copy

SMALL = ("--leaves=1", "--leaves=3", "--leaf-size=4", "--repeats=2", "--calls=2", "--warmup=2")
NAMES = ["tiny, two inputs", "tiny, same input", "1 donated leaves", "3 donated leaves"]


def _run(start: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return run_copy([*start, *SMALL, *flags], variables={"PYTHONPATH": path})


@pytest.mark.parametrize("flags", [(), ("--profile",)])
def test_every_row_is_printed_and_written(flags: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "figures.json"
    ran = _run([str(ROOT / "benchmarks" / "host_overhead.py")], f"--json={path}", *flags)
    assert ran.returncode == 0, ran.stderr
    assert [name for name in NAMES if name not in ran.stdout] == []
    document = json.loads(path.read_text())
    assert [figure["name"] for figure in document["figures"]] == NAMES
    assert {"date", "jax", "python", "command"} <= document["run"].keys()


# A wrap of the right signature whose results are not those of `jax.jit`.
FAULT = """
import jax, tracegraph as tg
def capture(function, *, verify, donate_argnums=()):
    call = jax.jit(function)
    return lambda *arguments: jax.tree.map(lambda leaf: leaf + 1, call(*arguments))
tg.capture = capture
import host_overhead
from absl import app
app.run(host_overhead.main)
"""


def test_results_that_differ_stop_the_benchmark() -> None:
    ran = _run(["-c", FAULT])
    assert ran.returncode == 1
    assert "tiny, two inputs: results differ from jax.jit after 2 calls" in ran.stderr


# Functions of this script take the place of ours: one grows with the leaves, one does not.
GROWTH = """
import call_profile

call_profile.OUR_FOLDERS = ("<string>",)
def visit(leaf): return leaf
def call(leaf_count):
    for leaf in range(leaf_count): visit(leaf)
def loop(leaf_count):
    for leaf in range(leaf_count): pass
few, many = (call_profile.count_calls(lambda n=n: call(n)) for n in (10, 100))
assert many.ours - few.ours == 90, (few, many)
few, many = (call_profile.count_calls(lambda n=n: loop(n)) for n in (10, 100))
assert many.ours == few.ours, (few, many)
assert many.bytecodes - few.bytecodes >= 180, (few, many)
"""


def test_profile_sees_growth() -> None:
    ran = _run(["-c", GROWTH])
    assert ran.returncode == 0, ran.stderr
