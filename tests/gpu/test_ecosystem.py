"""The programs of the corpus on a GPU: equal bit for bit, or refused as the table says."""

from __future__ import annotations

import functools

import pytest

from tests.ecosystem import expectations
from tests.ecosystem.runner import FILES, find_missing
from tests.ecosystem.shares import run_in_processes
from tests.gpu.subprocesses import run_python

pytestmark = pytest.mark.usefixtures("gpu")
TABLE = expectations.read_table()
# Most of their time is XLA's on the host, in one thread each.
PROCESSES = 6
# To make candidates of each matmul and try them out would be most of it.
LIBRARY = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}


@pytest.mark.parametrize("file", FILES)
def test_the_libraries_are_installed(file):
    missing = find_missing(file)
    if missing:
        pytest.skip(f"{file} needs {', '.join(missing)}, which is not installed")


def test_each_program_becomes_what_the_table_says():
    names = [name for name in TABLE if not find_missing(name.partition(".")[0])]
    found = run_in_processes(names, PROCESSES, functools.partial(run_python, variables=LIBRARY))
    assert sorted(found) == sorted(names)
    problems = {
        name: problem
        for name, outcomes in found.items()
        if (problem := expectations.find_problem(TABLE[name].get("gpu", ""), outcomes))
    }
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())
