"""Shared by the tests on a real GPU: where there is none, each of them skips and says why.

A test module requests it with ``pytestmark = pytest.mark.usefixtures("gpu")`` and computes nothing
while it is imported, so that collecting the folder costs other machines nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from tests.gpu import device_memory, sharing
from tests.gpu.part_times import pytest_terminal_summary as pytest_terminal_summary


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
def gpu() -> Any:
    """The JAX device that the graphs are made for."""
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    return jax.devices()[0]


@pytest.fixture
def alone_on_gpu() -> None:
    """Keeps the other workers off the GPU: for bytes of the whole GPU, and for what takes time."""


@pytest.fixture(autouse=True)
def held_gpu(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A turn on the GPU, alone for the tests that use `alone_on_gpu`."""
    folder = sharing.find_shared_folder(tmp_path_factory)
    with sharing.hold_gpu(folder, alone="alone_on_gpu" in request.fixturenames):
        yield


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
