"""What the matmuls and convolutions of a function take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from tracegraph.jax_internals import name_jaxprs, open_jaxpr


def list_equations(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the equations of a function, those of inner jaxprs too."""
    return [*_walk(jax.make_jaxpr(function)(*args))]


def name_matmuls(function: Callable[..., Any], *args: Any) -> list[str]:
    """Returns the dtype of each matmul and convolution of a function, in order."""
    found = list_equations(function, *args)
    matmuls = [each for each in found if "precision" in each.params]
    types = [{str(operand.aval.dtype) for operand in each.invars} for each in matmuls]
    assert all(len(each) == 1 for each in types), types
    return [each.pop() for each in types]


def _walk(jaxpr: Any) -> Iterator[Any]:
    for equation in open_jaxpr(jaxpr)[0].eqns:
        yield equation
        for _, inner in name_jaxprs(equation.params):
            yield from _walk(inner)
