"""The benchmark of cold starts as a dry run, and what it refuses to report."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest

from tests.paths import ROOT
from tests.processes import run_copy

PATH = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
CHECK = """
import json, sys
import cold_start

filled, samples = json.loads(sys.argv[1])
try:
    cold_start.check_samples(filled, samples)
except cold_start.StartError as error:
    print(error)
"""

# The first start, which fills the cache and writes the file, is made as users make it.
DRY_RUN = """
import cold_start
from absl import app
from tests.benchmarks.copies import copy_later_starts
copy_later_starts()
app.run(cold_start.main)
"""


def test_dry_run_measures_every_side(tmp_path: pathlib.Path):
    options = ["--dry-run", "--case=decode", "--repeats=1", f"--output={tmp_path}"]
    options.append("--numerics=equivalent")
    ran = run_copy(["-c", DRY_RUN, *options], variables={"PYTHONPATH": PATH})
    assert ran.returncode == 0, ran.stderr
    document = json.loads((tmp_path / "cold_start_dry_run_equivalent.json").read_text())
    assert {"date", "command", "jax", "device", "processor"} <= document["run"].keys()
    (case,) = document["cases"].values()
    seconds = case["figures"]["seconds"]
    sides = ["first capture", "cache hit", "tg.load", "jax.jit", "jax.jit, warm cache"]
    assert list(seconds) == sides
    assert case["figures"]["load / first"] == seconds["tg.load"] / seconds["first capture"]
    assert case["figures"]["hit / first"] == seconds["cache hit"] / seconds["first capture"]
    (first,), (hit,) = case["samples"]["first capture"], case["samples"]["cache hit"]
    assert (first["hits"], first["stores"], hit["hits"], hit["stores"]) == (0, 2, 2, 0)
    # Both traces of each of two signatures; a capture moves the clocks while it traces again.
    assert 0 < hit["trace seconds"] < hit["seconds"]
    assert document["checks"] == []
    assert (tmp_path / "cold_start_dry_run_equivalent.md").read_text() in ran.stdout


def make_sample(**changes: Any) -> dict[str, Any]:
    return {"hits": 0, "stores": 1, "phases": {"trace": 1.0}, "digest": "a", **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"hits": 0}, "a start with a filled cache did not find all of its programs there"),
        ({"stores": 1}, "a start with a filled cache did not find all of its programs there"),
        ({"phases": {"compile": 0.1}}, "a start with a filled cache called XLA"),
        ({"digest": "b"}, "a cached or loaded program has other results than a first capture"),
    ],
)
def test_a_hit_that_is_none_is_not_reported(changes: dict[str, Any], reason: str):
    hit = make_sample(hits=1, stores=0) | changes
    samples = {"first capture": [make_sample()], "cache hit": [hit], "tg.load": []}
    given = json.dumps([make_sample(), samples])
    ran = run_copy(["-c", CHECK, given], variables={"PYTHONPATH": PATH})
    assert (ran.returncode, ran.stdout.strip()) == (0, reason), ran.stderr
