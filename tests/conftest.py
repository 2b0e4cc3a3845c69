"""Shared by all tests: texts that are compared with files."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

GOLDEN = pathlib.Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*.txt anew")


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
