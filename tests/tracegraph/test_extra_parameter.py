"""The parameter that is put among those of the user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tracegraph.extra_parameter import name_parameter


def plain(x: Any, y: Any = 1) -> None: ...


def starred(*args: Any, key: Any, **kwargs: Any) -> None: ...


def make(function: Callable[..., Any]) -> Callable[..., Any]:
    def pure(*args: Any, state: Any, **kwargs: Any) -> Any:
        return args, kwargs, state

    name_parameter(pure, function, "state")
    return pure


@pytest.mark.parametrize(
    ("function", "names"),
    [(plain, "x y state"), (starred, "args key state kwargs"), (lambda: None, "state")],
)
def test_it_is_the_last_but_for_keywords_of_any_name(
    function: Callable[..., Any], names: str
) -> None:
    pure = make(function)
    parameters = inspect.signature(pure).parameters
    assert " ".join(parameters) == names
    assert parameters["state"].kind is inspect.Parameter.KEYWORD_ONLY
    assert pure.__name__ == function.__name__


def test_a_function_without_a_signature_lends_its_name() -> None:
    pure = make(max)
    assert pure.__name__ == "max"
    assert pure(1, state=2) == ((1,), {}, 2)
