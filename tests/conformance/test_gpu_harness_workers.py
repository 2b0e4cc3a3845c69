"""The machinery of the harnesses on a GPU, tried without one: workers that die, table, refusals."""

import io
import json
import sys
import textwrap

import numpy as np
import pytest

from tests.conformance.harnesses import Case
from tests.conformance.results import Outcome, Result
from tests.gpu import harness_report, harness_runner, harness_workers
from tests.gpu.reference import Likeness, Verdict
from tests.processes import run_python
from tracegraph.runtime.errors import UnsupportedError

NAMES = [f"case{index}" for index in range(10)]
# Runs cases as a worker does; what a case is called says what becomes of it.
WORKER = textwrap.dedent("""
    import os, sys
    from tests.conformance.results import Outcome, Result
    from tests.gpu.harness_workers import is_last, write_begun, write_done
    for name in sys.argv[1:]:
        write_begun(name, sys.stdout)
        print("text of another process")
        if name.startswith("crash"):
            os._exit(7)
        outcome = Outcome.ERROR if name.startswith("fault") else Outcome.PASSED
        write_done(Result("group", name, outcome), sys.stdout)
        if outcome is Outcome.ERROR:
            break
    """)


def run(names, count):
    results, commands = [], []

    def make_command(share):
        commands.append(list(share))
        return [sys.executable, "-c", WORKER, *share]

    harness_workers.run_workers(names, make_command, count, results.append)
    return {result.name: result for result in results}, commands


def test_every_case_has_one_result():
    results, commands = run(NAMES, 2)
    assert sorted(results) == sorted(NAMES)
    assert {result.outcome for result in results.values()} == {Outcome.PASSED}
    assert sorted(map(len, commands)) == [5, 5]


def test_a_worker_that_dies_takes_one_case_with_it():
    results, commands = run(["a", "crash", "b", "fault", "c"], 1)
    assert [len(share) for share in commands] == [5, 3, 1]
    outcomes = {name: result.outcome for name, result in results.items()}
    assert outcomes == {
        "a": Outcome.PASSED,
        "crash": Outcome.ERROR,
        "b": Outcome.PASSED,
        "fault": Outcome.ERROR,
        "c": Outcome.PASSED,
    }
    assert results["crash"].reason == "worker ended with status 7"


def test_a_worker_that_dies_before_its_first_case_cannot_run_for_ever():
    results = []
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    harness_workers.run_workers(["a", "b"], lambda share: command, 1, results.append)
    assert [result.reason for result in results] == ["worker ended with status 3"] * 2


def test_a_worker_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(harness_workers, "SECONDS_PER_CASE", 0.2)
    results = []
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    harness_workers.run_workers(["a"], lambda share: command, 1, results.append)
    assert [result.outcome for result in results] == [Outcome.ERROR]


def test_results_survive_the_pipe():
    result = Result("g", "n", Outcome.REFUSED, "rule", "reason", False)
    file = io.StringIO()
    harness_workers.write_done(result, file)
    assert harness_workers.read_result(json.loads(file.getvalue())) == result
    assert harness_workers.is_last(Result("g", "n", Outcome.ERROR))
    assert not harness_workers.is_last(result)


def test_the_table_counts_outcomes_and_kinds_of_refusals():
    results = [
        Result("g", "a", Outcome.PASSED),
        Result("g", "b", Outcome.PASSED, has_two_inputs=False),
        Result("g", "c", Outcome.REFUSED, "UnsupportedError unsupported: fft", "r"),
        Result("g", "d", Outcome.REFUSED, "UnsupportedError unsupported: fft", "r"),
        Result("g", "e", Outcome.TOLERANCE, reason="varies | from run to run"),
        Result("g", "f", Outcome.DIFFERING, reason="3 bits"),
        Result("g", "h", Outcome.JIT_FAILS, reason="not implemented"),
    ]
    text = harness_report.format_markdown(results, "command", "a GPU")
    for line in (
        "| equal bit for bit | 2 |",
        "| refused | 2 |",
        "| differing | 1 |",
        "| all | 6 |",
        "| UnsupportedError unsupported: fft | 2 | c |",
        "- `e`: varies \\| from run to run",
        "- `f`: 3 bits",
        "- `h`: not implemented",
        "Without a second input of other values: 1.",
    ):
        assert line in text.splitlines(), text


def test_refusals_of_one_kind_are_counted_together():
    def refuse(name, kind):
        what = f"`{name}` has work that cannot be lowered: {kind} `{name}.3`"
        return UnsupportedError(what, where="w", why="y", fix="f", anchor="unsupported")

    one, two, other = refuse("f", "fft"), refuse("g", "fft"), refuse("f", "while")
    classify = harness_runner.classify_refusal
    assert classify(one) == classify(two)
    assert classify(one) != classify(other)


def test_every_process_draws_the_same_sample():
    program = (
        "from tests.gpu.harness_runner import choose_cases\n"
        "print(' '.join(case.name for case in choose_cases(50, 3)))"
    )
    done = run_python(["-c", program], variables={"JAX_PLATFORMS": "cpu"})
    names = [case.name for case in harness_runner.choose_cases(50, 3)]
    assert done.stdout.split() == names, done.stderr


def make_case(function):
    return Case("group", "name", function, lambda seed: [np.full(3, seed, np.float32)])


@pytest.mark.parametrize("likeness", Likeness)
def test_the_worst_verdict_is_the_outcome(likeness):
    verdicts = iter([Verdict(Likeness.EQUAL), Verdict(likeness, "because")])
    result = harness_runner.run_case(make_case(lambda x: x * 2), lambda *_: next(verdicts))
    wanted = {
        Likeness.EQUAL: (Outcome.PASSED, ""),
        Likeness.CLOSE: (Outcome.TOLERANCE, "because"),
        Likeness.DIFFERING: (Outcome.DIFFERING, "because"),
    }
    assert (result.outcome, result.reason) == wanted[likeness]


def test_refusals_errors_and_faults_of_jit_are_told_apart():
    def judge(captured, result, args):
        raise OSError("broken")

    def fail(x):
        raise ValueError("not implemented")

    refused = harness_runner.run_case(make_case(lambda x: x[x > 1]), judge)
    assert (refused.outcome, refused.rule[:12]) == (Outcome.REFUSED, "CaptureError")
    broken = harness_runner.run_case(make_case(lambda x: x), judge)
    assert (broken.outcome, broken.reason) == (Outcome.ERROR, "OSError: broken")
    assert harness_runner.run_case(make_case(fail), judge).outcome is Outcome.JIT_FAILS
