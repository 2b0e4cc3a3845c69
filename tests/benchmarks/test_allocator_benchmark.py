"""The allocator benchmark runs and prints every row; what it measures is not a matter of tests."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

from tests.paths import ROOT
from tests.processes import run_copy

SMALL = ("--repeats=2", "--pairs=20")
NAMES = ["512 bytes, split", "8 MiB, split", "512 bytes, exact", "100 mixed sizes"]


def _run(start: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return run_copy([*start, *SMALL, *flags], variables={"PYTHONPATH": path})


def test_every_row_is_printed_and_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "figures.json"
    ran = _run([str(ROOT / "benchmarks" / "allocator.py")], f"--json={path}")
    assert ran.returncode == 0, ran.stderr
    assert [name for name in NAMES if name not in ran.stdout] == []
    document = json.loads(path.read_text())
    assert [figure["name"] for figure in document["figures"]] == NAMES
    for figure in document["figures"]:
        assert figure["limit_us"] == 8.0
        assert figure["tracegraph_us"] > 0
        assert figure["tg.memory_us"] > 0
    assert {"date", "jax", "python", "command", "device", "load"} <= document["run"].keys()


# The peers, played by another of our allocators: where they are, each row has their ratio.
PEERS = """
import allocator
from absl import app
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.providers.host import HostProvider
make_sides = allocator.make_sides
def make_more():
    peer = CachingAllocator(HostProvider())
    count = lambda: peer.statistics.num_device_alloc
    return {**make_sides(), "torch": allocator.Side(peer.allocate, peer.free, count)}
allocator.make_sides, allocator.read_version = make_more, lambda name: "1.0"
app.run(allocator.main)
"""


def test_each_peer_has_a_time_and_a_ratio(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "figures.json"
    ran = _run(["-c", PEERS], f"--json={path}")
    assert ran.returncode == 0, ran.stderr
    assert "to torch" in ran.stdout
    document = json.loads(path.read_text())
    assert document["run"]["torch"] == "1.0"
    for figure in document["figures"]:
        assert figure["ratio_to_torch"] == figure["tracegraph_us"] / figure["torch_us"]


# A side that obtains memory from its device at each call.
MISSES = """
import itertools, allocator
from absl import app
counter = itertools.count()
make_sides = allocator.make_sides
def make_missing():
    return {**make_sides(), "cupy": allocator.Side(lambda n: n, id, counter.__next__)}
allocator.make_sides, allocator.read_version = make_missing, lambda name: "1.0"
app.run(allocator.main)
"""


def test_calls_that_miss_stop_the_benchmark() -> None:
    ran = _run(["-c", MISSES])
    assert ran.returncode == 1
    assert "512 bytes, split: not only hits, cupy asked the device for memory" in ran.stderr
