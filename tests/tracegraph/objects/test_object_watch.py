"""What a watch of objects sees: attributes, containers, variables and their metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from tracegraph.objects.object_watch import ObjectWatch

nnx = pytest.importorskip("flax.nnx")


class Net(nnx.Module):
    """An attribute, variables, a dict and a list."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(2), tag="first")
        self.shift = nnx.Param(jnp.zeros(2))
        self.rate = 0.5
        self.table = nnx.Dict(a=nnx.Param(jnp.ones(1)))
        self.parts = nnx.List([nnx.Param(jnp.ones(1))])


def set_metadata(net: Net) -> None:
    net.scale.set_metadata(tag="second")


CHANGES: dict[str, Callable[[Net], Any]] = {
    "attribute": lambda net: setattr(net, "rate", 0.25),
    "new attribute": lambda net: setattr(net, "name", "net"),
    "lost attribute": lambda net: delattr(net, "rate"),
    "variable": lambda net: setattr(net, "shift", nnx.Param(jnp.zeros(2))),
    "shared": lambda net: setattr(net, "shift", net.scale),
    "entry of a dict": lambda net: setattr(net.table, "b", nnx.Param(jnp.ones(1))),
    "entry of a list": lambda net: net.parts.append(nnx.Param(jnp.ones(1))),
    "metadata": set_metadata,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_structure_is_seen(change: Callable[[Net], Any]):
    net = Net()
    watch = ObjectWatch(nnx, [net])
    assert watch.is_unchanged()
    change(net)
    assert not watch.is_unchanged()


def test_a_new_array_in_a_variable_is_no_change():
    net = Net()
    watch = ObjectWatch(nnx, [net])
    net.scale.set_raw_value(jnp.zeros(2))
    assert watch.is_unchanged()


def test_variables_are_found_by_object_and_path():
    first, second = Net(), Net()
    watch = ObjectWatch(nnx, [first, second])
    assert watch.variables[0, "scale"] is first.scale
    assert watch.variables[1, "scale"] is second.scale
    assert watch.variables[1, "parts", 0] is second.parts[0]
