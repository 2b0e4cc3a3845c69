"""Shared by the tests of tg.memory: allocators that tests leave behind, and the fake GPU."""

from __future__ import annotations

import pytest

from tests.fakes.devices import forget_other_allocators


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of other folders leave the allocators of their fake devices behind."""
    forget_other_allocators(monkeypatch)
