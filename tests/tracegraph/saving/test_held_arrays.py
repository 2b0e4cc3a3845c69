"""Which arrays a function holds: in its variables, and wherever these have them."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.saving.held_arrays import list_host_arrays, list_leaves, name_arrays

A, B, C, D = (np.full(3, float(number)) for number in range(4))
LISTED = [A, {1: B, "b": C}]


class Slots:
    __slots__ = ("w",)

    def __init__(self) -> None:
        self.w = A


class Tower:
    table = B

    def __init__(self) -> None:
        self.parts = [Slots()]
        self.above = self
        self.act = lambda x: x + C

    def __call__(self, x: Any) -> Any:
        return x * self.parts[0].w

    def call(self, x: Any) -> Any:
        return x * self.parts[0].w

    @property
    def product(self) -> Any:
        return LISTED[1][1] * D


TOWER = Tower()


def multiply(x: Any, w: Any = A, *, bias: Any = B) -> Any:
    return x * w + bias


multiply.table = C  # pyright: ignore[reportFunctionMemberAccess]


FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "listed": (lambda x: x + LISTED[0], {"LISTED[0]": A, "LISTED[1][1]": B, "LISTED[1]['b']": C}),
    "defaults": (multiply, {"w": A, "bias": B}),
    "called": (lambda x: multiply(x), {"multiply.table": C, "w": A}),
    "partial": (functools.partial(multiply, w=D), {"w": D, "bias": B}),
    "object": (TOWER, {"self['parts'][0].w": A, "self['table']": B, "C": C, "D": D}),
    "method": (TOWER.call, {"self['parts'][0].w": A, "self['table']": B}),
    "jitted method": (jax.jit(TOWER.call), {"self['parts'][0].w": A}),
    "global object": (lambda x: TOWER(x), {"TOWER.parts[0].w": A, "TOWER.table": B, "C": C}),
    "class": (lambda x: x * Tower.table, {"Tower.table": B}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arrays_are_found_wherever_they_are(name: str) -> None:
    function, places = FUNCTIONS[name]
    assert name_arrays(function, list(places.values())) == list(places)
    held = list_host_arrays(function)
    assert all(any(each is array for each in held) for array in places.values())


def test_attributes_of_the_users_modules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("tower_weights")
    module.w, module.other = A, B
    monkeypatch.setitem(sys.modules, "tower_weights", module)

    # Modules are globals nearly always.
    monkeypatch.setitem(globals(), "tower_weights", module)
    function: Any = lambda x: x * tower_weights.w  # noqa: E731, F821  # pyright: ignore[reportUndefinedVariable]
    assert name_arrays(function, [A]) == ["tower_weights.w"]
    assert not any(each is B for each in list_host_arrays(function))


def test_of_two_variables_of_one_name_the_first_is_named_and_both_are_held() -> None:
    def make_inner() -> Any:
        w = B
        return lambda x: x * w

    def make_outer(inner: Any) -> Any:
        w = A
        return lambda x: inner(x) + w

    function = make_outer(make_inner())
    assert name_arrays(function, [A, B]) == ["w", "constant 1"]
    assert any(each is B for each in list_host_arrays(function))


def test_keys_that_print_alike_name_the_first_array() -> None:
    class Key:
        def __repr__(self) -> str:
            return "key"

    table = {Key(): A, Key(): B}
    assert name_arrays(lambda x: x + sum(table.values()), [A, B]) == ["table[key]", "constant 1"]


def test_what_belongs_to_libraries_is_not_looked_into() -> None:
    function = lambda x: jnp.sin(x) * np.pi  # noqa: E731
    assert list_leaves([("np", np)]) == [("np", np)]
    assert list_host_arrays(function) == []
