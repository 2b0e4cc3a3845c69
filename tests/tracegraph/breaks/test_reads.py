"""The keys of what was read, and the values of a read that are remembered."""

import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.breaks import node as nodes
from tracegraph.breaks.node import PartNode
from tracegraph.breaks.reads import has_few_values, make_key, read_value
from tracegraph.ir.graph import Graph


def test_floats_are_told_apart_by_their_bits():
    values = [0.0, -0.0, np.nan, 1.0, jnp.float32(1.0), jnp.float16(1.0)]
    assert len({make_key(value) for value in values}) == len(values)
    assert make_key(float("nan")) == make_key(np.nan)


def test_arrays_are_told_apart_by_all_elements():
    assert make_key(jnp.array([1, 2])) != make_key(jnp.array([2, 1]))
    assert make_key(jnp.array([1, 2])) == make_key(jnp.array([1, 2]))


def test_a_truth_value_is_a_key_of_its_own():
    assert make_key(read_value(jnp.float32(7.0), "bool")) == make_key(
        read_value(jnp.float32(-1.0), "bool")
    )


@pytest.mark.parametrize("value", [True, 3, jnp.bool_(True), jnp.ones(1, int)])
def test_booleans_and_integers_have_few_values(value):
    assert has_few_values(value)


@pytest.mark.parametrize("value", [0.5, 1j, jnp.float32(1), jnp.ones(2, int), jnp.ones(2, bool)])
def test_floats_and_arrays_have_many(value):
    assert not has_few_values(value)


def test_so_many_values_are_remembered(monkeypatch):
    monkeypatch.setattr(nodes, "_MAX_SEEN", 2)
    node = PartNode(None, Graph("f", (), (), (), ()), (), None, None)
    assert [node.is_recurring(key) for key in "aabcab"] == [False, True, False, False, False, False]
