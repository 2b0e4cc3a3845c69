"""Addresses of an executable graph change without building it again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import assert_replayed, find_captured
from tracegraph.runtime.cuda.device import find_cuda_device
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode, KernelNode

pytestmark = pytest.mark.usefixtures("gpu")
SIZE = 1000


@pytest.fixture
def cuda(gpu):
    """The device behind the captures, with the driver that it uses."""
    return find_cuda_device(gpu)


@pytest.fixture
def kernels(cuda):
    return KernelLoader(cuda.context.driver, cuda.context.order.primary)


def use(buffer, nbytes=SIZE * 4, offset=0):
    return BufferUse(buffer, offset, nbytes)


def make_locate(arrays):
    """Returns what finds a byte range in arrays of JAX by their names."""
    pointers = {name: array.unsafe_buffer_pointer() for name, array in arrays.items()}
    return lambda each: pointers[each.buffer] + each.offset


def make_arrays(**values):
    arrays = {name: jnp.full((SIZE,), float(value)) for name, value in values.items()}
    jax.block_until_ready(arrays)
    return arrays


def launch_and_wait(cuda, graph):
    driver = cuda.context.driver
    with driver.use_context(cuda.context.order.primary):
        stream = driver.create_stream()
        try:
            graph.launcher(stream)()
            driver.synchronize_stream(stream)
        finally:
            driver.destroy_stream(stream)


def make_halves(value):
    """Returns what a copy leaves whose second half is then filled with zero."""
    return np.repeat(np.array([value, 0], np.float32), SIZE // 2)


def test_copies_and_fills_are_patched(cuda, kernels):
    """The second half of the target is filled after it was copied, so the edge matters too."""
    nodes = (
        CopyNode("copy", use("source"), use("target")),
        FillNode("fill", use("target", SIZE * 2, SIZE * 2)),
    )
    arrays = make_arrays(source=3, other=5, target=-1, elsewhere=-1)
    locate = make_locate(arrays)
    graph = CudaGraph(cuda.context.driver, Stage(nodes, ((0, 1),)), locate, kernels, {}, "patched")
    handles = graph.handles
    launch_and_wait(cuda, graph)
    wanted = make_halves(3)
    assert np.array_equal(np.asarray(arrays["target"] + 0), wanted)

    moved = {"source": arrays["other"], "target": arrays["elsewhere"]}
    assert graph.can_rebind("source")
    assert graph.update(make_locate(moved)) == 2
    launch_and_wait(cuda, graph)
    assert np.array_equal(np.asarray(arrays["elsewhere"] + 0), make_halves(5))
    assert np.array_equal(np.asarray(arrays["target"] + 0), wanted)
    assert graph.update(make_locate(moved)) == 0
    assert graph.handles == handles


def test_only_the_nodes_of_a_moved_buffer_change(cuda, kernels):
    nodes = (
        CopyNode("first", use("a"), use("x")),
        CopyNode("second", use("b"), use("y")),
    )
    arrays = make_arrays(a=1, b=2, c=3, x=0, y=0)
    graph = CudaGraph(
        cuda.context.driver, Stage(nodes, ()), make_locate(arrays), kernels, {}, "partly"
    )
    moved = {**arrays, "b": arrays["c"]}
    assert graph.update(make_locate(moved), ["b"]) == 1
    launch_and_wait(cuda, graph)
    assert float((arrays["x"] + 0)[0]) == 1.0
    assert float((arrays["y"] + 0)[0]) == 3.0


def find_graphs(captured):
    """Returns the executable graphs of the capture that was used last."""
    stages: Any = find_captured(captured).replay.stages
    return [stage.graph for stage in stages]


def test_a_kernel_of_xla_is_patched(cuda):
    """Points the kernels of a capture at other memory, and back at their own."""
    captured = tg.capture(lambda x: jnp.tanh(x) * 2, outputs="static")
    x = np.linspace(-1, 1, SIZE, dtype=np.float32)
    assert_replayed(captured, captured(x), (x,))
    (graph,) = find_graphs(captured)
    assert any(isinstance(node, KernelNode) for node in graph.stage.nodes)
    replay = find_captured(captured).replay
    (name,) = replay.definition.outputs
    own = {each: buffer.address for each, buffer in replay.buffers.items()}
    other = make_arrays(target=-1)["target"]
    handles = graph.handles

    def locate_own(each):
        return own[each.buffer] + each.offset

    def locate_moved(each):
        base = other.unsafe_buffer_pointer() if each.buffer == name else own[each.buffer]
        return base + each.offset

    assert graph.can_rebind(name)
    assert graph.update(locate_moved) >= 1
    before = np.array(captured(x))
    tg.synchronize()
    doubled = np.array(other + 0)
    assert graph.update(locate_own) >= 1
    assert graph.handles == handles
    assert_replayed(captured, captured(x), (x,))
    assert np.array_equal(doubled, before)
    assert np.array_equal(doubled, captured(x))


@pytest.mark.parametrize("size", [7, 1 << 20, 1 << 24])
def test_inputs_at_changing_addresses_use_one_graph(size):
    """Large inputs may be rebound instead of copied; the executable graph stays the same."""
    captured = tg.capture(lambda x, y: (x * 2 + y, x - y))
    arrays = [jnp.full((size,), float(index)) for index in range(6)]
    captured(arrays[0], arrays[1])
    handles = [graph.handles for graph in find_graphs(captured)]
    for first in range(6):
        for second in range(6):
            total, difference = captured(arrays[first], arrays[second])
            assert float(total[0]) == float(total[-1]) == 2.0 * first + second
            assert float(difference[0]) == float(difference[-1]) == first - second
    assert [graph.handles for graph in find_graphs(captured)] == handles
    assert captured.cache_info().captures == 1
    assert [float(array[-1]) for array in arrays] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_inputs_in_turns_from_host_device_and_pool():
    captured = tg.capture(lambda x: jnp.cumsum(x) + x, outputs="static")
    host = np.arange(SIZE, dtype=np.float32)
    for index in range(12):
        x = host + index
        given = (x, jnp.asarray(x), x.copy())[index % 3]
        assert_replayed(captured, captured(given), (x,))
    again = np.array(captured(captured(host)))
    assert np.array_equal(again, captured(np.array(captured(host))))


def test_a_result_given_back_as_an_input():
    captured = tg.capture(lambda x, y: (x + y, x))
    x, y = jnp.zeros(SIZE), jnp.ones(SIZE)
    for _ in range(50):
        x, old = captured(x, y)
        assert float(x[0]) == float(old[0]) + 1
    assert float(x[-1]) == 50.0
