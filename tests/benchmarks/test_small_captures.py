"""The benchmark of small captures as a dry run, and what it refuses to report."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

from tests.paths import ROOT
from tests.processes import run_copy


def _run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return run_copy(["-c", script, *flags], variables={"PYTHONPATH": path})


# The second side's process is a copy of this one.
DRY_RUN = """
import small_captures
from absl import app
from tests.benchmarks.copies import copy_later_starts
copy_later_starts()
app.run(small_captures.main)
"""


def test_each_program_is_compiled_and_then_found(tmp_path: pathlib.Path) -> None:
    choice = ["--case=multiply", "--captures=2"]
    ran = _run(DRY_RUN, "--dry-run", f"--output={tmp_path}", *choice)
    assert ran.returncode == 0, ran.stderr
    document = json.loads((tmp_path / "small_captures_dry_run.json").read_text())
    assert list(document["cases"]) == ["multiply"]
    case = document["cases"]["multiply"]
    sides = ["jax.jit", "tg.capture", "tg.capture, found"]
    assert list(case["medians"]) == list(case["samples"]) == sides
    assert all(len(samples) == 2 for samples in case["samples"].values())
    jit, compiled, found = case["medians"].values()
    assert list(jit) == ["first call"]
    assert set(compiled) - set(found) == {"compile"}
    for name in sides[1:]:
        ratio = case["medians"][name]["first call"] / jit["first call"]
        assert case["first call / jax.jit"][name] == ratio
    page = (tmp_path / "small_captures_dry_run.md").read_text()
    assert page in ran.stdout
    assert all(f"| multiply | {side} | " in page for side in sides)


# Without the kernel cache; then with a capture of which the result is off by one.
FAULTS = """
import os, sys, tempfile
import jax
import small_captures
import tracegraph as tg
from absl import flags
jax.config.update("jax_platforms", "cpu")
flags.FLAGS(["", "--dry-run", "--captures=1"])

def show_error():
    try:
        small_captures.measure_captures(small_captures.multiply)
    except small_captures.SmallCaptureError as error:
        print(error)

show_error()
os.environ["TRACEGRAPH_KERNEL_CACHE"] = "1"
capture = tg.capture
with tempfile.TemporaryDirectory() as folder:
    os.environ["TRACEGRAPH_KERNEL_CACHE_PATH"] = folder
    tg.capture = lambda function: capture(lambda *arrays: function(*arrays) + 1)
    show_error()
"""


def test_what_is_no_measurement_is_refused() -> None:
    ran = _run(FAULTS)
    assert ran.returncode == 0, ran.stderr
    not_found, differs = ran.stdout.splitlines()
    assert not_found == "a program that the kernel cache holds was compiled"
    assert differs.startswith("result differs from jax.jit by ")
