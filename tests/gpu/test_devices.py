"""Devices of a real machine: counted before CUDA starts, described, each with its own graphs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.subprocesses import run_python

pytestmark = pytest.mark.usefixtures("gpu")

FORK = """
import ctypes, os
import tracegraph as tg
from tracegraph.runtime.jax_interop import has_backends

count = tg.device_count()
assert tg.is_available() and not has_backends(), count
# Plugins of JAX may load the driver; started it would have a context, or none, but not this error.
not_initialized, context = 3, ctypes.c_void_p()
found = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
assert found == not_initialized, found
child = os.fork()
if not child:
    import jax.numpy as jnp
    double = tg.capture(lambda x: x * 2)
    assert tg.device_count() == count, (tg.device_count(), count)
    os._exit(int(double(jnp.arange(4.0)).sum()))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 12
print(count)
"""


FORK_TOO_LATE = """
import os, warnings
import jax.numpy as jnp
import tracegraph as tg

# JAX warns of each fork.
warnings.simplefilter("ignore")
x, g = tg.static_input((4,)), tg.CUDAGraph()
with tg.graph(g):
    y = x * 2
g.replay()
tg.synchronize()
child = os.fork()
if not child:
    try:
        g.replay()
    except tg.CudaError as error:
        os._exit(7 if "forked" in str(error) and "spawn" in error.fix else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
x.copy_(jnp.ones(4))
g.replay()
print(y.tolist())
"""


def test_gpus_are_counted_before_a_fork():
    done = run_python(["-c", FORK])
    assert (done.returncode, done.stdout) == (0, f"{len(jax.local_devices())}\n"), done.stderr


def test_a_forked_child_that_uses_cuda_is_told_so(gpu):
    done = run_python(["-c", FORK_TOO_LATE])
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0, 2.0, 2.0]\n"), done.stderr


def test_a_gpu_that_is_hidden_is_not_counted():
    program = "import tracegraph as tg; print(tg.device_count(), tg.is_available())"
    done = run_python(["-c", program], variables={"CUDA_VISIBLE_DEVICES": "-1"})
    assert done.stdout == "0 False\n", done.stderr


def test_a_gpu_is_described(gpu):
    found = tg.get_device_properties(gpu)
    assert (found.major, found.minor) == tg.get_device_capability(0)
    assert f"{found.major}.{found.minor}" == gpu.compute_capability
    assert found.name == gpu.device_kind == tg.get_device_name()
    assert found.multi_processor_count == gpu.core_count
    assert found.total_memory > 1 << 30
    assert found.warp_size == 32
    assert len(found.uuid) == 36
    assert tg.get_arch_list() == [f"sm_{found.major}{found.minor}"]


def test_telemetry():
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    for _ in range(50):
        jnp.matmul(jnp.ones((2048, 2048)), jnp.ones((2048, 2048)))
    assert 0 <= tg.utilization() <= 100
    assert 0 <= tg.memory_usage() <= 100
    assert 0 < tg.temperature() < 120
    assert tg.power_draw() > 1000
    assert tg.clock_rate() > 100
    assert tg.list_gpu_processes().startswith("GPU:0\n")


def test_a_capture_on_the_second_gpu(two_gpus):
    second = two_gpus[1]
    step = tg.capture(lambda w, x: (w * 0.5 + x @ x, w.sum()), donate_argnums=0)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    w = jnp.zeros(())
    for device in (0, 1, 0, 1):
        with tg.device(device):
            w, total = step(jnp.zeros((4, 4)), x)
            for _ in range(2):
                w, total = step(w, x)
            assert w.devices() == total.devices() == {two_gpus[device]}
        np.testing.assert_allclose(w, 1.75 * (x @ x), rtol=1e-6)
    assert step.cache_info().captures == 2
    assert tg.memory.memory_allocated(1) > 0
    with pytest.raises(tg.CaptureError) as raised:
        step(w, jax.device_put(x, second))
    assert raised.value.anchor == "other-device"
    assert "with tg.device(1):" in raised.value.fix
