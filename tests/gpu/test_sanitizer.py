"""NVIDIA's checking tool over small graphs: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import pytest

from tests.gpu import checking_tool, small_cases

pytestmark = pytest.mark.usefixtures("gpu")
# The tool says so where the GPU is lent to a virtual machine that hides its debugging interface.
REFUSALS = ("Device not supported", "Unable to find injection library", "not permitted")


def test_small_cases_by_themselves() -> None:
    for name in small_cases.CASES:
        small_cases.run_case(name)


# Alone: beside other processes on the GPU the tool has hung, and has lost the context.
@pytest.mark.usefixtures("alone_on_gpu")
@pytest.mark.parametrize("tool", checking_tool.CASES)
def test_small_cases_under_the_tool(tool: str) -> None:
    path = checking_tool.find_tool()
    if path is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit, which is not installed")
    report = checking_tool.read_report(tool) or checking_tool.run_tool(path, tool)
    text = str(report["text"])
    refusal = next((each for each in REFUSALS if each in text), None)
    if refusal is not None:
        pytest.skip(f"compute-sanitizer refuses this machine: {refusal}")
    names = checking_tool.CASES[tool] or small_cases.CASES
    assert f"{len(names)} cases equal" in text, text[-4000:]
    assert report["status"] == 0, text[-4000:]
