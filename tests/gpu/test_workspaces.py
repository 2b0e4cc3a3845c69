"""Workspaces of matmuls on a GPU: part of the pool, and no more after 100 captures."""

import gc

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.device_memory import measure_used_bytes
from tracegraph.lowering.workspaces import measure_workspaces
from tracegraph.runtime.cuda.device import CudaDevice
from tracegraph.runtime.cuda.memory.events import CudaEvents
from tracegraph.runtime.default_device import find_device

pytestmark = pytest.mark.usefixtures("gpu")
GROWTH_LIMIT_BYTES = 100_000_000


def make_operands():
    """Complex numbers are multiplied by cublasLt, whatever XLA's own kernels can do."""
    rng = np.random.default_rng(0)
    pairs = [rng.normal(size=(2, *shape)) for shape in ((1024, 512), (512, 64))]
    return tuple(jnp.asarray(real + 1j * imaginary, jnp.complex64) for real, imaginary in pairs)


def find_gpu():
    device = find_device(is_checking=False)
    assert isinstance(device, CudaDevice)
    return device


def measure_bytes_outside_jax():
    """Returns the bytes in use on the GPU without those that JAX's allocator holds, used or not."""
    device = find_gpu()
    with device.context.order.use_context():
        free_bytes, total_bytes = device.context.driver.read_memory()
    return total_bytes - free_bytes - device.jax_device.memory_stats()["pool_bytes"]


def test_the_workspace_is_part_of_the_pool():
    captured = tg.capture(lambda x, y: x @ y)
    definition = captured.lower(*make_operands()).lowered.definition
    workspaces = measure_workspaces(definition)
    # XLA gives none where the algorithm that it has measured needs none.
    assert workspaces.count in (0, 1)
    assert workspaces.arena_bytes <= definition.arena_size.scratch_bytes
    assert captured(*make_operands()).shape == (1024, 64)


@pytest.mark.usefixtures("alone_on_gpu", "untried")
def test_repeat_graph_capture_cublas_workspace_memory():
    """As PyTorch tests it: a hundred captures of a matmul, each in a graph of its own."""
    operands = make_operands()
    expected = operands[0] @ operands[1]

    def capture():
        captured = tg.capture(lambda x, y: x @ y, verify=False)
        y = captured(*operands)
        assert jnp.allclose(y, expected, rtol=1e-3, atol=1e-3)

    capture()
    gc.collect()
    before, outside = measure_used_bytes(), measure_bytes_outside_jax()
    for _ in range(100):
        capture()
    assert measure_used_bytes() <= before
    assert measure_bytes_outside_jax() - outside < GROWTH_LIMIT_BYTES


def test_events_are_recorded_on_the_stream_of_jax():
    device = find_gpu()
    events = CudaEvents(device.context.driver)
    with device.context.order.use_context():
        event = events.record(device.context.order.stream)
        events.synchronize(event)
        assert events.is_done(event)
        events.release(event)
        assert events.record(device.context.order.stream) == event
