"""Tests of memory come first: functions and handles that other modules keep hold memory."""

from __future__ import annotations

import pathlib

import pytest

MEMORY = pathlib.Path(__file__).parent / "memory"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: MEMORY not in item.path.parents)
