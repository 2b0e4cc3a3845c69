"""Captures over several devices: on four CPU devices, in processes of their own."""

from __future__ import annotations

import re

from tests.paths import ROOT
from tests.processes import run_program
from tests.spread_scripts import MODEL

FOUR = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    # XLA itself warns of meshes whose devices are in another order than theirs.
    "TF_CPP_MIN_LOG_LEVEL": "2",
}

START = (
    """
import functools
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

devices = jax.devices()
mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))
square = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)

def refuse(call, *args, kind=tg.CaptureError):
    try:
        call(*args)
    except kind as error:
        lines = str(error).splitlines()
        assert len(lines) >= 4 and "tracegraph error" in lines[-1], error
        return error
    raise SystemExit("accepted")

def addresses(tree):
    return [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)
            for s in x.addressable_shards]
"""
    + MODEL
)

TRAINING = (
    START
    + """
# Gradients are summed over the devices inside of the step; state stays on each device.
step = tg.capture(train, donate_argnums=0, name="train")
twin = jax.jit(train, donate_argnums=0)
ours, theirs, batch = put(w), put(w), put(x, "data")
for index in range(4):
    before = addresses(ours)
    given = ours
    ours, value = step(ours, batch)
    theirs, wanted = twin(theirs, batch)
    assert read((ours, value)) == read((theirs, wanted)), index
    # The first call may find memory of NumPy's, which XLA does not take over.
    assert index == 0 or addresses(ours) == before, "state moved"
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    batch = put(x * (index + 2), "data")
info = step.cache_info()
assert (info.misses, info.hits, step.pool_bytes) == (1, 3, 0), info

# What was donated is gone, as under jax.jit.
assert refuse(step, given, batch).anchor == "deleted-argument"
shared = put(x)
both = tg.capture(lambda a, b: (a + b, b.sum()), donate_argnums=0)
assert refuse(both, shared, shared).anchor == "donated-twice"
first, _ = both(put(x), put(x))
assert refuse(both, first, first).anchor == "donated-twice"
assert np.array_equal(both(first, put(x))[0], x * 3)

report = step.explain(ours, batch)
assert "devices: 4 (" in report and "mesh 'data': 4" in report, report
assert "all-reduce" in report and "bytes on each device" in report, report
assert "bit for bit" in report and len(report.splitlines()) <= 40, report
assert "batch: P('data') over 'data': 4" in report.show("regions"), report.show("regions")

# Other shardings and other meshes are other signatures, and the old ones stay.
assert refuse(step.lower(ours, batch).compile(), ours, put(x), kind=tg.ReplayError).where.endswith(
    "batch: wanted P('data') over 'data': 4, got P() over 'data': 4")
ours, value = step(ours, put(x))
assert "batch: f32[8,2] as P() over 'data': 4 after" in step.explain(ours, put(x))
other = jax.tree.map(lambda p: put(p, over=square), w)
theirs = jax.tree.map(lambda p: put(p, over=square), w)
batch = put(x, "data", "model", over=square)
for _ in range(2):
    other, value = step(other, batch)
    theirs, wanted = twin(theirs, batch)
    assert read((other, value)) == read((theirs, wanted))
# XLA chose where `w` is on the square mesh, so its second call is one more signature.
assert step.cache_info().misses == 4
one = tg.capture(train, name="one")
single, _ = one(w, x)
assert single["w"].devices() == {devices[0]}
one(put(w), put(x, "data"))
assert one(w, x)[0]["w"].devices() == {devices[0]} and one.cache_info().misses == 2

# What is not committed goes where the program wants it; NumPy arrays and numbers, too.
scaled = tg.capture(lambda a, b, c: a * b + c)
for b, c in ((jnp.ones(2), 3), (np.ones(2, np.float32), 3)):
    assert read(scaled(batch, b, c)) == read(jax.jit(lambda a, b, c: a * b + c)(batch, b, c))
key = tg.capture(lambda key, a: jax.random.normal(key, a.shape) + a)
assert read(key(jax.random.key(3), batch)) == read(
    jax.jit(lambda key, a: jax.random.normal(key, a.shape) + a)(jax.random.key(3), batch))

# Results of a graph of one device, given to a call of several.
graph = tg.capture(lambda a: a + 1)
assert np.array_equal(scaled(batch, graph(jnp.zeros(2)), 3), np.asarray(batch) + 3)

# The stages, as those of jax.jit.
lowered = step.lower(jax.tree.map(lambda p: put(p), w), put(x, "data"))
assert "all-reduce" in lowered.as_text() and lowered.pool_bytes == 0
assert lowered.cost_analysis()["flops"] > 0
compiled = lowered.compile()
assert read(compiled(put(w), put(x, "data"))) == read(twin(put(w), put(x, "data")))
assert compiled.memory_analysis().argument_size_in_bytes == 36 + 16
assert "no nodes" in refuse(step.get_graph_data, put(w), put(x, "data")).what
types = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding),
                     (put(w), put(x, "data")))
assert "devices: 4" in step.explain(*types)
print("ok")
"""
)

COLLECTIVES = (
    START
    + """
over = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"))
lax = jax.lax
FUNCTIONS = {
    "all-reduce": over(lambda x: lax.psum(x * x, "data"), out_specs=P()),
    "all-gather": over(lambda x: lax.all_gather(jnp.sin(x), "data", tiled=True),
                       out_specs=P(), check_vma=False),
    "reduce-scatter": over(lambda x: lax.psum_scatter(jnp.tile(x, (4, 1)), "data", tiled=True),
                           out_specs=P("data")),
    "all-to-all": over(lambda x: lax.all_to_all(jnp.tile(x, (4, 1)), "data", 0, 0, tiled=True),
                       out_specs=P("data")),
    "collective-permute": over(
        lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
        out_specs=P("data")),
    "loop": over(lambda x: lax.fori_loop(0, 3, lambda i, y: y + lax.pmean(y, "data"), x),
                 out_specs=P("data")),
    "auto": lambda x: lax.with_sharding_constraint(x.T, NamedSharding(mesh, P(None, "data"))) @ x,
}
for name, function in FUNCTIONS.items():
    captured = tg.capture(function, name="f")
    wanted = read(jax.jit(function)(put(x, "data")))
    for _ in range(2):
        assert read(captured(put(x, "data"))) == wanted, name
    report = captured.explain(put(x, "data"))
    if name not in ("loop", "auto"):
        assert f"1 {name} (" in report, report
    # The function itself names the mesh.
    assert read(captured(x)) == read(jax.jit(function)(x)), name

# Copies that differ from device to device are what jax.jit gives, too; it is said.
uneven = over(lambda x: x.sum() + lax.axis_index("data"), out_specs=P(), check_vma=False)
uneven = tg.capture(uneven)
uneven(put(x, "data"))
assert "not the same on all devices: result" in uneven.explain(put(x, "data"))

# Under jax.set_mesh, with types that name the axes.
for kind in (AxisType.Auto, AxisType.Explicit):
    named = jax.make_mesh((4,), ("data",), (kind,))
    step = tg.capture(lambda a: jax.shard_map(
        lambda b: lax.psum(b, "data"), in_specs=P("data"), out_specs=P())(a) * 2)
    with jax.set_mesh(named):
        for a in (x, put(x, "data", over=named))[kind is AxisType.Explicit :]:
            assert read(step(a)) == read(jax.jit(step.__wrapped__)(a)), kind

# The kind of memory is a part of the sharding.
double, kinds = tg.capture(lambda a: a * 2), [m.kind for m in devices[0].addressable_memories()]
for kind in kinds:
    there = jax.device_put(x, NamedSharding(mesh, P("data"), memory_kind=kind))
    assert read(double(there)) == read(jax.jit(double.__wrapped__)(there)), kind
assert double.cache_info().misses == len(kinds)

# Streams inside are places in one program; a capture goes with its last name.
import gc, weakref
gc.disable()
def forked(a):
    main, side = tg.current_stream(), tg.Stream()
    side.wait_stream(main)
    with tg.stream(side):
        left = jnp.sin(a)
    right = jnp.cos(a)
    main.wait_stream(side)
    return left + right

for mode in ("whole", "partial"):
    captured = tg.capture(forked, mode=mode)
    assert read(captured(put(x, "data"))) == read(jax.jit(
        lambda a: jnp.sin(a) + jnp.cos(a))(put(x, "data")))
    watched = weakref.ref(captured), weakref.ref(captured._latest)
    del captured
    assert [each() for each in watched] == [None, None]
gc.enable()

# Closed-over arrays on the same devices.
weight = put(w["w"])
close = tg.capture(lambda a: a @ weight)
assert read(close(put(x, "data"))) == read(jax.jit(close.__wrapped__)(put(x, "data")))

# Static arguments and keywords.
def raised(a, n, *, scale):
    return a ** n * scale

power, twin = tg.capture(raised, static_argnums=1), jax.jit(raised, static_argnums=1)
for n in (2, 3):
    given = (put(x, "data"), n)
    assert read(power(*given, scale=put(2.0))) == read(twin(*given, scale=put(2.0)))

# From four threads at once: collectives are started in one order, and one thread's calls are over
# before another's begin. Results are kept until then, as the futures do it.
import concurrent.futures
psum, gather = tg.capture(FUNCTIONS["all-reduce"]), tg.capture(FUNCTIONS["all-gather"])
batch = put(x, "data")
expected = [np.asarray(f(batch)) for f in (psum, gather)]
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    futures = [pool.submit(f, batch) for _ in range(20) for f in (psum, gather)]
    for index, future in enumerate(futures):
        assert np.array_equal(future.result(), expected[index % 2])
print("ok")
"""
)

REFUSALS = (
    START
    + """
def add(a, b):
    return a + b

step = tg.capture(add, name="add")
batch = put(x, "data")
back = Mesh(np.array(devices)[::-1], ("data",))
pair = Mesh(np.array(devices)[:2], ("data",))
OTHERS = [
    jax.device_put(x, devices[1]),
    jax.device_put(x, devices[0]),
    put(x, "data", over=pair),
    put(x, "data", over=back),
]
for other in OTHERS:
    for args in ((batch, other), (other, batch)):
        error = refuse(step, *args)
        assert error.anchor == "mixed-devices" and "argument" in error.where, error
    # And nothing is lost.
    assert np.array_equal(step(batch, batch), x + x)
assert "in this order" in error.what

# A graph of one mesh is not called with arrays of another, whose devices are named.
compiled = step.lower(batch, batch).compile()
for over in (back, Mesh(np.array(devices)[[1, 0, 2, 3]], ("data",))):
    given = put(x, "data", over=over)
    error = refuse(compiled, given, given, kind=tg.ReplayError)
    wanted, got = (", ".join(map(str, each)) for each in (devices, over.devices))
    assert f"on {wanted}, got" in error.where and f"on {got}" in error.where, error
assert np.array_equal(compiled(batch, batch), x + x)

# Values inside of a replay, and the op that made a NaN.
seen = tg.capture(lambda x: jnp.log(tg.probe("y", x * 2)).sum(), debug_nans=True)
ones = put(np.ones((8, 2), np.float32), "data")
for _ in range(2):
    assert np.allclose(seen(ones), 16 * np.log(2), rtol=1e-5)
    assert np.array_equal(seen.probes()["y"], np.full((8, 2), 2))
assert "probe 'y'" in str(seen.explain(ones).show("regions"))
try:
    seen(-ones)
    raise AssertionError
except tg.InvalidFloatError as error:
    assert "16 NaN of 16 elements in log" in str(error), error

# A mesh that the function names itself.
doubled = jax.shard_map(lambda x: x * 2, mesh=pair, in_specs=P("data"), out_specs=P("data"))
for mode in ("whole", "partial"):
    error = refuse(tg.capture(doubled, mode=mode), batch)
    assert error.anchor == "mixed-devices" and "shard_map is on" in error.what, error
    assert "<string>" in error.where, error
assert refuse(tg.capture(doubled), OTHERS[1]).anchor == "mixed-devices"
assert np.array_equal(tg.capture(doubled)(x), x * 2)

# No eager parts, no buffers of one device, no nodes.
def talk(a):
    jax.debug.callback(lambda b: None, a)
    return a + 1

for mode in ("whole", "partial"):
    assert refuse(tg.capture(talk, mode=mode), batch).anchor == "callback"
assert refuse(tg.capture(lambda a: a + 1, outputs="static"), batch).anchor == "several-devices"

padded = tg.capture(lambda a: a + 1, buckets={"a": {0: (8, 16)}})
assert refuse(padded, batch).anchor == "other-device"
assert step.probes() == {}

# With-blocks and graphed callables are of one device.
assert refuse(lambda: tg.make_graphed_callables(lambda a: a + 1, (batch,))).anchor == "other-device"

# A planted fault: a result that is in the wrong bits on one device.
from tracegraph.replaying import spread_call
run = spread_call.SpreadCall.run
calls = []

def spoil(self, leaves):
    results = list(run(self, leaves))
    parts = [s.data for s in results[0].addressable_shards]
    parts[2] = parts[2] + 1
    return [jax.make_array_from_single_device_arrays(
        results[0].shape, results[0].sharding, parts)]

spread_call.SpreadCall.run = spoil
single = tg.capture(lambda a: (a * 2,), name="single")
error = refuse(single, batch, kind=tg.VerificationError)
assert "result[0] on" in error.where and str(devices[2]) in error.where, error
spread_call.SpreadCall.run = run
assert np.array_equal(single(batch)[0], x * 2)
print("ok")
"""
)


def test_a_training_step_over_four_devices():
    assert run_program(TRAINING, **FOUR) == "ok\n"


def test_collectives_inside_of_a_capture():
    assert run_program(COLLECTIVES, **FOUR) == "ok\n"


def test_what_is_refused_over_several_devices():
    assert run_program(REFUSALS, **FOUR) == "ok\n"


def test_blocks_of_the_page_run():
    page = (ROOT / "docs" / "data_parallel.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    printed = run_program("\n".join(blocks))
    (shown,) = re.findall(r"^```text\n(.*?)^  \.\.\.\n```", page, re.MULTILINE | re.DOTALL)
    # Releases of JAX name CPU devices differently.
    assert re.sub(r"\(.*?_0, .*\)|\(cpu:0, .*\)", "()", printed).startswith(
        re.sub(r"\(TFRT_CPU_0, .*\)", "()", shown)
    )
