"""Captures over several GPUs without one: graphs of CPU devices, in processes of their own."""

from __future__ import annotations

from tests.processes import run_program
from tests.spread_scripts import MODEL

TWO = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "TF_CPP_MIN_LOG_LEVEL": "2"}

START = (
    """
import gc, weakref
import pytest
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.fakes.spread_on_host import capture_for_gpus

from tracegraph.graph_pictures import lines
from tracegraph.lowering.xla.origins import Origins

gpus = capture_for_gpus(pytest.MonkeyPatch())
lines.read_origins = lambda _: Origins(None, {})
mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,))

def refuse(call, *args, kind=tg.CaptureError):
    try:
        call(*args)
    except kind as error:
        assert len(str(error).splitlines()) >= 4, error
        return error
    raise SystemExit("accepted")
"""
    + MODEL
)

TRAINING = (
    START
    + """
step = tg.capture(train, donate_argnums=0, name="train")
twin = jax.jit(train, donate_argnums=0)
ours, theirs = put(w), put(w)
kept, places = [], None
for index in range(5):
    batch = put(x * (index + 1), "data")
    given = ours
    ours, value = step(ours, batch)
    theirs, wanted = twin(theirs, batch)
    assert read((ours, value)) == read((theirs, wanted)), index
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    found = [leaf.data_ptr() for leaf in jax.tree.leaves(ours)]
    assert places in (None, found), "state moved"
    places = found
    kept.append((value, np.asarray(wanted)))
assert all(np.array_equal(value, wanted) for value, wanted in kept)
info = step.cache_info()
assert (info.misses, info.hits) == (1, 4), info
# An arena on each of the two, and both count.
assert step.pool_bytes == 2 * step.lower(ours, batch).pool_bytes > 0
# Each launches its graph once per replay: twice to verify, five times for calls.
launches = [gpu.driver.count_calls("launch") for gpu in gpus]
assert launches[0] == launches[1] >= 7, launches

# What is computed next reads the state on both.
assert isinstance(ours["w"], jax.Array) and type(ours["w"]) is tg.Array
assert ours["w"].device == ours["w"].sharding and ours["w"].devices() == set(jax.devices())
doubled = jax.jit(lambda p: jax.tree.map(lambda a: a * 2, p))(ours)
assert all(np.array_equal(doubled[k], np.asarray(ours[k]) * 2) for k in w)

report = step.explain(ours, batch)
assert "devices: 2 (" in report and "mesh 'data': 2" in report, report
assert "1 all-reduce" in report and "bit for bit" in report, report
assert "batch: P('data') over 'data': 2" in report.show("regions"), report.show("regions")
assert "result[1]: P() over 'data': 2" in report.show("regions"), report.show("regions")
types = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding),
                     (put(w), put(x, "data")))
assert "is captured" in step.explain(*types)
assert [node.kind for node in step.get_graph_data(*types).nodes] == ["kernel"]

# Another sharding is another signature; the stages are those of one device.
assert refuse(step, given, batch, kind=tg.ReplayError).anchor == "deleted-array"
ours, value = step(ours, put(x))
assert step.cache_info().misses == 2
compiled = step.lower(put(w), put(x, "data")).compile()
assert read(compiled(put(w), put(x, "data"))) == read(twin(put(w), put(x, "data")))
assert compiled.memory_analysis().pool_bytes > 0
refuse(compiled, put(w), put(x), kind=tg.ReplayError)
assert refuse(step.profile, ours, put(x), kind=tg.ReplayError).anchor == "profile"
assert "several devices" in refuse(step.save, "file.tg", kind=tg.TracegraphError).why + str(
    refuse(step.save, "file.tg", kind=tg.TracegraphError))

# A function without collectives, its results as arguments, and what is on one device.
scale = tg.capture(lambda a, b, c: (a * b + c, a.sum()))
wanted = jax.jit(lambda a, b, c: (a * b + c, a.sum()))
for b, c in ((jnp.ones(2), 3), (np.ones(2, np.float32), 3)):
    assert read(scale(put(x, "data"), b, c)) == read(wanted(put(x, "data"), b, c))
first, _ = scale(put(x, "data"), np.ones(2, np.float32), 3)
assert read(scale(first, np.ones(2, np.float32), 3)) == read(
    wanted(put(x + 3, "data"), np.ones(2, np.float32), 3))
one = tg.capture(lambda a: a + 1)
assert np.array_equal(scale(put(x, "data"), one(jnp.zeros(2)), 3)[0], x + 3)
key = tg.capture(lambda key, a: jax.random.normal(key, a.shape) + a)
assert read(key(jax.random.key(3), put(x, "data"))) == read(
    jax.jit(lambda key, a: jax.random.normal(key, a.shape) + a)(jax.random.key(3), put(x, "data")))

# What computes nothing, or reads nothing that is spread; what names the mesh itself.
for function in (lambda a: a, lambda a: jnp.arange(3.0), lambda a: (a, a[:0]), lambda a: {"b": a}):
    found, wanted = (jax.tree.leaves(f(put(x, "data"))) for f in (tg.capture(function),
                                                                  jax.jit(function)))
    assert all(np.array_equal(*pair) for pair in zip(found, wanted, strict=True))
for out in (P(), P("data")):
    total = jax.shard_map(lambda a: jax.lax.psum(a, "data"), mesh=mesh, in_specs=P("data"),
                          out_specs=out, check_vma=False)
    assert read(tg.capture(total)(x)) == read(jax.jit(total)(x))

over = jax.shard_map(lambda a: a * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
placed = NamedSharding(mesh, P("data"))
for function in (
    lambda a: jax.lax.scan(lambda c, _: (over(c), None), a, None, length=2)[0],
    lambda a: jax.lax.with_sharding_constraint(a, placed) + 1,
    lambda a: jax.device_put(a, placed) + 1,
    lambda a: jax.jit(jnp.sin, out_shardings=placed)(a),
):
    for given in (x, put(x), put(x, "data")):
        assert read(tg.capture(function)(given)) == read(jax.jit(function)(given))
for kind in (AxisType.Auto, AxisType.Explicit):
    named = jax.make_mesh((2,), ("data",), (kind,))
    with jax.set_mesh(named):
        for given in (x, put(x, "data", over=named)):
            plain = tg.capture(lambda a: jnp.sin(a) + 1)
            wanted = jax.jit(lambda a: jnp.sin(a) + 1)(given)
            assert read(plain(given)) == read(wanted)
            assert jax.typeof(plain(given)) == jax.typeof(wanted)

# release() gives the memory of both back.
step.release()
assert step.pool_bytes == 0
ours, value = step(put(w), put(x, "data"))
assert read((ours, value)) == read(twin(put(w), put(x, "data")))

# All memory goes with the last names.
gc.collect()
gc.disable()
reference = weakref.ref(step)
del step, ours, value, given, kept, compiled, report
assert reference() is None
print("ok")
"""
)

FAULTS = (
    START
    + """
from tracegraph.runtime.cuda import spread_gpus
total = tg.capture(lambda a: a.sum(), name="total")
wanted = jax.jit(lambda a: a.sum())(put(x, "data"))
assert total(put(x, "data")) == wanted

# A GPU whose part is wrong is named.
import tests.fakes.spread_on_host as fake
compute = fake._compute
def wrong(region, executable, in_place, addresses):
    compute(region, executable, in_place, addresses)
    import ctypes
    ctypes.memset(addresses[1][len(region.inputs)], 1, 4)
fake._compute = wrong
error = refuse(tg.capture(lambda a: a.max()), put(x, "data"), kind=tg.VerificationError)
assert "result on " in error.where and error.where.count(" on ") == 1, error
fake._compute = compute

# One that cannot be launched: those before it are told to stop, and the next call works.
stops = []
stop = spread_gpus.PeerMemory.stop
spread_gpus.PeerMemory.stop = lambda self: (stops.append(self), stop(self))
def fail(): raise tg.CudaError("no launch", where="here", why="tried", fix="none", anchor="cuda")
parts = spread_gpus._make_launch((lambda: None, fail), (), (spread_gpus.find_peer_memory(
    [gpu.context for gpu in gpus]),))
try:
    parts()
except tg.CudaError:
    assert len(stops) == 1
else:
    raise SystemExit("launched")
try:
    spread_gpus._make_launch((fail, lambda: None), (), tuple(stops))()
except tg.CudaError:
    assert len(stops) == 1, "nothing was launched"
assert total(put(x, "data")) == wanted

# What graphs of several GPUs have not.
assert refuse(tg.capture(lambda a: a, outputs="static"), put(x, "data")).anchor == "several-devices"
pooled = tg.capture(lambda a: a + 1, pool=tg.graph_pool_handle())
assert "pool=" in str(refuse(pooled, put(x, "data")))
def forked(a):
    main, side = tg.current_stream(), tg.Stream()
    side.wait_stream(main)
    with tg.stream(side):
        b = jnp.sin(a)
    main.wait_stream(side)
    return b
assert "streams" in str(refuse(tg.capture(forked), put(x, "data")))
turned = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("data",))
both = tg.capture(lambda a, b: a + b)
assert refuse(both, put(x, "data"), put(x, "data", over=turned)).anchor == "mixed-devices"
lazy = tg.capture(lambda a: a + 1, warm=False)
assert refuse(lazy, put(x, "data")).anchor == "several-devices"
kept = total(put(x, "data"))
assert refuse(kept.record_stream, tg.Stream(), kind=tg.TracegraphError).anchor == "several-devices"

# GPUs that cannot reach each other.
gpus[0].driver.can_access_peer = lambda a, b: False
spread_gpus.find_peer_memory.__globals__["_memories"].clear()
contexts = [gpu.context for gpu in gpus]
error = refuse(spread_gpus.find_peer_memory, contexts, kind=tg.UnsupportedError)
assert "cannot reach the memory" in error.what
print("ok")
"""
)


def test_a_step_over_two_gpus_is_a_graph_on_each() -> None:
    assert run_program(TRAINING, **TWO).splitlines()[-1] == "ok"


def test_what_goes_wrong_over_two_gpus_is_said() -> None:
    assert run_program(FAULTS, **TWO).splitlines()[-1] == "ok"
