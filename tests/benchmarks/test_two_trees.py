"""What two checkouts are compared by: the table, and the processors that are left out."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.paths import ROOT
from tests.processes import run_copy

TABLE = """
import json, two_trees
others = dict.fromkeys(two_trees.FIGURES, 1.0)
def make_run(side, **figures):
    return {"side": side, "figures": {"tiny": others | figures}}
totals = {"before": (10.0, 13.0, 16.0), "after": (15.0, 9.0, 15.0)}
runs = [make_run(side, total_us=total) for side, each in totals.items() for total in each]
whole = two_trees.format_table(runs).splitlines()
runs.append(make_run("after", host_us=None))
print(json.dumps([whole, two_trees.format_table(runs).splitlines()]))
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


def test_medians_and_the_least_of_both_sides() -> None:
    whole, partial = _evaluate(TABLE)
    assert "| tiny | total_us | 13.00 | 15.00 | 1.154 | 10.00 | 9.00 | 0.900 |" in whole
    # A figure that one run lacks has no line.
    assert [line for line in whole if "host_us" in line]
    assert not [line for line in partial if "host_us" in line]
    assert len(partial) == len(whole) - 1


def test_slow_processors_are_left_out() -> None:
    found, kept = _evaluate(CHOICE)
    assert found == [0, 1, 3]
    assert kept == [[0, 1, 3]]


def test_a_process_stays_on_the_processors_that_are_named() -> None:
    before, found, after = _evaluate(MEASURED)
    assert set(found) == set(after) <= set(before)
