"""What is known of elements before a kernel runs: Note [Known elements]."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.lowering.kernels.element_programs import build
from tracegraph.lowering.kernels.element_functions import BOOL, INT, ElementFunction, ElementOp
from tracegraph.lowering.kernels.element_values import Known, look_at_elements

PLACES = {"r": np.arange(-4, 4)[:, None], "t": np.arange(3)[None]}
LOADED = ("bool", 0, "t")
ALL = np.ones((8, 3), bool)


def look(expression: Any, asked: str = "sum0") -> Known:
    return look_at_elements(build(expression).ops, PLACES, asked)[-1]


def test_integers_are_divided_as_in_c() -> None:
    assert look(("int_div", "r", 3)).value[:, 0].tolist() == [-1, -1, 0, 0, 0, 0, 0, 1]
    assert look(("int_rem", "r", 3)).value[:, 0].tolist() == [-1, 0, -2, -1, 0, 1, 2, 0]


@pytest.mark.parametrize(
    "expression", [("int_mul", ("int_mul", "r", 1 << 20), 1 << 20), ("int_add", "r", "g0")]
)
def test_what_is_not_known_of_integers_is_left_open(expression: Any) -> None:
    assert look(expression).value is None
    assert look(("le", expression, "t")).find_decision(ALL) is None


def test_conditions_with_one_that_is_loaded() -> None:
    past = ("le", "t", "r")
    both, either = look(("and", past, LOADED)), look(("or", past, LOADED))
    is_past = PLACES["t"] <= PLACES["r"]
    assert both.find_decision(~is_past) is False
    assert both.find_decision(is_past) is None
    assert either.find_decision(is_past) is True
    assert either.find_decision(~is_past) is None


def test_a_negation_is_known() -> None:
    ops = (
        ElementOp("variable", INT, (), "r"),
        ElementOp("constant", INT, (), "0"),
        ElementOp("lt", BOOL, (0, 1)),
        ElementOp("not", BOOL, (2,)),
    )
    found = look_at_elements(ElementFunction(ops, (3,)).ops, PLACES, "sum0")[-1]
    assert found.find_decision(np.arange(8)[:, None] >= 4) is True


def test_choices_need_what_they_may_choose() -> None:
    is_past = PLACES["t"] <= PLACES["r"]
    chosen = look(("select", ("le", "t", "r"), "sum0", -1.0))
    np.testing.assert_array_equal(chosen.needs, is_past)
    assert chosen.find_constant(~is_past) == "bf800000"
    assert chosen.find_constant(ALL) is None
    assert look(("select", LOADED, "sum0", -1.0)).needs
    # Zero times whatever is taken for zero; the same on both sides is known, whichever is chosen.
    assert (
        look(("mul", ("select", ("le", "t", -1), 1.0, 0.0), "sum0")).find_constant(ALL) == "0" * 8
    )
    assert look(("select", LOADED, -1.0, -1.0)).find_constant(ALL) == "bf800000"
    numbers = look(("select", ("le", "t", "r"), "t", "r")).value
    np.testing.assert_array_equal(numbers, np.minimum(PLACES["t"], PLACES["r"]))
