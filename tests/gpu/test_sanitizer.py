"""NVIDIA's checking tool over small graphs: no access out of bounds, no race in shared memory."""

import pathlib
import shutil
import site

import pytest

from tests.gpu import small_cases
from tests.gpu.subprocesses import run_python

pytestmark = pytest.mark.usefixtures("gpu")
FOUND_FAULTS = 86
LIMIT_S = "150"
# The tool says so where the GPU is lent to a virtual machine that hides its debugging interface.
REFUSALS = ("Device not supported", "Unable to find injection library", "not permitted")
# One allocation of the driver per array: then an access behind an array's end shows.
ALLOCATE_APART = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


def find_tool():
    """Returns the path of ``compute-sanitizer``, or None."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    places = [pathlib.Path("/usr/local"), *map(pathlib.Path, site.getsitepackages())]
    patterns = ("cuda*/bin/compute-sanitizer", "nvidia/*/bin/compute-sanitizer")
    hits = [hit for place in places for pattern in patterns for hit in place.glob(pattern)]
    return str(sorted(hits)[-1]) if hits else None


def test_small_cases_by_themselves():
    for name in small_cases.CASES:
        small_cases.run_case(name)


# Alone: beside other processes on the GPU the tool has hung, and has lost the context.
@pytest.mark.usefixtures("alone_on_gpu")
@pytest.mark.parametrize(
    ("tool", "names"),
    [("memcheck", tuple(small_cases.CASES)), ("racecheck", ("softmax", "state", "streams"))],
)
def test_small_cases_under_the_tool(tool, names):
    path = find_tool()
    if path is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit, which is not installed")
    # Trying out kernels takes most of the time under the tool and is not ours.
    variables = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    options: list[str] = []
    if tool == "memcheck":
        variables |= ALLOCATE_APART
        # A look for a function that an older driver does not have is no fault.
        options += ["--report-api-errors", "no"]
    done = run_python(
        ["-m", "tests.gpu.small_cases", *names],
        # Ends the tool's children with it, which would hold the pipes.
        before=[
            "timeout",
            "--kill-after=5",
            LIMIT_S,
            path,
            "--tool",
            tool,
            *options,
            "--error-exitcode",
            str(FOUND_FAULTS),
        ],
        variables=variables,
    )
    text = f"{done.stdout}\n{done.stderr}"
    refusal = next((each for each in REFUSALS if each in text), None)
    if refusal is not None:
        pytest.skip(f"compute-sanitizer refuses this machine: {refusal}")
    assert f"{len(names)} cases equal" in done.stdout, text[-4000:]
    assert done.returncode == 0, text[-4000:]
