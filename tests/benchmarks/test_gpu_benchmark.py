"""The GPU benchmark as a dry run, and its verdicts; what it measures is not a matter of tests."""

from __future__ import annotations

import json
import os
import pathlib
import pstats
import subprocess
from typing import Any

import pytest

from tests.paths import ROOT
from tests.processes import run_copy

CASES = ("tiny", "gpt_2x128", "mlp")
CHOICE = [f"--case={name}" for name in CASES]


def _run(start: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return run_copy([*start, *flags], variables={"PYTHONPATH": path})


def _evaluate(script: str) -> Any:
    """Runs a script next to the benchmark's own modules and returns what it prints as JSON."""
    ran = _run(["-c", script])
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_dry_run_writes_every_case(tmp_path: pathlib.Path) -> None:
    script = str(ROOT / "benchmarks" / "gpu_replay.py")
    ran = _run([script], "--dry-run", f"--output={tmp_path}", *CHOICE)
    assert ran.returncode == 0, ran.stderr
    document = json.loads((tmp_path / "gpu_replay_dry_run.json").read_text())
    assert {"date", "command", "jax", "torch", "device", "driver"} <= document["run"].keys()
    assert [case["name"] for case in document["cases"]] == list(CASES)
    for case in document["cases"]:
        assert case["refusal"] is None
        assert set(case["sides"]) == {"tg.capture", "jax.jit"}
        assert {"total / jax.jit", "host / jax.jit", "pool / needed bytes"} <= set(case["figures"])
        assert {"nodes", "pool_bytes", "temp_bytes", "calls_of_each_side"} <= set(case["capture"])
        jit, mine = case["sides"]["jax.jit"], case["sides"]["tg.capture"]
        assert case["figures"]["total / jax.jit"] == mine["total_us"] / jit["total_us"]
    assert document["checks"] == []
    page = (tmp_path / "gpu_replay_dry_run.md").read_text()
    assert page in ran.stdout
    for case in document["cases"]:
        assert f"| {case['name']} | tg.capture |" in page


def test_whole_programs_are_compared_and_timed(tmp_path: pathlib.Path) -> None:
    script = str(ROOT / "benchmarks" / "whole_programs.py")
    variants = ("--wide", "--equivalent")
    ran = _run([script], "--dry-run", *variants, f"--output={tmp_path}", "--case=decode")
    assert ran.returncode == 0, ran.stderr
    document = json.loads((tmp_path / "whole_programs_dry_run.json").read_text())
    (case,) = document["cases"]
    assert (case["name"], case["refusal"]) == ("decode", None)
    captured = {"tg.capture", "tg.capture, without lanes", "tg.capture, equivalent"}
    assert set(case["sides"]) == {*captured, "jax.jit"}
    assert {"nodes", "kinds", "pool_bytes", "seconds", "temp_bytes"} <= case["capture"].keys()
    assert {"total / jax.jit", "beyond / compile", "pool / needed bytes"} <= case["figures"].keys()
    assert (tmp_path / "whole_programs_dry_run.md").read_text() in ran.stdout


def test_the_longest_chain_is_timed_beside_the_whole(tmp_path: pathlib.Path) -> None:
    script = str(ROOT / "benchmarks" / "longest_chain.py")
    ran = _run([script], "--dry-run", f"--output={tmp_path}", "--case=gpt_2x128", "--rounds=1")
    assert ran.returncode == 0, ran.stderr
    document = json.loads((tmp_path / "longest_chain_dry_run.json").read_text())
    (case,) = document["cases"].values()
    # On the host a graph is one node, and so is its chain.
    assert (case["nodes"], case["chain_nodes"], case["value_nodes"]) == (1, 1, 1)
    assert all(time > 0 for name, time in case.items() if name.endswith("_us"))
    assert (tmp_path / "longest_chain_dry_run.md").read_text() in ran.stdout


def test_a_chain_keeps_its_nodes_and_starts_them_early_where_they_wait() -> None:
    stage = _evaluate(
        "import json, longest_chain\n"
        "from tracegraph.runtime.definition.graph import ArenaSize, GraphDefinition, Stage\n"
        "from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, KernelNode\n"
        "kernel = lambda name, waits: KernelNode(name, None, None, (), (), waits)\n"
        "copy = CopyNode('d', BufferUse('x', 0, 4), BufferUse('y', 0, 4))\n"
        "a, b, c, e = (kernel(name, name != 'a') for name in 'abce')\n"
        "stage = Stage((a, b, c, copy, e), ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4)))\n"
        "whole = GraphDefinition('f', ArenaSize(0, 0), (), (stage,), (), ())\n"
        "(chain,) = longest_chain.cut_chain(whole, (0, 2, 3, 4)).stages\n"
        "names = ''.join(node.name for node in chain.nodes)\n"
        "print(json.dumps([names, chain.edges, sorted(chain.programmatic)]))\n"
    )
    assert stage == ["acde", [[0, 1], [1, 2], [2, 3]], [[0, 1]]]


def test_a_chain_of_values_follows_what_was_written_last() -> None:
    found = _evaluate(
        "import json, longest_chain\n"
        "from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode\n"
        "from tracegraph.runtime.definition.nodes import KernelNode\n"
        "use = lambda name, offset=0: BufferUse(name, offset, 4)\n"
        "nodes = (\n"
        "    FillNode('long', use('a')),\n"
        "    FillNode('written over', use('a')),\n"
        "    CopyNode('other bytes', use('x'), use('b', 4)),\n"
        "    CopyNode('reads', use('a'), use('b')),\n"
        "    KernelNode('in place', None, None, (use('b'),), (True,)),\n"
        "    CopyNode('no reader', use('y'), use('a')),\n"
        ")\n"
        "print(json.dumps([longest_chain.find_value_chain(nodes, times)\n"
        "    for times in ([1] * 6, [9] + [1] * 5, [1, 1, 9, 1, 1, 1], [1] * 5 + [9])]))\n"
    )
    assert found == [[1, 3, 4], [0], [2], [5]]


def test_a_chain_with_a_loop_is_refused() -> None:
    refusal = _evaluate(
        "import json, longest_chain\n"
        "from tracegraph.runtime.definition.graph import ArenaSize, GraphDefinition, Stage\n"
        "from tracegraph.runtime.definition.graph_nodes import ConditionalNode\n"
        "loop = ConditionalNode.__new__(ConditionalNode)\n"
        "object.__setattr__(loop, 'name', 'while.1')\n"
        "stage = Stage(('a', loop), ((0, 1),))\n"
        "whole = GraphDefinition('f', ArenaSize(0, 0), (), (stage,), (), ())\n"
        "try:\n"
        "    longest_chain.cut_chain(whole, (0, 1))\n"
        "except ValueError as error:\n"
        "    print(json.dumps(str(error)))\n"
    )
    assert refusal == "`while.1` is on the chain, and needs its values"


def test_two_streams_are_compared_with_one(tmp_path: pathlib.Path) -> None:
    script = str(ROOT / "benchmarks" / "two_streams.py")
    ran = _run([script], "--dry-run", f"--output={tmp_path}")
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "two_streams_dry_run.json").read_text())
    assert record["branches"] == [1, 2]
    assert list(record["microseconds"]) == [
        "tg.capture, 1 stream",
        "tg.CUDAGraph, 1 stream",
        "tg.capture, 2 streams",
        "tg.CUDAGraph, 2 streams",
    ]
    one, _, two, _ = record["microseconds"].values()
    assert record["ratios"]["tg.capture"] == two / one
    assert (tmp_path / "two_streams_dry_run.md").read_text() in ran.stdout


TWO_STREAMS = """
import json, numpy as np, two_streams
record = {{"is_dry": False, "size": 8, "length": 3, "branches": [1, 2], "microseconds": {{}},
           "date": "", "command": "", "device": "", "jax": "", "torch": None,
           "ratios": {{"tg.capture": {ratio}, "torch.cuda.graph": 0.9}}}}
print(json.dumps([line for line in two_streams.format_report(record).splitlines()[-2:]]))
side = two_streams.Side(lambda: 0, lambda: 0, lambda: (np.ones((2, 2)), np.zeros((2, 2))))
two_streams.check_results({{"odd": side}}, [np.ones((2, 2))] * 2 + [np.eye(2)] * 2, 3)
"""


@pytest.mark.parametrize(("ratio", "verdict"), [(0.7, "met"), (0.71, "missed")])
def test_two_streams_are_judged_and_a_wrong_result_ends_the_run(ratio: float, verdict: str) -> None:
    ran = _run(["-c", TWO_STREAMS.format(ratio=ratio)])
    assert ran.returncode == 1
    assert "a result of odd is off by 1 in norm" in ran.stderr
    mine, torch = json.loads(ran.stdout)
    assert mine == f"| tg.capture | {ratio:.2f} | 0.7 | {verdict} |"
    assert torch == "| torch.cuda.graph | 0.90 |  |  |"


# The second call's process is a copy of this one.
FIRST_CALLS = """
import first_call
from absl import app
from tests.benchmarks.copies import copy_later_starts
copy_later_starts()
app.run(first_call.main)
"""


def test_first_calls_are_made_in_processes_of_their_own(tmp_path: pathlib.Path) -> None:
    choice = ["--case=tiny", "--repeats=1", f"--profile={tmp_path}"]
    ran = _run(["-c", FIRST_CALLS], "--dry-run", f"--output={tmp_path}", *choice)
    assert ran.returncode == 0, ran.stderr
    document = json.loads((tmp_path / "first_call_dry_run.json").read_text())
    case = document["cases"]["tiny"]
    phases = case["phases"]
    assert {"trace", "check", "compile", "lower", "instantiate", "verify"} == phases.keys()
    beyond = sum(phases.values()) - phases["trace"] - phases["compile"]
    assert case["beyond"] == pytest.approx(beyond)
    assert case["beyond / compile"] == case["beyond"] / phases["compile"]
    assert sum(phases.values()) < case["first call"]["tg.capture"]
    ratio = case["first call"]["tg.capture"] / case["first call"]["jax.jit"]
    assert case["first call / jax.jit"] == ratio
    page = (tmp_path / "first_call_dry_run.md").read_text()
    assert page in ran.stdout
    assert "| tiny |" in page
    profiled = {each.stem for each in tmp_path.glob("*.pstats")}
    assert profiled == {"tiny_tg.capture", "tiny_jax.jit"}
    functions = pstats.Stats(str(tmp_path / "tiny_tg.capture.pstats")).get_stats_profile()
    assert "lower_request" in functions.func_profiles


@pytest.mark.parametrize("name", ["gpu_replay", "first_call", "two_streams"])
def test_without_a_gpu_it_says_so(name: str) -> None:
    ran = _run([str(ROOT / "benchmarks" / f"{name}.py")])
    assert ran.returncode == 1
    assert "JAX computes on cpu, not on a GPU; try --dry-run" in ran.stderr


def test_unknown_case_is_named(tmp_path: pathlib.Path) -> None:
    script = str(ROOT / "benchmarks" / "gpu_replay.py")
    ran = _run([script], "--dry-run", f"--output={tmp_path}", "--case=huge")
    assert ran.returncode == 1
    assert "no case huge; there are tiny, one_in_one_out" in ran.stdout + ran.stderr


# A capture of which every result is off by one.
FAULT = """
import jax, tracegraph as tg
real = tg.capture
def capture(function, **options):
    def shift(*arguments):
        return jax.tree.map(lambda leaf: leaf + 1, function(*arguments))
    return real(shift, **options)
tg.capture = capture
import gpu_replay
from absl import app
app.run(gpu_replay.main)
"""


def test_results_that_differ_refuse_the_case(tmp_path: pathlib.Path) -> None:
    ran = _run(["-c", FAULT], "--dry-run", f"--output={tmp_path}", "--case=tiny")
    assert ran.returncode == 1
    document = json.loads((tmp_path / "gpu_replay_dry_run.json").read_text())
    (case,) = document["cases"]
    assert case["refusal"].startswith("result differs from jax.jit by 2.24 in norm")
    assert case["sides"] == {}
    assert "tiny, refused: result differs" in ran.stdout


# Two sides that count differently.
UNEQUAL = """
import gpu_replay, gpu_sides
gpu_sides.JaxSide.count_calls = lambda side: id(side)
from absl import app
app.run(gpu_replay.main)
"""


def test_chains_of_different_length_stop_the_benchmark(tmp_path: pathlib.Path) -> None:
    ran = _run(["-c", UNEQUAL], "--dry-run", f"--output={tmp_path}", "--case=tiny")
    assert ran.returncode == 1
    assert "the sides of tiny made different numbers of calls" in ran.stderr


DIFFERENCES = """
import json, numpy as np
from gpu_models import make_cases
from gpu_replay import compare_values
from gpu_sides import find_difference
allowed = make_cases(is_dry=True)[2].tolerance
right = [("result[0]", np.ones(4, np.float32))]
def differ(*leaves):
    return find_difference(allowed, right, [("result[0]", leaf) for leaf in leaves])
print(json.dumps({
    "equal": differ(np.ones(4, np.float32)),
    "close": differ(np.full(4, 1.001, np.float32)),
    "far": differ(np.full(4, 1.01, np.float32)),
    "nan": differ(np.full(4, np.nan, np.float32)),
    "shape": differ(np.ones(5, np.float32)),
    "count": differ(np.ones(4, np.float32), np.ones(4, np.float32)),
    "losses": [compare_values([1.0, 2.0], got, 1e-3) for got in ([1.0, 2.0], [1.0, 2.1])],
}))
"""


def test_what_counts_as_a_difference() -> None:
    found = _evaluate(DIFFERENCES)
    assert found["equal"] is None
    assert found["close"] is None
    assert found["far"] == "result[0] differs from jax.jit by 0.02 in norm, not 0.01"
    assert found["nan"] is not None
    assert found["shape"] == "result[0] is float32[5], not float32[4]"
    assert found["count"] == "there are 2 results, not 1"
    assert found["losses"] == [None, "the first results are 1, 2.1; those of jax.jit are 1, 2"]


REPORT = """
import json
from gpu_report import CaseResult, SideFigures, check_limits, format_report
sides = {{"tg.capture": SideFigures({total}, 10.0, 12.0), "jax.jit": SideFigures(1000.0, 900.0),
          "torch sdpa fused": SideFigures(2000.0, 5.0, 4.0), "torch slow": SideFigures(9e9, 1.0)}}
capture = {{"nodes": 753, "pool_bytes": 1100, "argument_bytes": 600, "output_bytes": 600,
           "alias_bytes": 400, "temp_bytes": 150, "constant_bytes": 50,
           "seconds": {{"trace": 0.5, "compile": 20.0, "plan": 0.25}}}}
if not {has_seconds}: del capture["seconds"]
result = CaseResult("gpt_12x128", sides=sides, capture=capture)
rows = check_limits([result])
assert "| gpt_12x128 | total / jax.jit |" in format_report({{}}, [result])
print(json.dumps({{row["figure"]: [row["measured"], row["verdict"]] for row in rows}}))
"""


@pytest.mark.parametrize(("total", "verdict"), [(790.0, "met"), (810.0, "missed")])
def test_limits_are_judged(total: float, verdict: str) -> None:
    rows = _evaluate(REPORT.format(total=total, has_seconds=True))
    assert rows == {
        "launch_us": [12.0, "met"],
        "host_us": [10.0, "met"],
        "host / jax.jit": [10 / 900, "met"],
        "total / jax.jit": [total / 1000, verdict],
        # The best variant counts.
        "total / best torch": [total / 2000, "met"],
        "capture seconds": [0.75, "met"],
        # What is aliased is needed once.
        "pool / needed bytes": [1.1, "missed"],
    }


def test_a_figure_that_is_missing_is_never_met() -> None:
    rows = _evaluate(REPORT.format(total=790.0, has_seconds=False))
    assert rows["capture seconds"] == [None, "not measured"]


READERS = """
import json
import gpu_sides
def read(call):
    try:
        return call()
    except gpu_sides.MissingFigureError as error:
        return str(error)
class Silent: pass
class Telling:
    def timings(self): return {"trace": 1, "compile": 2}
class Odd:
    def timings(self): return {"trace": 1}
print(json.dumps([
    *(read(lambda: gpu_sides.read_capture_seconds(kind())) for kind in (Telling, Silent, Odd)),
    read(lambda: gpu_sides.find_launcher(print)),
]))
"""


def test_readers_of_a_captured_function_never_guess() -> None:
    told, silent, odd, launcher = _evaluate(READERS)
    assert told == {"trace": 1.0, "compile": 2.0}
    assert silent == "captured functions of this build have no `timings()`"
    assert odd == "`timings()` has no `compile`, only trace"
    assert launcher == "<built-in function print> has no graph yet"


# The two sides of the pipe, with a stand-in for the module that imports PyTorch.
PIPE = """
if __name__ == "__main__":
    import json, gpu_sides
    process = gpu_sides.TorchProcess()
    try:
        process.ask("describe")
    except gpu_sides.PeerError as error:
        print(json.dumps(str(error)))
    finally:
        process.close()
"""


def test_a_process_without_pytorch_is_reported(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "start.py"
    path.write_text(PIPE)
    # Whatever the environment has, `import torch` fails in the process.
    (tmp_path / "torch.py").write_text("raise ImportError('no PyTorch here')\n")
    ran = _run([str(path)])
    assert json.loads(ran.stdout) == "the PyTorch process has ended"
    assert "no PyTorch here" in ran.stderr


DECISION = """
import json
from copy_analysis import decide
def case(ratio, more=0): return {"ratio": ratio, "nodes": {"without": 137, "with": 126 + more}}
print(json.dumps([
    decide({"a": case(0.91), "b": case(1.0)})[0],
    decide({"a": case(0.91), "b": case(1.02)})[0],
    decide({"a": case(0.99), "b": case(1.0)})[0],
    decide({"a": case(0.91, 12), "b": case(1.0)})[0],
]))
"""


def test_the_rule_by_which_the_option_of_xla_is_set() -> None:
    assert _evaluate(DECISION) == [True, False, False, False]
