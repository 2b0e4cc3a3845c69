"""What two checkouts are compared by: the table, and the processors that are left out."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from tests.paths import ROOT
from tests.processes import run_copy, run_python

# Two pairs of three rounds: the processor of the second round is slow.
TABLE = """
import json, two_trees
def make_rounds(*totals):
    sides = [{"total_us": total, "host_us": 5.0, "launch_us": 2.0} for total in totals]
    return [{"before": before, "after": after} for before, after in zip(sides[::2], sides[1::2])]
def make_pair(*totals):
    rounds = make_rounds(*totals)
    figures = {each: two_trees.summarize(rounds, each) for each in two_trees.FIGURES}
    return {**figures, "pool_bytes": {"before": 1024, "after": 512}}
pairs = [make_pair(10.0, 11.0, 20.0, 22.0, 10.0, 30.0), make_pair(10.0, 9.0, 20.0, 18.0, 10.0, 9.0)]
print(json.dumps([pairs[0]["total_us"], two_trees.format_table({"tiny": pairs}).splitlines()]))
"""
# Four processors, of which the third is slow.
CHOICE = """
import json, os, machine
kept = []
os.sched_getaffinity = lambda _: {0, 1, 2, 3}
os.sched_setaffinity = lambda _, numbers: kept.append([*numbers])
found = machine.keep_to_fast_processors({0: 1.0, 1: 1.2, 2: 1.6, 3: 1.1}.__getitem__)
print(json.dumps([found, kept]))
"""
MEASURED = """
import json, os, machine
before = os.sched_getaffinity(0)
found = machine.keep_to_fast_processors()
print(json.dumps([[*before], found, [*os.sched_getaffinity(0)]]))
"""


def _evaluate(script: str) -> Any:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    ran = run_copy(["-c", script], variables={"PYTHONPATH": path})
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_ratio_is_that_of_blocks_of_one_round() -> None:
    summary, table = _evaluate(TABLE)
    assert summary["before"] == 10.0
    assert summary["after"] == 22.0
    # Not 2.2: in its round, the other side was as slow.
    assert summary["ratio"] == 1.1
    assert "| tiny | total_us | 10.00 | 15.50 | 1.000 | 1.100, 0.900 |" in table
    assert "| tiny | pool_bytes | 1,024 | 512 | | |" in table


def _make_checkout(folder: pathlib.Path) -> pathlib.Path:
    """Returns a checkout like this one, but for a larger tiny case."""
    (folder / "benchmarks").mkdir(parents=True)
    for name in ("tracegraph", "lowering", "runtime"):
        (folder / name).symlink_to(ROOT / name)
    for path in (ROOT / "benchmarks").glob("*.py"):
        (folder / "benchmarks" / path.name).symlink_to(path)
    models = folder / "benchmarks" / "gpu_models.py"
    text = models.read_text()
    models.unlink()
    models.write_text(text.replace('PointwiseShape("double", 5)', 'PointwiseShape("double", 500)'))
    return folder


def test_two_checkouts_are_captured_and_timed(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "figures.json"
    before = _make_checkout(tmp_path / "before")
    arguments = ["--dry-run", "--pairs=1", "--rounds=2", "--case=tiny", f"--output={file}"]
    ran = run_python([ROOT / "benchmarks/two_trees.py", f"--before={before}", *arguments])
    assert ran.returncode == 0, ran.stderr
    (pair,) = json.loads(file.read_text())["cases"]["tiny"]
    assert pair["pool_bytes"] == {"before": 4096, "after": 512}
    assert min(pair["total_us"]["before"], pair["total_us"]["after"]) > 0


def test_slow_processors_are_left_out() -> None:
    found, kept = _evaluate(CHOICE)
    assert found == [0, 1, 3]
    assert kept == [[0, 1, 3]]


def test_a_process_stays_on_the_processors_that_are_named() -> None:
    before, found, after = _evaluate(MEASURED)
    assert set(found) == set(after) <= set(before)
