"""The benchmarks of raw graphs run and print every row; no test depends on what they measure."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

from tests.paths import ROOT
from tests.processes import run_copy

BODIES = ["mixed jnp", "jnp.add", "lax.add", "jnp.where", "jnp.add, all held"]
CASES = ["1 node", "10 nodes", "100 nodes", "10 nodes, 20 inputs", "10 nodes, copy_ before"]


def _run(start: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return run_copy([*start, *flags], variables={"PYTHONPATH": path})


def test_recording_is_compared_with_tracing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "figures.json"
    script = str(ROOT / "benchmarks" / "recording.py")
    ran = _run([script], "--ops=5", "--repeats=2", f"--json={path}")
    assert ran.returncode == 0, ran.stderr
    document = json.loads(path.read_text())
    assert [figure["name"] for figure in document["figures"]] == BODIES
    for figure in document["figures"]:
        assert figure["ratio"] == figure["recording_ms"] / figure["tracing_ms"]
        assert f"| {figure['name']} |" in ran.stdout
    assert {"date", "jax", "python", "command", "load", "ops"} <= document["run"].keys()


# PyTorch's process, played by a captured function: where it answers, each case has a ratio.
PEER = """
import jax.numpy as jnp, raw_graph
from absl import app
from gpu_timing import time_each, time_total
class Peer:
    def ask(self, method, name, *arguments):
        if method == "prepare_chain":
            (size, factor, nodes, inputs, is_filled), = arguments
            if is_filled:
                raise raw_graph.PeerError("this one fails")
            case = raw_graph.ChainCase(name, nodes, inputs)
            self.side = raw_graph.make_sides(case)[raw_graph.CAPTURED]
        return getattr(self.side, method, lambda *_: None)(*arguments)
    def describe(self): return {"torch device": "none"}
    def close(self): pass
raw_graph.TorchProcess = Peer
measure = raw_graph.measure_case
raw_graph.measure_case = lambda case, peer, rounds: measure(case, Peer(), rounds)
app.run(raw_graph.main)
"""


def test_each_case_of_raw_graphs_is_timed_and_compared_with_a_peer(tmp_path: pathlib.Path) -> None:
    ran = _run(["-c", PEER], "--dry-run", f"--output={tmp_path}")
    assert ran.returncode == 0, ran.stderr
    document = json.loads((tmp_path / "raw_graph_dry_run.json").read_text())
    assert [case["name"] for case in document["cases"]] == CASES
    for case in document["cases"][:4]:
        sides = case["sides"]
        assert set(sides) == {"tg.CUDAGraph", "tg.capture", "torch.cuda.CUDAGraph"}
        mine, peer = sides["tg.CUDAGraph"], sides["torch.cuda.CUDAGraph"]
        assert case["ratio"] == mine["host_us"] / peer["host_us"]
    last = document["cases"][4]
    assert last["notes"] == {"torch.cuda.CUDAGraph": "this one fails"}
    assert "ratio" not in last
    page = (tmp_path / "raw_graph_dry_run.md").read_text()
    assert page in ran.stdout
    assert all(f"| {case} | tg.CUDAGraph |" in page for case in CASES)
    assert "10 nodes, copy_ before, torch.cuda.CUDAGraph: this one fails" in page
    assert [figure["name"] for figure in document["recording"]] == BODIES
