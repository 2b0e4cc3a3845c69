"""Shared by all tests: texts that are compared with files, and what the collector leaves out."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from tests.gpu.sharing import share_memory
from tests.paths import GOLDEN
from tests.shared_programs import finish_run, share_contexts, share_programs

HANG_S, WATCH_AGAIN_S = 600.0, 60.0
STANDARD_ERROR = pytest.StashKey[int]()
WATCHED_SINCE = pytest.StashKey[float]()

# Before anything imports JAX, or asks it for its devices.
share_programs(os.environ)
share_memory(os.environ)
# What a test captures is lowered by the code that it tests; tests of the cache turn it on.
os.environ.setdefault("TRACEGRAPH_KERNEL_CACHE", "0")

if importlib.util.find_spec("hypothesis"):
    # No deadline, the same examples in each run; `--hypothesis-profile default` searches on.
    importlib.import_module("hypothesis").settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*.txt anew")
    parser.addoption(
        "--kernel-cache", action="store_true", help="as users have it, in a folder for each test"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Opens the standard error as it was before pytest began to capture it."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        config.stash[STANDARD_ERROR] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[STANDARD_ERROR])


def watch_for_hangs(config: pytest.Config) -> None:
    """Ends a run that a test holds up for `HANG_S`, with what each thread was doing.

    Called before each test. It starts a watch once in `WATCH_AGAIN_S`, so a test has that much less
    than `HANG_S`; pytest's own watch starts a thread for each test.
    """
    now = time.monotonic()
    if now - config.stash.get(WATCHED_SINCE, -math.inf) > WATCH_AGAIN_S:
        config.stash[WATCHED_SINCE] = now
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=config.stash[STANDARD_ERROR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Watches for hangs, and turns the kernel cache on where the command says so.

    A file of another test may name kernels that only its fake of a driver knew.
    """
    watch_for_hangs(item.config)
    if not item.config.getoption("--kernel-cache"):
        return (yield)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
        patch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", folder)
        try:
            return (yield)
        finally:
            # Files are written in a thread behind the call.
            if (storing := sys.modules.get("tracegraph.kernel_caching.storing")) is not None:
                storing.wait_for_stores()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports all tests without rounds of the collector, which would find everything alive."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_sessionfinish(exitstatus: int) -> None:
    """Keeps what XLA has compiled, unless the run was cut off."""
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        finish_run()


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Leaves everything that is alive now out of the collector's rounds.

    Many tests run a collection, and one over all modules of JAX takes a third of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def short_searches(request: pytest.FixtureRequest) -> None:
    """Lets a trace look for clocks in the test's own module and helpers, not in all other tests.

    Each trace walks through the user's own modules. Here these are a thousand test modules, which
    would take longer than the trace of a small function.
    """
    own_modules = importlib.import_module("tracegraph.constraints.source_watch")._own_modules
    tests = [name for name in sys.modules if name.rpartition(".")[2].startswith("test_")]
    own_modules.update(dict.fromkeys(tests, False))
    own_modules[request.module.__name__] = True


@pytest.fixture(scope="session", autouse=True)
def shared_contexts() -> None:
    """Shares what JAX lowers programs in, see `share_contexts`."""
    share_contexts()


@pytest.fixture(scope="session", autouse=True)
def untimed() -> Iterator[None]:
    """Lets every graph win against `jax.jit`: no test depends on how fast the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tracegraph.verification.jit_comparison.time_both", lambda *_: (100e-6, 200e-6)
        )
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with tests/golden/<name>.txt; --update-golden writes the file instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text)
            return
        command = f"python -m pytest {request.node.nodeid} --update-golden"
        assert path.exists(), f"no file {path}; if this text is right, run: {command}\n{text}"
        assert text == path.read_text(), f"{path} differs; if the new text is right, run: {command}"

    return compare
