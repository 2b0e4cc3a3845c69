"""A small sample of JAX's harnesses in this process; ``python -m tests.gpu`` runs a large one."""

import pytest

from tests.conformance.results import Outcome
from tests.gpu import harness_report, harness_runner

CASES = 40


@pytest.mark.usefixtures("gpu")
def test_a_sample_of_harnesses_equals_its_executables():
    # A seed of its own, so that these are not the first cases of the large sample.
    cases = harness_runner.choose_cases(CASES, seed=1)
    results = [harness_runner.run_case(case) for case in cases]
    text = harness_report.format_markdown(results, "python -m pytest tests/gpu", "this GPU")
    bad = {Outcome.DIFFERING, Outcome.ERROR}
    assert not [result for result in results if result.outcome in bad], text
    passed = [result for result in results if result.outcome is Outcome.PASSED]
    assert len(passed) >= CASES // 2, text
