"""Shared by the tests on a real GPU: where there is none, each of them skips and says why.

A test module requests it with ``pytestmark = pytest.mark.usefixtures("gpu")`` and computes nothing
while it is imported, so that collecting the folder costs other machines nothing.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable, Generator
from typing import Any

import jax
import pytest

from tests.gpu import checking_tool, device_memory, sharing
from tests.gpu.part_times import pytest_terminal_summary as pytest_terminal_summary
from tests.gpu.reference import UNTRIED
from tests.shared_programs import FOLDER, share_on_gpu
from tracegraph.lowering import compile_gpu

# Those that take over ten seconds.
LONG = (
    "test_the_random_traces",
    "test_each_program_becomes",
    "[gpt_",
    "[resnet18]",
    "[vit]",
    "[donated_update]",
    "test_g08_",
    "test_out_of_memory_and_what",
    "test_jax_as_the_provider",
    "test_three_modules_and_a_branch",
    "test_a_sum_that_xla_splits",
    "test_an_update_of_weights_is",
    "test_every_tiling_is_as",
    "test_tf32_changes_bits",
    "test_all_ways_in_one_step",
    "test_each_tiling_is_as_exact",
    "test_a_thousand_replays",
    "test_a_train_step_uses_them",
)
# One of the long ones records these.
WAITS_FOR_TRACES = "test_ours_does_what_torch_does"
TURNS = pytest.StashKey[sharing.Turns]()
BEGINS_ALONE = pytest.StashKey[bool]()
IS_SHARED = pytest.StashKey[bool]()
TOOLS = pytest.StashKey[subprocess.Popen[bytes] | None]()


def find_obstacle() -> str:
    """Returns why the tests cannot run in this process, or an empty text."""
    platform = jax.devices()[0].platform
    if platform != "gpu":
        return f"needs a GPU; JAX computes on {platform} here"
    for name in ("cuda", "cuda.bindings"):
        if importlib.util.find_spec(name) is None:
            return "needs the package cuda-bindings, which is not installed"
    return ""


@pytest.fixture(scope="session")
def turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The turns of this process on the GPU; each ends with the test in which it was taken."""
    taken = sharing.Turns(sharing.find_shared_folder(tmp_path_factory))
    request.config.stash[TURNS] = taken
    return taken


@pytest.fixture(scope="session")
def gpu(
    request: pytest.FixtureRequest,
    turns: sharing.Turns,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """The JAX device that the graphs are made for."""
    # JAX takes memory when it starts: not while a test of another process counts all bytes.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    turns.begin(worker, alone=request.config.stash[BEGINS_ALONE])
    if worker and FOLDER not in os.environ:
        share_on_gpu(sharing.find_shared_folder(tmp_path_factory) / "programs")
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    return jax.devices()[0]


@pytest.fixture
def two_gpus(gpu: Any) -> list[Any]:
    """Two GPUs, or a reason to skip."""
    gpus = jax.local_devices()
    if len(gpus) < 2:
        pytest.skip(f"needs two GPUs; there is {len(gpus)}")
    return gpus[:2]


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets XLA take its first algorithm for each matmul that is captured, see `UNTRIED`."""
    options = (*compile_gpu.FIRST_OPTIONS, *UNTRIED)
    monkeypatch.setattr(compile_gpu, "FIRST_OPTIONS", options)


@pytest.fixture
def alone_on_gpu() -> None:
    """Keeps the other workers off the GPU: for bytes of the whole GPU, and for what takes time."""


def is_alone(item: pytest.Item | None) -> bool:
    """True for a test that uses `alone_on_gpu`, and is not skipped for want of a second GPU."""
    names = getattr(item, "fixturenames", ())
    is_skipped = "two_gpus" in names and len(device_memory.list_total_bytes()) < 2
    return "alone_on_gpu" in names and not is_skipped


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Where there is a GPU, lets a run of this folder share it among several workers."""
    for total in device_memory.list_total_bytes()[:1]:
        config.stash[IS_SHARED] = sharing.choose_workers(config, os.environ, total)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Starts what has to be alone on the GPU, before the workers have imported all tests."""
    if session.config.stash.get(IS_SHARED, False):
        # As pytest-xdist does, whose workers have folders in this one.
        folder = session.config._tmp_path_factory.getbasetemp()  # pyright: ignore[reportAttributeAccessIssue]
        session.config.stash[TOOLS] = checking_tool.start_early(os.environ, folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the tools of a run that was cut off."""
    tools = config.stash.get(TOOLS, None)
    if tools is not None:
        tools.terminate()
        tools.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests that are alone on the GPU first, so that one worker has them all.

    The long ones come where the other workers begin: one that comes last keeps a worker alone.
    What waits for one of them comes last.
    """
    items.sort(key=lambda item: (not is_alone(item), WAITS_FOR_TRACES in item.nodeid))
    here = [item for item in items if "tests/gpu/" in item.nodeid]
    long = [item for item in here if any(name in item.nodeid for name in LONG)]
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = sharing.spread([item for item in items if item not in long], long, count)


@pytest.fixture(autouse=True)
def held_gpu(request: pytest.FixtureRequest, turns: sharing.Turns) -> None:
    """A turn on the GPU, alone for the tests that use `alone_on_gpu`."""
    turns.take(alone=is_alone(request.node))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Remembers whether the first test of this process is alone on the GPU."""
    item.config.stash.setdefault(BEGINS_ALONE, is_alone(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    """Ends the turn of a test when its fixtures are gone."""
    try:
        return (yield)
    finally:
        if TURNS in item.config.stash:
            item.config.stash[TURNS].end(keeps_alone=is_alone(nextitem))


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Leaves the collector as it is: what it no longer sees would hold memory of the GPU."""


@pytest.fixture
def assert_memory_returns() -> Callable[[Callable[[], None]], None]:
    """Fails unless a scenario leaves as many bytes in use as it found; its first run warms up."""

    def check(run: Callable[[], None]) -> None:
        run()
        before = device_memory.measure_used_bytes()
        run()
        assert device_memory.measure_used_bytes() == before

    return check
