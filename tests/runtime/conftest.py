"""Shared by the tests of the CUDA driver: the two forms of its bindings."""

from __future__ import annotations

import pytest

from tests.fakes.fake_bindings import FakeBindings, import_real


@pytest.fixture(params=["plain", "bindings"])
def api(request: pytest.FixtureRequest) -> FakeBindings:
    if request.param == "plain":
        return FakeBindings()
    real = import_real()
    if real is None:
        pytest.skip("the records of cuda.bindings are compared only where it is installed")
    return FakeBindings(real)
