"""Arguments on other devices, in a process that has two CPU devices."""

from tests.processes import run_program

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg

first, second = jax.devices()
double = tg.capture(lambda x: x * 2, name="double")
here = jnp.arange(3.0)
assert np.array_equal(double(here), here * 2)

# Not committed: JAX would move it, and so does a replay, also when its type is known already.
with jax.default_device(second):
    there = jnp.arange(3.0) + 1
assert there.devices() == {second}
for _ in range(2):
    assert np.array_equal(double(there), np.arange(3.0) * 2 + 2)
    assert np.array_equal(double(here), here * 2)

# Committed: the user has said where it belongs.
for captured in (double, tg.capture(lambda x: x * 2, name="double")):
    try:
        captured(jax.device_put(here, second))
    except tg.CaptureError as error:
        assert error.anchor == "other-device", error
    else:
        raise SystemExit("accepted")
    assert np.array_equal(captured(here), here * 2)

# A graph of the other device, with state that stays there.
with jax.default_device(second):
    step = tg.capture(lambda w, x: (w + x, w.sum()), donate_argnums=0)
    w = jnp.zeros(3)
    for _ in range(3):
        w, total = step(w, jnp.ones(3))
    assert w.devices() == total.devices() == {second}
    assert np.array_equal(w, np.full(3, 3.0)) and float(total) == 6.0
print("ok")
"""


def test_two_devices():
    flags = "--xla_force_host_platform_device_count=2"
    assert run_program(PROGRAM, XLA_FLAGS=flags) == "ok\n"
