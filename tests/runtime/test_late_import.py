"""A module that is imported at its first use, by a statement at the top of a file."""

from __future__ import annotations

import pathlib
import sys

import pytest

from tracegraph.runtime.late_import import import_late


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that counts how often it is imported and called."""
    code = "calls = []\ndef add(*a, **k): calls.append((a, k))\n"
    (tmp_path / "late_example.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "late_example", raising=False)
    return "late_example"


def test_nothing_is_imported_before_the_first_call(module: str) -> None:
    add = import_late(module, "add")
    assert module not in sys.modules
    add(1, b=2)
    add()
    assert sys.modules[module].calls == [((1,), {"b": 2}), ((), {})]
    assert add.__name__ == "add"


def test_a_missing_name_is_an_error_at_each_call(module: str) -> None:
    missing = import_late(module, "missing")
    for _ in range(2):
        with pytest.raises(AttributeError, match="missing"):
            missing()


def test_a_module_is_loaded_ahead_of_the_first_call(module: str) -> None:
    add = import_late(module, "add")
    assert add.load() is sys.modules[module].add
    assert sys.modules[module].calls == []
