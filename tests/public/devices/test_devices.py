"""Devices: the current one, what they are, what a capture belongs to; on two CPU devices too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import tracegraph as tg
from tests.processes import run_program
from tracegraph.runtime import default_device
from tracegraph.runtime.device_properties import DeviceProperties

TWO_DEVICES = "--xla_force_host_platform_device_count=2"

CURRENT = """
import threading
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg

first, second = jax.devices()

def read():
    return tg.current_device(), jnp.ones(1).devices().pop().id

assert read() == (0, 0)
with tg.device(1):
    assert read() == (1, 1)
    with tg.device(first):
        assert read() == (0, 0)
    with tg.device(None):
        assert read() == (1, 1)
    # A with-block ends what is set in it.
    tg.set_device(0)
    assert read() == (0, 0)
assert read() == (0, 0)
with tg.device_of(jax.device_put(1.0, second)):
    assert read() == (1, 1)
with jax.default_device(second):
    assert read() == (1, 1)

# Of this thread alone.
tg.set_device(1)
seen = []
thread = threading.Thread(target=lambda: seen.append(read()))
thread.start()
thread.join()
assert seen == [(0, 0)] and read() == (1, 1)
tg.set_device(0)
assert read() == (0, 0)

# An exception ends the block too.
try:
    with tg.device(1):
        raise KeyError
except KeyError:
    assert read() == (0, 0)

assert tg.can_device_access_peer(0, 1) and not tg.can_device_access_peer(1, second)
assert not tg.is_available() and tg.device_count() == 0
mesh = jax.sharding.Mesh([first, second], ("i",))
pair = jax.device_put(jnp.zeros(2), jax.NamedSharding(mesh, jax.P("i")))
try:
    tg.device_of(pair).__enter__()
except tg.ConfigError as error:
    assert error.what == "`array` is on 2 devices", error
else:
    raise SystemExit("accepted")
print("ok")
"""

CAPTURE = """
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg

first, second = jax.devices()
double = tg.capture(lambda x: x * 2, name="double")
here, there = jax.device_put(jnp.arange(3.0), first), jax.device_put(jnp.arange(3.0), second)
plain = np.arange(3.0, dtype=np.float32)

def check(x, device):
    result = double(x)
    assert result.devices() == {device} and np.array_equal(result, np.arange(3.0) * 2), result

# One graph for each device, in memory of that device.
for _ in range(2):
    check(plain, first)
    with tg.device(1):
        check(plain, second)
        check(there, second)
    check(here, first)
assert double.cache_info().captures == 2, double.cache_info()
# Naming the device that is the current one anyway is no other signature.
with tg.device(0):
    check(plain, first)
assert double.cache_info().captures == 2
# The pool is that of the current device, if it has one.
with tg.device(1):
    pool = double.pool()
assert pool != double.pool() and double.pool_bytes == sum(map(tg.memory.memory_reserved, (0, 1)))
bytes_of = tg.memory.memory_allocated
assert bytes_of(0) > 0 and bytes_of(1) > 0
before = bytes_of(0)
with tg.device(1):
    step = tg.capture(lambda w, x: (w + x, w.sum()), donate_argnums=0)
    w = jnp.zeros(3)
    for _ in range(3):
        w, total = step(w, plain)
    assert w.devices() == total.devices() == {second} and float(total) == 6.0
assert bytes_of(0) == before
# So a function that was only called on the second one need not be asked there.
pool, nbytes = step.pool(), step.pool_bytes
with tg.device(1):
    assert (step.pool(), step.pool_bytes) == (pool, nbytes) and nbytes > 0

# Operands on two devices: both ways out are named, and both work.
add = tg.capture(lambda x, y: x + y, name="add")
try:
    add(here, there)
except tg.CaptureError as error:
    assert error.what == "argument 1 `y` is on another device: wanted cpu:0, got cpu:1", error
    assert error.fix.startswith(
        "move it first: jax.device_put(x, device), or call it in `with tg.device(1):`"
    ), error.fix
else:
    raise SystemExit("accepted")
assert np.array_equal(add(here, jax.device_put(there, first)), plain * 2)
with tg.device(1):
    assert np.array_equal(add(jax.device_put(here, second), there), plain * 2)

# A pool that was given is of one device.
shared = tg.capture(lambda x: x + 1, pool=double.pool())
try:
    with tg.device(1):
        shared(plain)
except tg.TracegraphError as error:
    assert error.anchor == "pool", error
else:
    raise SystemExit("accepted")
assert np.array_equal(shared(plain), plain + 1)

# The device belongs to the call, not into the function.
def move(x):
    with tg.device(1):
        return x * 2

def set_it(x):
    tg.set_device(1)
    return x * 2

for wrong, call in ((move, "device"), (set_it, "set_device")):
    try:
        tg.capture(wrong)(plain)
    except tg.CaptureError as error:
        assert error.anchor == "set-device" and error.what.startswith(f"{call} changes"), error
    else:
        raise SystemExit("accepted")
    assert tg.current_device() == 0

@tg.capture
def stay(x):
    with tg.device(0), tg.device_of(x):
        return x * 2
assert np.array_equal(stay(plain), plain * 2)
print("ok")
"""

BEFORE_A_FORK = """
import os, sys
import tracegraph as tg
from tracegraph.runtime.jax_interop import has_backends

assert tg.is_available() == (tg.device_count() > 0)
assert not has_backends()
child = os.fork()
if not child:
    import jax.numpy as jnp
    os._exit(int(jnp.arange(4.0).sum()))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
print("ok")
"""


@pytest.mark.parametrize("program", [CURRENT, CAPTURE, BEFORE_A_FORK])
def test_two_devices(program: str) -> None:
    assert run_program(program, XLA_FLAGS=TWO_DEVICES) == "ok\n"


@pytest.fixture
def thread_default() -> Iterator[None]:
    """Undoes what a test sets for its thread."""
    with jax.default_device(None):
        yield


@pytest.mark.parametrize("index", [7, -1, True, "cuda:0", 1.0])
@pytest.mark.parametrize(
    "call",
    [
        tg.set_device,
        lambda i: tg.device(i).__enter__(),
        tg.get_device_properties,
        tg.get_device_name,
        tg.get_device_capability,
        lambda i: tg.can_device_access_peer(i, 0),
    ],
    ids=["set_device", "device", "properties", "name", "capability", "peer"],
)
@pytest.mark.usefixtures("thread_default")
def test_a_device_that_does_not_exist(call: Callable[[Any], Any], index: Any) -> None:
    with pytest.raises(tg.ConfigError) as raised:
        call(index)
    last = len(jax.local_devices()) - 1
    assert str(raised.value) == (
        f"`device` is {index!r}\n"
        "  where: argument `device`\n"
        f"  why:   this process has the devices {', '.join(map(str, jax.local_devices()))}\n"
        f"  fix:   pass an index from 0 to {last}, a JAX device of these, or leave it out"
        "          python -m tracegraph error device"
    )
    assert tg.current_device() == 0


def test_a_peer_that_does_not_exist() -> None:
    with pytest.raises(tg.ConfigError, match="argument `peer_device`"):
        tg.can_device_access_peer(0, 64)


def test_the_host_device_is_described() -> None:
    found = tg.get_device_properties()
    assert found == tg.get_device_properties(0) == tg.get_device_properties(jax.devices()[0])
    assert (found.name, found.total_memory) == ("cpu", tg.memory.mem_get_info()[1])
    assert found.multi_processor_count >= 1
    assert tg.get_device_name() == "cpu"
    assert tg.get_device_capability() == (0, 0)
    assert tg.get_arch_list() == []


def test_only_an_array_of_jax_has_a_device() -> None:
    with pytest.raises(tg.ConfigError, match="`array` is a ndarray"):
        tg.device_of(np.zeros(3)).__enter__()  # pyright: ignore[reportArgumentType]


class Gpu:
    """A GPU of JAX that is only looked at."""

    platform, device_kind, local_hardware_id = "gpu", "NVIDIA H200", 0

    def __repr__(self) -> str:
        return "cuda:0"


def test_a_gpu_is_described_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, local_devices = [Gpu(), Gpu()], jax.local_devices
    found = DeviceProperties("NVIDIA H200", major=9)
    monkeypatch.setattr(
        jax, "local_devices", lambda backend=None: gpus if backend is None else local_devices()
    )
    monkeypatch.setattr(default_device, "read_gpu_properties", lambda gpu: found)
    monkeypatch.setattr(default_device, "can_gpu_access_peer", lambda *pair: pair == tuple(gpus))
    assert tg.get_device_properties(1) is found
    assert tg.get_device_capability(0) == (9, 0)
    assert tg.get_device_name(1) == "NVIDIA H200"
    assert tg.get_arch_list() == ["sm_90"]
    assert tg.can_device_access_peer(0, 1)
    assert not tg.can_device_access_peer(1, 0)
    # Memory of another kind of device is never peer memory.
    assert not tg.can_device_access_peer(0, local_devices()[0])
    # The current one of this thread is a CPU, and indices are those of the GPUs.
    with jax.default_device(local_devices()[0]):
        with pytest.raises(tg.ConfigError) as raised:
            tg.current_device()
        assert raised.value.what == f"the current device, {local_devices()[0]}, has no index"
