"""The leaves of what a variable holds, whatever that is."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.constraints.leaf_kinds import is_static
from tracegraph.constraints.variable_trees import list_variable_leaves

X = jnp.ones(3)
UNSORTED: Any = {1: 2.0, "a": X}
CYCLE: list[Any] = [3.0]
CYCLE.append(CYCLE)


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_pytree_node_class
class Fails:
    """A node that cannot be taken apart."""

    scale = 5.0

    def tree_flatten(self) -> Any:
        raise KeyError("not now")

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Fails:
        del aux, children
        return cls()


@jax.tree_util.register_pytree_node_class
class Makes:
    """A node that makes its parts when it is taken apart."""

    def tree_flatten(self) -> Any:
        return tuple([number] for number in range(100)), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Makes:
        del aux, children
        return cls()


FAILS = Fails()


def test_they_are_those_of_jax() -> None:
    tree = {
        "b": [1.0, (X, np.ones(2))],
        "a": Pair("x", collections.OrderedDict(z=1, y=2)),
        "c": collections.defaultdict(list, k=[jnp.sin]),
        "d": jax.random.key(0),
    }
    wanted = jax.tree_util.tree_leaves_with_path(tree)
    found = list(list_variable_leaves("v", tree))
    names = dict(found)
    assert len(found) == len(wanted)
    for path, leaf in wanted:
        assert names["v" + jax.tree_util.keystr(path)] is leaf


def test_what_is_no_tree_of_jax_has_leaves_too() -> None:
    assert [name for name, _ in list_variable_leaves("u", UNSORTED)] == ["u[1]", "u['a']"]
    assert list(list_variable_leaves("c", CYCLE)) == [("c[0]", 3.0)]
    assert list(list_variable_leaves("f", {"k": FAILS})) == [("f['k']", FAILS)]
    numbers = iter([1, 2])
    assert list(list_variable_leaves("n", [numbers])) == [("n[0]", numbers)]
    assert next(numbers) == 1


def test_parts_that_are_made_anew_are_all_found() -> None:
    found = [leaf for _, leaf in list_variable_leaves("m", [Makes(), Makes()])]
    assert found == [*range(100)] * 2


@pytest.mark.parametrize(
    ("function", "factor"),
    [
        (lambda x: x * UNSORTED[1], 2),
        (lambda x: x * CYCLE[0], 3),
        (lambda x: x * FAILS.scale, 5),
    ],
)
def test_functions_that_read_them_are_captured(function: Any, factor: float) -> None:
    step: Any = tg.capture(function)
    for _ in range(2):
        assert step(X).tolist() == [factor] * 3
    assert "was" not in str(step.explain(X))


def test_a_static_leaf_that_holds_one_is_looked_through() -> None:
    class Holder:
        def __init__(self, table: Any) -> None:
            self.table = table

    assert not is_static(Holder(UNSORTED))
    assert is_static(Holder({1: 2.0, "a": 3.0}))
