"""The sweep over programs as a dry run; what it measures is not a matter of tests."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

from tests.paths import ROOT
from tests.processes import run_copy

CASES = ("gpt_2x128", "arrays.elementwise_chain", "flax_nnx.nnx_split_with_dropout")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return run_copy(arguments, variables={"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"})


def _evaluate(script: str) -> object:
    ran = _run("-c", script)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_dry_run_times_both_sides_of_each_program(tmp_path: pathlib.Path) -> None:
    script = str(ROOT / "benchmarks" / "numerics_sweep.py")
    choice = [f"--case={name}" for name in CASES]
    ran = _run(script, "--dry-run", "--workers=2", f"--output={tmp_path}", *choice)
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "numerics_sweep_gpu.json").read_text())
    assert (tuple(record["programs"]), record["timed"]) == (CASES, 3)
    for row in record["programs"].values():
        times = row["microseconds"]
        assert row["equivalent / xla"] == times["equivalent"] / times["xla"]
        assert row["difference"] < 1e-3
    ratios = {name: row["equivalent / xla"] for name, row in record["programs"].items()}
    assert record["slower"] == {name: ratio for name, ratio in ratios.items() if ratio > 1.05}


def test_the_sample_has_every_case_and_programs_of_every_file() -> None:
    found = _evaluate(
        "import json, numerics_sweep as sweep\n"
        "names = sweep.choose_names(is_dry=True, count=80)\n"
        "files = {each.partition('.')[0] for each in sweep.list_corpus()}\n"
        "print(json.dumps([len(set(names)), len(names), sorted(files), names]))"
    )
    assert isinstance(found, list)
    different, count, files, names = found
    assert different == count > 80
    assert {"2000_leaves", "gpt2_small_bf16", "gpt_12x128"} <= {*names}
    assert {*files} <= {each.partition(".")[0] for each in names}


def test_what_fails_is_a_row() -> None:
    script = (
        "import json, os, numerics_sweep as sweep\n"
        "if __name__ == '__main__':\n"
        "    wrong = sweep.sweep(['no such program'], 1, is_dry=True, rounds=1)\n"
        # With six arguments this raises in the worker, which then ends with status 1.
        "    sweep.work = os._exit\n"
        "    ended = sweep.sweep(['gpt_2x128'], 2, is_dry=True, rounds=1)\n"
        "    print(json.dumps([wrong, ended]))"
    )
    assert _evaluate(script) == [
        {"no such program": {"failed": "KeyError: 'no such program'"}},
        {"gpt_2x128": {"failed": "its worker ended"}},
    ]
