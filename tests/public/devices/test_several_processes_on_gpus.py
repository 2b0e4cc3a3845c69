"""Captures over GPUs of two processes without one: graphs of CPU devices, cut at a collective."""

from __future__ import annotations

from tests.several_processes import run_together

PROGRAM = """
import gc, weakref
import pytest
from tests.fakes.spread_on_host import capture_for_gpus
from tracegraph.capturing import spread_capture
find_times = spread_capture.time_spread

gpus = capture_for_gpus(pytest.MonkeyPatch())
capture = functools.partial(tg.capture, mode="partial", prefer="graph")

# A train step equals that of jax.jit on every device, with its state in place.
w = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
x = put(np.arange(24, dtype=np.float32).reshape(8, 3) / 8, split)
step, twin = capture(train, donate_argnums=0, name="train"), jax.jit(train, donate_argnums=0)
ours, theirs = put(w, whole), put(w, whole)
places = None
for scale in (1, -2, 0.5):
    given, batch = ours, x * scale
    ours, value = step(ours, batch)
    theirs, wanted = twin(theirs, batch)
    assert read((ours, value)) == read((theirs, wanted))
    assert given.is_deleted() and not ours.is_fully_addressable
    found = [part.data.unsafe_buffer_pointer() for part in ours.addressable_shards]
    assert isinstance(ours, tg.Array) and ours.sharding == theirs.sharding
assert step.cache_info().misses == 1
# Each GPU of this process launches two graphs per replay: two to verify, three calls.
launches = [gpu.driver.count_calls("launch") for gpu in gpus]
assert launches[0] == launches[1] >= 10, launches
report = step.explain(ours, x)
assert "cuts: 2 graphs, 1 eager part" in report, report
assert "eager because processes exchange 4 bytes a GPU: collective-permute" in report, report
assert "stage 1: eager" in report.show("nodes"), report.show("nodes")

# What is in no process yet is put where it belongs by each.
scale = capture(lambda a, b: (a * b + 1).sum(1))
for b in (3, np.float32(2), np.arange(3, dtype=np.float32), jnp.ones(3)):
    wanted = (np.arange(24, dtype=np.float32).reshape(8, 3) / 8 * np.asarray(b) + 1).sum(1)
    for part in scale(x, b).addressable_shards:
        assert np.array_equal(part.data, wanted[part.index]), b

# Different programs, and one that fails in one process: refused in both; the next one works.
refuse(capture, lambda x: x.sum() * (2 + own), x)
def fail(x):
    if own:
        raise ValueError("planted")
    return x.sum()
refuse(capture, fail, x, kind=Exception)
assert float(capture(lambda x: x.sum() * 4)(x).addressable_data(0)) == 4 * 276 / 8

# Where jax.jit is not slower, its program is called: all processes decide so, or none.
for factor, kind in ((1e3, "as jax.jit"), (1e-3, "with the graph")):
    def time_both(*args):
        ours, theirs = find_times(*args)
        # Of two processes the slower one counts.
        return (ours * factor, theirs) if own else (0.0, theirs)
    spread_capture.time_spread = time_both
    total = lambda x: x.sum() * factor
    fastest = tg.capture(total, mode="partial", name="fastest")
    value = fastest(x)
    assert read(value) == read(jax.jit(total)(x))
    assert f"calls run {kind}" in fastest.explain(x), fastest.explain(x)
    assert type(value) is (tg.Array if factor < 1 else type(x))

# All memory goes with the last names.
gc.collect()
gc.disable()
reference = weakref.ref(step)
del step, ours, value, given, report
assert reference() is None
"""


def test_graphs_of_two_processes_are_cut_at_collectives() -> None:
    first, second = run_together(PROGRAM)
    assert first == [
        "`<lambda>` is not captured: process 1 captures another program, `<lambda>`",
        "`fail` is not captured: process 1 failed: ValueError: planted",
    ]
    assert second == [
        "`<lambda>` is not captured: process 0 captures another program, `<lambda>`",
        "planted",
    ]
