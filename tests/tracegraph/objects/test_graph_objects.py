"""Objects of nnx as trees: which are objects, how they are split and put together."""

from __future__ import annotations

import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.objects import graph_objects

nnx = pytest.importorskip("flax.nnx")


def make_layer() -> Any:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "value",
    [jnp.ones(2), np.ones(2), 1.0, "text", None, {"a": 1}, [1], (1,), nnx.State({})],
    ids=lambda value: type(value).__name__,
)
def test_arrays_containers_and_states_are_no_objects(value: Any):
    assert not graph_objects.is_object(nnx, value)
    assert not graph_objects.has_objects({"a": [value]})


@pytest.mark.parametrize("make", [make_layer, lambda: nnx.Rngs(0), lambda: nnx.Param(jnp.ones(2))])
def test_modules_generators_and_variables_are_objects(make: Any):
    value = make()
    assert graph_objects.is_object(nnx, value)
    assert graph_objects.has_objects({"a": [value, 1]})


def test_without_nnx_nothing_is_an_object(monkeypatch: pytest.MonkeyPatch):
    layer = make_layer()
    monkeypatch.delitem(sys.modules, "flax.nnx")
    assert graph_objects.find_nnx() is None
    assert not graph_objects.has_objects([layer])


def test_split_objects_are_put_together_as_new_ones():
    layer = make_layer()
    (split,) = graph_objects.split_objects(nnx, [layer], None)
    assert graph_objects.is_split(split)
    (again,) = graph_objects.merge_objects(nnx, [split], None, is_inner=True)
    assert again is not layer
    np.testing.assert_array_equal(again.kernel[...], layer.kernel[...])


def test_structures_of_equal_objects_are_equal_and_those_of_shared_ones_are_not():
    def find(*layers: Any) -> Any:
        return graph_objects.find_structure(graph_objects.split_objects(nnx, list(layers), None))

    layer = make_layer()
    assert find(make_layer(), layer) == find(layer, make_layer())
    assert find(layer, layer) != find(layer, make_layer())
