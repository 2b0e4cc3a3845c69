"""Graphed callables on several devices: samples and calls of one device, graphs for each."""

from __future__ import annotations

from tests.processes import run_program

PROGRAM = """
import jax, jax.numpy as jnp, tracegraph as tg

def refuse(call):
    try:
        call()
    except tg.CaptureError as error:
        assert "argument 1 `b` is on another device" in str(error), error
    else:
        raise AssertionError("not refused")

first, second = jax.devices()
a = jnp.ones(3)
b = jax.device_put(a, second)

def multiply(a, b):
    return a * b

refuse(lambda: tg.make_graphed_callables(multiply, (a, b)))
graphed = tg.make_graphed_callables(multiply, (a, a))
refuse(lambda: graphed(a, b))
refuse(lambda: jax.grad(lambda a: graphed(a, b).sum())(a))
with jax.default_device(second):
    assert graphed(b, b).devices() == {second}
    assert jax.grad(lambda a: graphed(a, b).sum())(b).devices() == {second}
assert graphed(a, a).devices() == {first}
print("ok")
"""


def test_two_devices():
    flags = "--xla_force_host_platform_device_count=2"
    assert run_program(PROGRAM, XLA_FLAGS=flags) == "ok\n"
