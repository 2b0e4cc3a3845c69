"""Shared by the tests of runtime/cuda: devices over host memory."""

from __future__ import annotations

import pytest

from tests.fakes.cuda_on_host import CudaOnHost, make_device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    return make_device(monkeypatch)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    """A device that does nothing before the host waits; memory it works on must be kept."""
    return make_device(monkeypatch, is_deferred=True)
