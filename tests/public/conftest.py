"""Shared by the public tests, of which those of memory come first.

Functions and handles that other modules keep hold memory, and those tests name absolute bytes.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from tracegraph.lowering.compiler import Compiler

MEMORY = pathlib.Path(__file__).parent / "memory"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: MEMORY not in item.path.parents)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the regions that XLA compiled."""
    names: list[str] = []
    compile_region = Compiler.compile

    def note(self: Compiler, region: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(region.name)
        return compile_region(self, region, *args, **kwargs)

    monkeypatch.setattr(Compiler, "compile", note)
    return names
