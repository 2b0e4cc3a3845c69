"""A leaf of the state that a user deletes, or donates to a plain `jax.jit`, is deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

X = jnp.ones(4)


def step(state: Any, x: Any) -> Any:
    return {"w": state["w"] + x, "inner": [state["inner"][0] * 2]}, x.sum()


def start(count: int = 3) -> tuple[Any, Any]:
    """Returns a captured step and the state after some calls."""
    captured = tg.capture(step, donate_argnums=0, verify=False)
    state: Any = {"w": jnp.zeros(4), "inner": [jnp.ones(4)]}
    for _ in range(count):
        state, _ = captured(state, X)
    return captured, state


consume = jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)
DELETIONS: dict[str, Callable[[Any], Any]] = {
    "a leaf donated to jit": lambda state: consume(state["inner"][0]),
    "a tree donated to jit": consume,
    "delete": lambda state: state["w"].delete(),
    "delete of the plain array": lambda state: state["w"].jax().delete(),
}


@pytest.mark.parametrize("name", DELETIONS)
def test_a_tree_with_a_deleted_leaf_is_refused(name: str):
    captured, state = start()
    DELETIONS[name](state)
    deleted = [leaf for leaf in jax.tree.leaves(state) if leaf.is_deleted()]
    assert deleted
    with pytest.raises(tg.CaptureError, match="has been deleted"):
        captured(state, X)
    # So does reading it, and for ever.
    for leaf in deleted:
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(leaf)
    # The next call with other values works.
    again, _ = captured({"w": jnp.zeros(4), "inner": [jnp.ones(4)]}, X)
    np.testing.assert_array_equal(again["w"], X)
    with pytest.raises(tg.CaptureError, match="has been deleted"):
        captured(state, X)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_leaf_that_was_only_read_is_taken(count: int):
    captured, state = start(count)
    for number in range(count, count + 4):
        # Its copy is kept until the next call.
        np.testing.assert_array_equal(state["w"], np.full(4, number))
        assert float(consume(state["w"] + 0)[0]) == -number
        state, _ = captured(state, X)
    assert captured.cache_info().captures == 1


def test_a_value_written_after_the_deletion_of_a_copy_is_the_leaf():
    captured, state = start()
    copy = state["w"].jax()
    state["w"].copy_(jnp.full(4, 7.0))
    copy.delete()
    state, _ = captured(state, X)
    np.testing.assert_array_equal(state["w"], np.full(4, 8.0))
