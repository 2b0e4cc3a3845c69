"""Which arrays of the last call the next one may give up."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.objects import state_holder
from tracegraph.objects.state_holder import StateHolder


class Variable:
    """Holds one array, as a variable of nnx does."""

    def __init__(self, array: object) -> None:
        self.array = array

    def get_raw_value(self) -> object:
        return self.array


def make_state() -> dict[str, object]:
    return {"a": jnp.arange(3.0), "b": jnp.ones(2)}


def hold(state: dict[str, object]) -> tuple[StateHolder, list[Variable]]:
    """Returns a holder of a state whose arrays are in variables, too, as after a call."""
    variables = [Variable(array) for array in state.values()]
    holder = StateHolder()
    holder.hold(state)
    return holder, variables


def test_what_only_variables_hold_is_given_up():
    state = make_state()
    holder, variables = hold(state)
    assert holder.take_again(state, variables) is state


def test_what_a_user_holds_is_copied():
    state = make_state()
    holder, variables = hold(state)
    kept = variables[0].array
    taken = holder.take_again(state, variables)
    assert taken["a"] is not kept
    assert taken["b"] is variables[1].array
    np.testing.assert_array_equal(taken["a"], kept)


def test_what_no_call_returned_is_copied():
    state = make_state()
    taken = StateHolder().take(state)
    for name, array in state.items():
        assert taken[name] is not array
        np.testing.assert_array_equal(taken[name], array)


def test_a_replaced_array_is_copied_and_the_others_are_given_up():
    state = make_state()
    holder, variables = hold(state)
    variables[1].array = new = jnp.zeros(2)
    taken = holder.take_again(state, variables)
    assert taken["a"] is variables[0].array
    assert taken["b"] is not new
    np.testing.assert_array_equal(taken["b"], new)


def test_after_a_drop_everything_is_copied():
    state = make_state()
    holder, variables = hold(state)
    holder.drop()
    taken = holder.take_again(state, variables)
    assert not {id(array) for array in taken.values()} & {id(array) for array in state.values()}


def test_where_counts_say_nothing_everything_is_copied(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state_holder, "_has_counts", lambda: False)
    state = make_state()
    holder, variables = hold(state)
    taken = holder.take_again(state, variables)
    assert not {id(array) for array in taken.values()} & {id(array) for array in state.values()}


def test_what_is_no_array_or_is_deleted_is_left_to_the_checks():
    deleted = jnp.ones(2)
    deleted.delete()
    state = {"text": "relu", "gone": deleted}
    assert StateHolder().take(state) == state
