"""A fixed sample of JAX's harnesses through capture and replay, and faults that must be caught."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conformance import compare, harnesses, report, runner
from tests.conformance.results import Outcome, Result
from tests.processes import run_copy
from tracegraph.runtime.errors import CaptureError, ReplayError, UnsupportedError

SAMPLE_CASES = 360
PARTS = 5


@pytest.fixture(scope="module")
def cases() -> tuple[harnesses.Case, ...]:
    """Every case that JAX implements on the CPU."""
    return harnesses.load_cases()


# Parts, so that two workers can share them.
@pytest.mark.parametrize("part", range(PARTS))
def test_sample_equals_jit_bit_for_bit(part: int, cases: tuple[harnesses.Case, ...]) -> None:
    drawn = harnesses.sample_cases(cases, SAMPLE_CASES, seed=0)[part::PARTS]
    sample = list(runner.run_cases(drawn))
    text = report.format_report(sample)
    assert len(report.select_counted(sample)) >= 0.98 * len(drawn), text
    assert report.passed_share(sample) >= 0.99, text
    assert report.is_acceptable(sample), text
    for result in report.select(sample, Outcome.REFUSED):
        assert result.rule, result
        assert result.reason, result
    assert sum(result.has_two_inputs for result in sample) >= 0.9 * len(drawn)


def test_sample_is_fixed_and_covers_all_groups(cases: tuple[harnesses.Case, ...]) -> None:
    drawn = harnesses.sample_cases(cases, SAMPLE_CASES, seed=0)
    assert drawn == harnesses.sample_cases(cases, SAMPLE_CASES, seed=0)
    assert drawn != harnesses.sample_cases(cases, SAMPLE_CASES, seed=1)
    assert len({case.name for case in drawn}) == SAMPLE_CASES
    assert {case.group for case in drawn} == {case.group for case in cases}
    assert harnesses.sample_cases(cases, 10**6, seed=0) == cases


def _make_case(
    function: Callable[..., Any] = lambda x: x * 2, arguments: list[Any] | None = None
) -> harnesses.Case:
    def make_arguments(seed: int) -> list[Any]:
        if arguments is not None:
            return list(arguments)
        return [np.random.RandomState(seed).rand(4, 64).astype(np.float32)]

    return harnesses.Case("planted", "planted_case", function, make_arguments)


def _flip_one_bit(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        host = np.array(jax.jit(function)(*arguments))
        host.reshape(-1).view(np.uint8)[8] ^= 1
        return jnp.asarray(host)

    return call


def _perturb(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: jax.jit(function)(*arguments) + np.float32(1)


def _return_first_result(function: Callable[..., Any]) -> Callable[..., Any]:
    kept: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not kept:
            kept.append(jax.jit(function)(*arguments))
        return kept[0]

    return call


def _overwrite_earlier_results(function: Callable[..., Any]) -> Callable[..., Any]:
    # A buffer aligned for XLA, so that the returned arrays share its memory.
    raw = np.empty(4 * 64 * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    buffer = raw[start : start + 4 * 64 * 4].view(np.float32).reshape(4, 64)

    def call(*arguments: Any) -> Any:
        buffer[:] = np.asarray(jax.jit(function)(*arguments))
        return jax.dlpack.from_dlpack(buffer)

    return call


def _drop_weak_type(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: jax.jit(lambda: jnp.ones((), jnp.float32))()


def _fail_with(error: Exception) -> runner.MakeCallable:
    def make_callable(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            raise error

        return call

    return make_callable


@pytest.mark.parametrize(
    ("make_callable", "outcome", "reason"),
    [
        (jax.jit, Outcome.PASSED, ""),
        (_flip_one_bit, Outcome.TOLERANCE, "capture: result 0: 1 of 256 elements"),
        (_perturb, Outcome.DIFFERING, "capture: result 0: 256 of 256"),
        (_return_first_result, Outcome.DIFFERING, "replay of another input: result 0"),
        (_overwrite_earlier_results, Outcome.DIFFERING, "capture: result 0"),
        (lambda _: lambda *_: None, Outcome.DIFFERING, "capture: tree: wanted"),
        (_fail_with(ValueError("no luck")), Outcome.ERROR, "ValueError: no luck"),
    ],
)
def test_planted_faults_are_classed(
    make_callable: runner.MakeCallable, outcome: Outcome, reason: str
) -> None:
    result = runner.run_case(_make_case(), make_callable)
    assert result.outcome is outcome, result
    assert result.reason.startswith(reason)


def test_one_flipped_bit_of_an_integer_differs() -> None:
    case = _make_case(arguments=[np.arange(12, dtype=np.int32)])
    result = runner.run_case(case, _flip_one_bit)
    assert result.outcome is Outcome.DIFFERING
    assert result.reason == "capture: result 0: 1 of 12 elements of int32 differ, max abs 1"


def test_lost_weak_type_differs() -> None:
    case = _make_case(lambda: jax.lax.full_like(1.0, 1.0), arguments=[])
    result = runner.run_case(case, _drop_weak_type)
    assert result.reason == "capture: result 0: wanted float32[] weak, got float32[]"


@pytest.mark.parametrize("kind", [CaptureError, UnsupportedError])
def test_refusal_keeps_its_rule(kind: type[CaptureError] | type[UnsupportedError]) -> None:
    error = kind("`f` prints", where="a.py:3", why="no replay", fix="do not", anchor="callback")
    result = runner.run_case(_make_case(), _fail_with(error))
    assert result.outcome is Outcome.REFUSED
    assert result.rule == f"{kind.__name__} callback"
    assert result.reason == f"{kind.__name__}: `f` prints"


def test_other_error_of_tracegraph_is_no_refusal() -> None:
    error = ReplayError("`f` is busy", where="a.py:3", why="one", fix="wait", anchor="replay")
    assert runner.run_case(_make_case(), _fail_with(error)).outcome is Outcome.ERROR


def test_case_that_jit_cannot_run_is_not_counted() -> None:
    result = runner.run_case(_make_case(lambda x: float(x)), jax.jit)
    assert result.outcome is Outcome.JIT_FAILS
    assert result.reason
    assert report.select_counted([result]) == []


def test_second_input_of_written_down_arrays_differs() -> None:
    case = _make_case(arguments=[np.arange(3), np.array([5], np.int32), np.array([True])])
    first, second, has_two_inputs = harnesses.make_two_inputs(case)
    assert has_two_inputs
    assert [a.tolist() for a in first] == [[0, 1, 2], [5], [True]]
    assert [a.tolist() for a in second] == [[2, 0, 1], [6], [True]]
    assert [a.dtype for a in first] == [a.dtype for a in second]
    assert not harnesses.make_two_inputs(_make_case(arguments=[]))[2]


def _compare(expected: Any, actual: Any) -> compare.Difference | None:
    return compare.find_difference(expected, actual, lambda dtype: 1e-6)


_NAN_PAYLOAD = np.array([0x7FC00001], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (jnp.float32([np.nan]), jnp.asarray(_NAN_PAYLOAD)),
        (jnp.complex64([complex(np.nan, 1)]), jnp.complex64([complex(np.nan, 1)])),
        (jnp.bfloat16([1.5, np.nan]), jnp.bfloat16([1.5, np.nan])),
        (jnp.zeros((0, 3)), jnp.zeros((0, 3))),
        (jax.random.key(1), jax.random.key(1)),
        ({"a": jnp.int4(3)}, {"a": jnp.int4(3)}),
    ],
)
def test_equal_results_have_no_difference(expected: Any, actual: Any) -> None:
    assert _compare(expected, actual) is None


@pytest.mark.parametrize(
    ("expected", "actual", "text"),
    [
        (jnp.float32([0.0]), jnp.float32([-0.0]), "1 of 1 elements of float32 differ, max abs 0"),
        (jnp.float32([1.0]), jnp.float32([1 + 2**-23]), "max ulp 1"),
        (jnp.float32([1e-45]), jnp.float32([-1e-45]), "max ulp 2"),
        (jnp.float32([1.0]), jnp.float32([np.nan]), "max abs nan"),
        (jnp.complex64([complex(np.nan, 1)]), jnp.complex64([complex(np.nan, 2)]), "1 of 1"),
        (jnp.bfloat16([1.0]), jnp.bfloat16([2.0]), "max abs 1, max ulp 128"),
        (jnp.zeros(2), jnp.zeros((2, 1)), "wanted float32[2], got float32[2, 1]"),
        (jnp.zeros(2), jnp.zeros(2, jnp.int32), "wanted float32[2], got int32[2]"),
        (jnp.zeros(2), np.zeros(2, np.float32), "wanted a jax.Array, got ndarray"),
        ((jnp.zeros(2),), [jnp.zeros(2)], "tree: wanted"),
        (jax.random.key(1), jax.random.key(2), "1 of 2 elements of uint32 differ"),
        (jnp.bool_([True]), jnp.bool_([False]), "1 of 1 elements of bool differ, max abs 1"),
    ],
)
def test_differences_are_found(expected: Any, actual: Any, text: str) -> None:
    difference = _compare(expected, actual)
    assert difference is not None
    assert text in str(difference)


@pytest.mark.parametrize(
    ("actual", "is_within"),
    [([1 + 2**-22, 0.0], True), ([1.1, 0.0], False), ([1.0, np.nan], False), ([np.inf, 0], False)],
)
def test_tolerance(actual: list[float], is_within: bool) -> None:
    difference = _compare(jnp.float32([1.0, 0.0]), jnp.float32(actual))
    assert difference is not None
    assert difference.is_within_tolerance is is_within


def test_worst_leaf_is_the_one_that_is_reported() -> None:
    expected = [jnp.float32([1.0]), jnp.float32([1.0])]
    difference = _compare(expected, [jnp.float32([1 + 2**-23]), jnp.float32([3.0])])
    assert difference is not None
    assert str(difference).startswith("result 1")
    assert not difference.is_within_tolerance


def _make_result(outcome: Outcome, rule: str = "", reason: str = "") -> Result:
    return Result("group", f"case_{outcome.value}", outcome, rule, reason)


def test_report_names_what_differs_and_counts_refusals(tmp_path: pathlib.Path) -> None:
    results = [
        *[_make_result(Outcome.PASSED)] * 2,
        _make_result(Outcome.REFUSED, "CaptureError callback", "CaptureError: calls back"),
        _make_result(Outcome.DIFFERING, reason="result 0: 1 of 2 elements differ"),
        _make_result(Outcome.JIT_FAILS, reason="TypeError: no"),
    ]
    text = report.format_report(results)
    assert "total         4         2         0         1         1         0" in text
    assert "refused 1 times: CaptureError callback: CaptureError: calls back" in text
    assert "differing: case_differing: result 0: 1 of 2 elements differ" in text
    assert "jax.jit itself fails: 1" in text
    assert "equal bit for bit: 50.00 %" in text
    assert not report.is_acceptable(results)
    assert report.is_acceptable(results[:3])
    report.write_json(tmp_path / "figures.json", results)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["cases"] == 4
    assert figures["counts"]["refused"] == 1
    assert [entry["outcome"] for entry in figures["not_passed"]][1] == "differing"


def _run_command(start: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    return run_copy([*start, *flags])


def test_command_line_prints_the_table(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "figures.json"
    flags = ["--group=neg", "--sample=2", "--subject=jit", f"--json={path}"]
    ran = _run_command(["-m", "tests.conformance"], *flags)
    assert ran.returncode == 0, ran.stderr
    assert "total         2         2" in ran.stdout
    assert json.loads(path.read_text())["versions"]["jax"] == jax.__version__


def test_command_line_exits_with_1_when_one_differs() -> None:
    faulty = (
        "from absl import app; from tests.conformance import __main__, runner;"
        "runner.jit_again = lambda function: lambda *arguments: None; app.run(__main__.main)"
    )
    ran = _run_command(["-c", faulty], "--group=neg,sin", "--subject=jit", "--fail-fast")
    assert ran.returncode == 1
    assert ran.stdout.count("differing: ") == 1
    assert "tree: wanted" in ran.stdout


def test_command_line_names_an_unknown_group() -> None:
    ran = _run_command(["-m", "tests.conformance"], "--group=nothing")
    assert ran.returncode == 1
    assert "no such group: nothing" in ran.stdout + ran.stderr
