"""The sweep over programs as a dry run; what it measures is not a matter of tests."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from typing import Any

import pytest

from tests.paths import ROOT
from tests.processes import run_copy

CASES = ("gpt_2x128", "arrays.elementwise_chain", "flax_nnx.nnx_split_with_dropout")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return run_copy(arguments, variables={"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"})


# Workers that are copies need not import all libraries again; those of `CHOICE_AND_FAILURES` do.
DRY_RUN = """
import numerics_sweep
from absl import app
from tests.benchmarks.copies import copy_workers
copy_workers(numerics_sweep)
app.run(numerics_sweep.main)
"""


def test_a_dry_run_times_both_sides_of_each_program(tmp_path: pathlib.Path) -> None:
    choice = [f"--case={name}" for name in CASES]
    ran = _run("-c", DRY_RUN, "--dry-run", "--workers=2", f"--output={tmp_path}", *choice)
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "numerics_sweep_gpu.json").read_text())
    assert (tuple(record["programs"]), record["timed"]) == (CASES, 3)
    for row in record["programs"].values():
        times = row["microseconds"]
        assert row["equivalent / xla"] == times["equivalent"] / times["xla"]
        assert row["difference"] < 1e-3
        assert set(row["used"]) <= set(row["found"])
        assert row["diverged"] is False
    ratios = {name: row["equivalent / xla"] for name, row in record["programs"].items()}
    assert record["slower"] == {name: ratio for name, ratio in ratios.items() if ratio > 1.05}
    unused = [name for name, row in record["programs"].items() if not row["used"]]
    assert (record["nothing used in"], record["replaced something"]) == (unused, 3 - len(unused))


# One process for both: importing takes longest. With six arguments `os._exit` raises in the worker,
# which then ends with status 1.
CHOICE_AND_FAILURES = """
import json, os, numerics, numpy, numerics_sweep as sweep
def step(state):
    return state * 1e30, state + 1
if __name__ == '__main__':
    case = numerics.NumericsCase('grows', step, numpy.float32(1), (), 1)
    diverged = sweep.measure(sweep.capture(case), 1)
    wrong = sweep.sweep(['no such program'], 1, is_dry=True, rounds=1)
    sweep.work = os._exit
    ended = sweep.sweep(['gpt_2x128'], 2, is_dry=True, rounds=1)
    names = sweep.choose_names(is_dry=True, count=80)
    files = {each.partition('.')[0] for each in sweep.list_corpus()}
    turns = iter([{'equivalent / xla': 1.2}, {'failed': 'once'}, {'equivalent / xla': 0.9}])
    sweep.sweep = lambda names, *args, **options: {names[0]: next(turns)}
    alone = sweep.repeat_alone('one', rounds=1)
    choice = [len(set(names)), len(names), sorted(files), names]
    print(json.dumps([choice, [wrong, ended], sweep.format_row(diverged), alone]))
"""


@pytest.fixture(scope="module")
def choice_and_failures() -> Any:
    ran = _run("-c", CHOICE_AND_FAILURES)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_the_sample_has_every_case_and_programs_of_every_file(choice_and_failures: Any) -> None:
    different, count, files, names = choice_and_failures[0]
    assert different == count > 80
    assert {"2000_leaves", "gpt2_small_bf16", "gpt_12x128"} <= {*names}
    assert {*files} <= {each.partition(".")[0] for each in names}


def test_what_becomes_infinite_is_named(choice_and_failures: Any) -> None:
    assert choice_and_failures[2].endswith("; diverged")


def test_the_median_of_three_captures_counts(choice_and_failures: Any) -> None:
    assert choice_and_failures[3] == {"equivalent / xla": 1.2, "alone": [0.9, 1.2, None]}


def test_what_fails_is_a_row(choice_and_failures: Any) -> None:
    assert choice_and_failures[1] == [
        {"no such program": {"failed": "KeyError: 'no such program'"}},
        {"gpt_2x128": {"failed": "its worker ended"}},
    ]
