"""JAX's primitive harnesses as cases: a function, its arguments and its tolerance.

The harnesses come with the jax wheel, but under a private name, and there is no public list of
one use of every primitive. This is the only file of the tests that knows them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax._src import public_test_util
from jax._src.internal_test_util import test_harnesses


@dataclasses.dataclass(frozen=True)
class Case:
    """One use of one primitive.

    Attributes:
        group: the primitive, as ``dot_general``.
        name: unique among all cases.
        function: takes and returns arrays.
        make_arguments: gives the arguments for a seed.
    """

    group: str
    name: str
    function: Callable[..., Any]
    make_arguments: Callable[[int], list[Any]]


def load_cases(device: str = "cpu") -> tuple[Case, ...]:
    """Returns every case that JAX implements on a device (``cpu`` or ``gpu``), by name."""
    cases = [_make_case(each) for each in test_harnesses.all_harnesses if each.filter(device)]
    # JAX makes some of them by walking over sets of types, in another order in each process.
    return tuple(sorted(cases, key=lambda case: case.name))


def _make_case(harness: Any) -> Case:
    def make_arguments(seed: int) -> list[Any]:
        return list(harness.dyn_args_maker(np.random.RandomState(seed)))

    return Case(harness.group_name, harness.fullname, harness.dyn_fun, make_arguments)


def sample_cases(cases: Iterable[Case], count: int, seed: int) -> tuple[Case, ...]:
    """Draws one case of every group, then the rest from all cases alike.

    Args:
        cases: what to draw from.
        count: how many; all of them when there are fewer.
        seed: the same seed draws the same cases.

    Returns:
        The drawn cases, in the order of ``cases``.

    Example:
        >>> cases = [Case(group, group + str(i), abs, lambda seed: [1])
        ...          for group in "ab" for i in range(3)]
        >>> sorted(case.group for case in sample_cases(cases, 2, seed=0))
        ['a', 'b']
    """
    cases = tuple(cases)
    shuffled = random.Random(seed).sample(range(len(cases)), len(cases))
    # The last one written for a group stays; reversed, so that it is the first one drawn.
    first_of_group = {cases[index].group: index for index in reversed(shuffled)}
    leading = set(first_of_group.values())
    ranked = sorted(shuffled, key=lambda index: index not in leading)
    return tuple(cases[index] for index in sorted(ranked[:count]))


def make_two_inputs(case: Case) -> tuple[list[Any], list[Any], bool]:
    """Returns two lists of arguments of one signature, and whether their values differ.

    Some harnesses write their arrays down instead of drawing them; those are rolled by one element,
    or increased by one when they have only one.
    """
    first, second = case.make_arguments(0), case.make_arguments(1)
    if _are_equal(first, second):
        second = [_vary(argument) for argument in second]
    return first, second, not _are_equal(first, second)


def _are_equal(first: list[Any], second: list[Any]) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def _vary(argument: Any) -> Any:
    if not isinstance(argument, np.ndarray) or argument.dtype == bool:
        return argument
    if argument.size == 1:
        return (argument + 1).astype(argument.dtype)
    return np.roll(argument, 1)


def tolerance_of(dtype: np.dtype[Any]) -> float:
    """Returns the relative and absolute tolerance with which JAX tests results of a dtype."""
    return float(public_test_util.tolerance(dtype))
