"""The programs of the corpus on a GPU: equal bit for bit, or refused as the table says."""

from __future__ import annotations

import pytest

from tests.ecosystem import expectations
from tests.ecosystem.runner import find_missing, load_programs, run_program

pytestmark = pytest.mark.usefixtures("gpu")
TABLE = expectations.read_table()


@pytest.mark.parametrize("name", TABLE)
def test_program(name):
    file = name.partition(".")[0]
    missing = find_missing(file)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which is not installed")
    outcomes = run_program(load_programs(file)[name])
    problem = expectations.find_problem(TABLE[name].get("gpu", ""), outcomes)
    assert not problem, f"{name}: {problem}"
