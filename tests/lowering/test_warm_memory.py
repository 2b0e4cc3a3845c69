"""Memory that was touched before comes without faults; only the system can count them."""

from __future__ import annotations

import json
import platform

import pytest

from tests.processes import run_python
from tracegraph.lowering.warm_memory import MOST_BYTES, warm_memory

COUNT_FAULTS = """
import json, resource, sys
from tracegraph.lowering.warm_memory import warm_memory

def count():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

warm_memory(int(sys.argv[1]))
before = count()
blocks = [b"x" * size for size in [1_000_000] * 40]
print(json.dumps(count() - before))
"""


def count_faults(nbytes: int) -> int:
    """Returns the page faults of taking 40 MB in a new process, so many bytes warm."""
    ran = run_python(["-c", COUNT_FAULTS, nbytes])
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other heaps keep other amounts")
def test_warm_memory_is_kept() -> None:
    cold, warm = count_faults(0), count_faults(1 << 40)
    assert cold > 5000
    assert warm < cold / 4


def test_no_more_is_touched_than_is_kept() -> None:
    assert warm_memory(0) == warm_memory(-1) == warm_memory(1000) == 0
    assert warm_memory(1 << 60) == MOST_BYTES
