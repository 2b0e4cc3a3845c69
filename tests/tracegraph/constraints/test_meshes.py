"""The rule `several-devices`: which meshes and shardings an op may name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tracegraph.constraints.meshes import check_context_mesh, check_meshes
from tracegraph.runtime.errors import CaptureError
from tracegraph.tracing.trace import trace_function

DEVICE = jax.devices()[0]
MESH = Mesh(np.array([DEVICE]), ("i",))
PAIR = AbstractMesh((2,), ("i",), (AxisType.Auto,))


def double_on(mesh, x):
    return jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)


def check(function, device=DEVICE):
    graph = trace_function(function, (jnp.ones(4),), {}, name="f").graph
    return [(v.rule, v.what) for v in check_meshes(graph, device)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: double_on(MESH, x),
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("i"))),
        lambda x: jax.device_put(x, SingleDeviceSharding(DEVICE)),
        lambda x: jax.jit(lambda x: x * 2)(x),
    ],
)
def test_the_graphs_own_device_may_be_named(function):
    assert check(function) == []


@pytest.mark.parametrize("depth", ["outside", "in a loop"])
def test_an_op_on_more_devices_is_found_at_any_depth(depth):
    def loop(x):
        return jax.lax.scan(lambda c, _: (double_on(PAIR, c), None), x, None, length=2)[0]

    function = loop if depth == "in a loop" else lambda x: double_on(PAIR, x)
    assert check(function) == [("several-devices", "`f` places shard_map on 2 devices")]


def test_one_line_is_reported_once():
    def twice(x):
        for _ in range(2):
            x = double_on(PAIR, x)
        return x

    assert len(check(twice)) == 1


def test_a_mesh_of_another_device_is_found():
    other = object()
    assert check(lambda x: double_on(MESH, x), other) == [
        ("several-devices", f"`f` places shard_map on {DEVICE}")
    ]


def test_the_mesh_around_a_capture():
    check_context_mesh("f", DEVICE)
    with jax.set_mesh(MESH):
        check_context_mesh("f", DEVICE)
    with jax.sharding.use_abstract_mesh(PAIR), pytest.raises(CaptureError) as caught:
        check_context_mesh("f", DEVICE)
    assert caught.value.what == "`f` is captured under jax.set_mesh with a mesh of 2 devices"
    assert caught.value.anchor == "several-devices"
    with jax.set_mesh(MESH), pytest.raises(CaptureError):
        check_context_mesh("f", object())
