"""What captures promise of state, results and threads, on a CudaDevice over host memory.

The tests are those of the host device. Each is here once more, with XLA's regions as kernels.
"""

from __future__ import annotations

import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.public.calls import test_outputs, test_state, test_threads


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    return capture_for_gpu(monkeypatch)


def is_collected(name: str, value: object) -> bool:
    """True for a test, and for a fixture, which pytest wraps in a type of its own."""
    return name.startswith("test_") or type(value).__name__ == "FixtureFunctionDefinition"


for module in (test_outputs, test_state, test_threads):
    found = {name: value for name, value in vars(module).items() if is_collected(name, value)}
    assert not found.keys() & globals().keys(), "two tests of one name"
    globals().update(found)
del module, found


def test_the_device_is_used(device: CudaOnHost) -> None:
    tg.capture(lambda x: x + 1)(1.0)
    # Two for the verification, one for the call.
    assert device.driver.count_calls("launch") == 3
