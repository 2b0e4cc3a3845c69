"""`tg.CUDAGraph` on one of two devices."""

from __future__ import annotations

from tests.processes import run_program

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg

first, second = jax.devices()
far = jax.device_put(jnp.ones(4), second)
here = tg.static_input((4,))
with tg.device(1):
    x, g = tg.static_input((4,)), tg.CUDAGraph()
    with tg.graph(g):
        y = x + 1
    assert x.devices() == y.devices() == {second}, (x.devices(), y.devices())
# A graph runs where it was captured, wherever it is replayed.
x.copy_(np.full(4, 2, np.float32))
g.replay()
assert np.array_equal(y, np.full(4, 3.0)), y

def read_plain(): return far + here
def read_input(): return here + x
def read_output(): return y * 2
def write(): here.copy_(far)
def call(): return jax.jit(jnp.sin)(far)

key = jax.device_put(jax.random.key(0), second)
def read_key(): return jax.random.normal(key, (3,))

for read in (read_plain, read_key, read_input, read_output, write, call):
    h = tg.CUDAGraph()
    try:
        with tg.graph(h):
            read()
    except tg.CaptureError as error:
        line = read.__code__.co_firstlineno
        assert error.anchor == "other-device", error
        assert f":{line} in {read.__name__}" in error.where, (line, error)
        assert "cpu:1" in error.what or "CPU_1" in error.what, error
        assert "with tg.device" in error.fix
    else:
        raise SystemExit(f"{read} was recorded")
    assert not tg.is_current_stream_capturing()
    with tg.graph(h):
        z = here + 1
    h.replay()
    assert np.array_equal(z, np.ones(4)), z

# What is on no device of its own is moved, as by `jax.jit`.
with jax.default_device(second):
    loose = jnp.arange(4.0)
h = tg.CUDAGraph()
with tg.graph(h):
    z = loose * 2
h.replay()
assert z.devices() == {first} and np.array_equal(z, np.arange(4.0) * 2)
# The source of a copy may be anywhere, and so may be what an input is made from.
for mixed in (here, tg.static_input(far * 3)):
    mixed.copy_(far)
    assert np.array_equal(mixed, np.ones(4)) and mixed.devices() == {first}
    assert mixed.jax().devices() == {first} and not mixed.jax().committed
    h = tg.CUDAGraph()
    with tg.graph(h):
        z = mixed * 2
    for value in (far, far * 5, here):
        mixed.copy_(value)
        h.replay()
        assert np.array_equal(z, 2 * np.asarray(value)), z
print("ok")
"""


def test_a_block_reads_arrays_of_its_device_only():
    flags = "--xla_force_host_platform_device_count=2"
    assert run_program(PROGRAM, XLA_FLAGS=flags) == "ok\n"
