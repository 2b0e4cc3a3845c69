"""Finalisers stand objects that were made by half: an interrupt may come before `__init__` ends.

A class whose objects are finalised by `weakref.finalize` needs no test here: the callback takes
arguments of its own and is registered once they are there, never with the half-made object. What
has an `__exit__` is left only after it was entered.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import pathlib
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from tests.paths import ROOT

LAYERS = ("tracegraph", "lowering", "runtime")


def list_modules(word: str) -> Iterator[tuple[str, ast.Module]]:
    """Yields the name and the syntax tree of each of our modules that has a word in it."""
    for layer in LAYERS:
        for file in sorted((ROOT / layer).rglob("*.py")):
            text = file.read_text()
            if word in text:
                path = file.relative_to(ROOT).with_suffix("")
                yield _name_module(path), ast.parse(text)


def _name_module(path: pathlib.Path) -> str:
    parts = [part for part in path.parts if part != "__init__"]
    return ".".join(parts if parts[0] == "tracegraph" else ["tracegraph", *parts])


def find_finalised() -> list[type]:
    """Returns each of our classes that has a `__del__` of its own."""
    return [
        getattr(importlib.import_module(module), node.name)
        for module, tree in list_modules("__del__")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(n, ast.FunctionDef) and n.name == "__del__" for n in node.body)
    ]


def make_halves(cls: Any) -> list[Any]:
    """Returns an object with no slot set, and one for each slot with only that one set."""
    slots = getattr(cls, "__slots__", ())
    halves = [cls.__new__(cls)]
    for slot in slots:
        half = cls.__new__(cls)
        if slot not in FLAGS:
            setattr(half, slot, ())
            halves.append(half)
    return halves


# Set last by their constructors: with them an object is whole.
FLAGS = ("_is_seen",)


def test_the_classes_are_known():
    """A new one is tried below by itself; its slots should be looked at here."""
    assert [cls.__name__ for cls in find_finalised()] == ["DictWatch", "HostRead", "Result"]


@pytest.mark.parametrize("cls", find_finalised(), ids=lambda cls: cls.__name__)
def test_a_half_made_object_dies_in_silence(cls: type, monkeypatch: pytest.MonkeyPatch):
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    halves = make_halves(cls)
    assert len(halves) > 1
    halves.clear()
    gc.collect()
    assert not found


def test_a_finaliser_that_needs_a_whole_object_is_found(monkeypatch: pytest.MonkeyPatch):
    class Half:
        __slots__ = ("handle",)

        def __del__(self) -> None:
            self.handle.close()

    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    make_halves(Half).clear()
    gc.collect()
    assert found


def test_a_result_sets_what_its_finaliser_looks_at_last():
    """Of its three slots `_is_seen` says that the others are there."""
    (result,) = [cls for cls in find_finalised() if cls.__name__ == "Result"]
    tree = ast.parse(textwrap.dedent(inspect.getsource(result.__init__)))
    names = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    assert names[-1] == "_is_seen"


def test_finalisers_of_weak_references_take_arguments_of_their_own():
    """One that takes the object itself would keep it alive for ever."""
    calls = [
        node
        for _, tree in list_modules("weakref.finalize")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "weakref.finalize"
    ]
    assert len(calls) > 10
    for call in calls:
        owner, callback, *arguments = map(ast.unparse, call.args)
        assert owner not in arguments
        assert not callback.startswith(f"{owner}._") or callback.count(".") > 1, callback
