"""The described H200, or the reason why there is none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deviceless import topology
from tests.optimized import optimized as optimized


@pytest.fixture(scope="session")
def h200() -> Any:
    """A device to compile for; skips where the wheels are missing, fails where they must not be."""
    obstacle = topology.find_obstacle()
    if obstacle is None:
        return topology.find_h200()
    if topology.is_required():
        pytest.fail(f"{topology.REQUIRED_BY}=1, but {obstacle}")
    pytest.skip(obstacle)
