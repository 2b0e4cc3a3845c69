"""Meshes: `shard_map` and shardings of one device are captured, those of more are refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tracegraph as tg
from tests.processes import run_program

MESH = Mesh(np.array(jax.devices()[:1]), ("i",))
GRID = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("i", "j"))
EXPLICIT = jax.make_mesh((1,), ("i",), (AxisType.Explicit,), devices=jax.devices()[:1])
X = jnp.arange(8.0)


def over(mesh: Any, **options: Any) -> Any:
    options = {"in_specs": P("i"), "out_specs": P("i"), **options}
    return functools.partial(jax.shard_map, mesh=mesh, **options)


@over(MESH)
def doubled(x):
    return x * 2 + 1


@over(MESH, out_specs=P())
def summed(x):
    return jax.lax.psum(x * 2, "i")


@over(MESH, check_vma=False)
def collectives(x):
    moved = jax.lax.ppermute(x, "i", [(0, 0)])
    rows = jax.lax.all_gather(moved, "i", tiled=True)
    index = jax.lax.axis_index("i") + jax.lax.axis_size("i")
    return jax.lax.pmean(rows, "i") + jax.lax.psum_scatter(rows, "i", tiled=True) * index


@over(MESH, check_vma=False)
def looped(x):
    return jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * jax.lax.psum(c, "i"), x)


@over(GRID, in_specs=P("i", "j"), out_specs=P("i"))
def on_two_axes(x):
    return jax.lax.psum(x.sum(1), "j") + jax.lax.axis_index("i")


def constrained(x):
    return jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(MESH, P("i"))) + 1


def placed(x):
    return jax.device_put(jnp.sin(x), NamedSharding(MESH, P("i"))) + 1


FUNCTIONS: dict[str, Any] = {
    "no collective": doubled,
    "psum": lambda x: summed(x) + 1,
    "collectives": collectives,
    "loop": looped,
    "two axes": lambda x: on_two_axes(x.reshape(4, 2)),
    "grad": jax.grad(lambda x: summed(jnp.sin(x)).sum()),
    "jit inside": lambda x: jax.jit(summed)(x) * 2,
    "inside scan": lambda x: jax.lax.scan(lambda c, _: (doubled(c), None), x, None, length=2)[0],
    "captured inside": lambda x: over(MESH)(tg.capture(jnp.sin))(x),
    "with_sharding_constraint": constrained,
    "device_put": placed,
}


@pytest.mark.parametrize("mode", ["whole", "partial"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mesh_of_one_device_is_captured(name, mode):
    function = FUNCTIONS[name]
    captured: Any = tg.capture(function, mode=mode)
    wanted = np.asarray(jax.jit(function)(X))
    for x in (X, jax.device_put(X, NamedSharding(MESH, P("i")))):
        result = captured(x)
        assert np.array_equal(result, wanted)
        assert result.devices() == {jax.devices()[0]}
    assert captured.cache_info().captures == 1


@pytest.mark.parametrize("mode", ["whole", "partial"])
@pytest.mark.parametrize("is_set", [False, True])
def test_types_that_name_an_axis_of_one_device(is_set, mode):
    sharded = jax.device_put(X, NamedSharding(EXPLICIT, P("i")))
    function = over(None if is_set else EXPLICIT, out_specs=P())(lambda x: jax.lax.psum(x, "i"))
    captured: Any = tg.capture(function, mode=mode)

    def check():
        wanted = np.asarray(jax.jit(function)(sharded))
        for _ in range(2):
            assert np.array_equal(captured(sharded), wanted)
        assert "shard_map" in str(captured.trace(sharded))
        assert captured.lower(sharded).pool_bytes > 0
        assert "is captured" in captured.explain(sharded)

    if is_set:
        with jax.set_mesh(EXPLICIT):
            check()
    else:
        check()


def test_state_may_be_sharded_over_one_device():
    step: Any = tg.capture(lambda w, x: (doubled(w) + x, w.sum()), donate_argnums=0)
    reference = jax.jit(step.__wrapped__)
    w = v = jax.device_put(X, NamedSharding(MESH, P("i")))
    for _ in range(3):
        v, wanted = reference(v, X)
        w, total = step(jnp.array(w, copy=True), X)
        assert np.array_equal(w, v)
        assert float(total) == float(wanted)


def test_a_mesh_of_two_devices_is_refused_where_only_its_type_is_known():
    abstract: Any = AbstractMesh((2,), ("i",), (AxisType.Auto,))
    for mode in ("whole", "partial"):
        captured: Any = tg.capture(over(abstract)(lambda x: x * 2), mode=mode, name="step")
        with pytest.raises(tg.CaptureError, match="`step` places shard_map on 2 devices") as caught:
            captured(X)
        assert caught.value.anchor == "several-devices"
        assert "test_meshes.py" in caught.value.where
        assert "places shard_map on 2 devices" in captured.explain(X)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from tracegraph.runtime.host.device import HostDevice

both, second = Mesh(np.array(jax.devices()), ("i",)), Mesh(np.array(jax.devices()[1:]), ("i",))
x = jnp.arange(8.0)
over = lambda mesh: jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
FUNCTIONS = [
    over(second),
    lambda x: jax.lax.scan(lambda c, _: (over(second)(c), None), x, None, length=2)[0],
    lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(second, P("i"))) + 1,
    lambda x: jax.jit(jnp.sin, out_shardings=NamedSharding(second, P("i")))(x),
]

def refuse(captured, x):
    try:
        captured(x)
    except tg.CaptureError as error:
        lines = str(error).splitlines()
        assert len(lines) == 4 and "tracegraph error" in lines[-1], error
        return error
    raise SystemExit("accepted")

# As on a GPU; several are taken, see test_data_parallel.py and test_data_parallel_on_gpus.py.
HostDevice.takes_kernels = True
for function in FUNCTIONS:
    for mode in ("whole", "partial"):
        error = refuse(tg.capture(function, mode=mode), x)
        assert error.anchor == "several-devices", error
        assert "1" in error.what, error
        assert "<string>" in error.where, error

plain = tg.capture(lambda x: x + 1)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((1,), ("i",), (kind,), devices=jax.devices()[1:])
    with jax.set_mesh(mesh):
        assert refuse(plain, x).anchor == "several-devices"
assert refuse(plain, jax.device_put(x, jax.devices()[1])).anchor == "other-device"
HostDevice.takes_kernels = False
# One other device is none of the call's, wherever it is.
assert refuse(tg.capture(over(second)), x).anchor == "several-devices"
# What JAX does not move inside of a program is no placement, and the next call works.
assert np.array_equal(tg.capture(lambda x: jax.device_put(x, jax.devices()[1]) + 1)(x), x + 1)
assert np.array_equal(plain(x), x + 1)
# A part of another program, it goes where that goes.
assert np.array_equal(jax.jit(tg.capture(over(both)))(x), x * 2)
print("ok")
"""


def test_meshes_of_another_device_are_refused():
    flags = "--xla_force_host_platform_device_count=2"
    assert run_program(PROGRAM, XLA_FLAGS=flags) == "ok\n"
