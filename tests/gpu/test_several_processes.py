"""Captures over the GPUs of two processes: graphs on each, and XLA between; needs two GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.gpu.subprocesses import run_python
from tests.several_processes import run_together

# Kernels that wait for the other process are slow where others have the GPU.
pytestmark = pytest.mark.usefixtures("two_gpus", "alone_on_gpu")

PROGRAM = """
from jax import lax

def spread(function):
    over = {"mesh": mesh, "in_specs": jax.P("data"), "out_specs": jax.P("data")}
    return jax.shard_map(function, check_vma=False, **over)

capture = functools.partial(tg.capture, mode="partial", prefer="graph")
rng = np.random.default_rng(7)

# 1. Every kind of collective, several types and sizes, bit for bit.
each = {
    "all_gather": lambda x: lax.all_gather(jnp.sin(x), "data", tiled=True)[: x.shape[0]],
    "columns": lambda x: lax.all_gather(x, "data", axis=1, tiled=True),
    "reduce_scatter": lambda x: lax.psum_scatter(jnp.tile(x, (2, 1)), "data", tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x * 3, "data", 0, 0, tiled=True),
    "permute": lambda x: lax.ppermute(x + 1, "data", [(0, 1), (1, 0)]),
    "send": lambda x: lax.ppermute(x + 1, "data", [(0, 1)]),
    "number": lambda x: x * (lax.axis_index("data") + 2),
    "sums": lambda x: lax.psum(jnp.sin(x), "data") + lax.psum(x * x, "data") * lax.pmax(x, "data"),
    "least": lambda x: lax.pmin(x * 2, "data"),
}
for shape in ((64, 32), (1024, 513)):
    for name, function in each.items():
        captured, wanted = capture(spread(function), name=name), jax.jit(spread(function))
        for sign in (1, -1, 0.5):
            given = put(rng.normal(size=shape).astype(np.float32) * np.float32(sign), split)
            assert read(captured(given)) == read(wanted(given)), (name, shape)
        assert captured.cache_info().captures == 1
        stages = captured.explain(given).show("nodes").count(": eager")
        assert stages == (name != "number"), (name, stages)
for dtype in ("bfloat16", "float16", "int32", "uint8"):
    given = put(np.asarray(jnp.asarray(rng.normal(size=74) * 9).astype(dtype)), split)
    for reduce in (lax.psum, lax.pmax, lax.pmin):
        function = spread(lambda x: reduce(x, "data"))
        assert read(capture(function)(given)) == read(jax.jit(function)(given)), dtype

# 2. A train step, its state in place.
w = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
x = put(np.arange(24, dtype=np.float32).reshape(8, 3) / 8, split)
step, twin = capture(train, donate_argnums=0, name="train"), jax.jit(train, donate_argnums=0)
ours, theirs = put(w, whole), put(w, whole)
places = None
for scale in (1, -2, 0.5, 1, 2):
    given = ours
    ours, value = step(ours, x * scale)
    theirs, wanted = twin(theirs, x * scale)
    assert read((ours, value)) == read((theirs, wanted))
    assert given.is_deleted() and places in (None, ours.data_ptr())
    places = ours.data_ptr()
assert step.cache_info().captures == 1
doubled = jax.jit(lambda p: p * 2)(ours)
assert read(doubled) == read(jax.jit(lambda p: p * 2)(theirs))

# 3. Values that are in no process yet; keys.
def noisy(key, x, scale, shift):
    return (jax.random.normal(key, x.shape) * scale + x + shift).sum(0)
noise = capture(noisy)
for seed in range(3):
    others = 2.0 + seed, np.arange(3, dtype=np.float32)
    assert read(noise(jax.random.key(seed), x, *others)) == read(
        jax.jit(noisy)(jax.random.key(seed), x, *others))

# 4. Refused: in whole mode, in a loop, in one process only. The next call works.
whole_error = refuse(tg.capture, train, ours, x)
assert 'mode="partial"' in whole_error.fix, whole_error
loop = spread(lambda x: lax.fori_loop(0, 3000, lambda i, c: lax.pmean(c, "data") * 0.99, x))
loop_error = refuse(capture, loop, x, kind=tg.UnsupportedError)
assert "unroll" in loop_error.fix, loop_error
def fail(x):
    if own:
        raise ValueError("planted")
    return x.sum()
refuse(capture, fail, x, kind=Exception)
refuse(capture, lambda x: x.sum() * (2 + own), x)
short = spread(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(lax.pmean(c, "data")), x))
assert read(capture(short)(x)) == read(jax.jit(short)(x))

# 5. By default the faster one runs, the same in both processes.
fastest = tg.capture(train, mode="partial", donate_argnums=0, name="fastest")
ours, value = fastest(put(w, whole), x)
assert "calls run" in fastest.explain(ours, x), fastest.explain(ours, x)
for _ in range(3):
    ours, value = fastest(ours, x)
fastest.release()
ours, value = fastest(ours, x)
theirs = put(w, whole)
for _ in range(5):
    theirs, wanted = twin(theirs, x)
assert read((ours, value)) == read((theirs, wanted))
"""
LOOP = "has a collective over several processes inside of a loop"


def run_on_gpus(programs: Sequence[Sequence[Any]]) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run_python, programs))


def test_graphs_of_two_processes_are_cut_at_collectives() -> None:
    first, second = run_together(PROGRAM, run=run_on_gpus, devices="[own]")
    for lines in (first, second):
        assert "is on the devices of 2 processes" in lines[0], lines
        assert lines[1].endswith(LOOP), lines
    assert first[2].endswith("process 1 failed: ValueError: planted")
    assert second[2] == "planted"
    assert all("captures another program" in lines[3] for lines in (first, second))
