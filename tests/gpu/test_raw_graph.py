"""`tg.CUDAGraph` on a GPU: what a block recorded is replayed, with inputs read where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.raw_graphs import assert_value, record

pytestmark = pytest.mark.usefixtures("gpu", "untried")
N = 1000


def test_a_block_is_replayed_on_new_inputs():
    x = tg.static_input((N,))
    g, y = record(lambda: x * 2 + 1)
    with pytest.raises(tg.ReplayError, match="has not been replayed"):
        np.asarray(y)
    for step in range(5):
        x.copy_(jnp.full(N, step, jnp.float32))
        g.replay()
        doubled = y * 2
        assert_value(doubled, np.full(N, 4 * step + 2, np.float32))
    assert_value(y, np.full(N, 9, np.float32))


def test_gradients_and_random_numbers_are_those_of_jit():
    weights = [jax.random.normal(jax.random.key(i), (64, 64)) * 0.1 for i in range(3)]
    batch = tg.static_input((32, 64))

    def measure(weights, x):
        for w in weights:
            x = jax.nn.relu(x @ w)
        return jnp.sum(x * x)

    def run(x):
        noise = jax.random.normal(jax.random.key(1), (8,))
        return jax.value_and_grad(measure)(weights, x), noise

    g, made = record(lambda: run(batch))
    value = jax.random.normal(jax.random.key(5), (32, 64))
    batch.copy_(value)
    g.replay()
    expected = jax.jit(run)(value)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), made, expected
    )


@pytest.mark.parametrize("shares", [False, True])
def test_a_graph_reads_what_another_writes(shares):
    x = tg.static_input((N,))
    g1, middle = record(lambda: jnp.cumsum(x))
    g2, end = record(lambda: middle[::-1] + 1, pool=g1.pool() if shares else None)
    for step in range(5):
        x.copy_(np.full(N, step, np.float32))
        g1.replay()
        g2.replay()
        assert_value(end, (np.arange(N, dtype=np.float32) + 1)[::-1] * step + 1)


def test_a_failed_block_leaves_all_usable():
    x, g = tg.static_input((N,)), tg.CUDAGraph()
    with pytest.raises(tg.CaptureError, match="reads the value"), tg.graph(g):
        float(x.sum())
    with tg.graph(g):
        y = x + 1
    g.replay()
    assert_value(y, np.ones(N, np.float32))
    g.reset()
    with tg.graph(g):
        z = x + 2
    g.replay()
    assert_value(z, np.full(N, 2, np.float32))
    assert_value(y, np.ones(N, np.float32))


def test_g03_g12_graphs_on_two_streams_are_both_right():
    x, w = tg.static_input((N,)), jnp.full((N,), 3.0)
    pool = tg.graph_pool_handle()

    def chain(factor):
        y = x
        for _ in range(10):
            y = jnp.sort(y + factor * w)
        return y

    made = [record(lambda f=f: chain(f), pool=pool, stream=tg.Stream()) for f in (1, 2)]
    streams = [tg.Stream(), tg.Stream()]
    for _ in range(20):
        for (g, _), stream in zip(made, streams, strict=True):
            with tg.stream(stream):
                g.replay()
    tg.synchronize()
    for (_, y), factor in zip(made, (1, 2), strict=True):
        assert_value(y, np.full(N, 30 * factor, np.float32))


def test_g08_many_captures_of_a_matmul_take_little_memory():
    # Each graph keeps its result and its workspace, in less than the least segment of PyTorch.
    limit = 99 * (2 << 20)
    w = jnp.ones((256, 256))
    kept = [record(lambda: w @ w)]
    free, _ = tg.memory.mem_get_info()
    kept += [record(lambda: w @ w) for _ in range(99)]
    assert free - tg.memory.mem_get_info()[0] < limit
    g, y = kept[-1]
    g.replay()
    assert_value(y, np.full((256, 256), 256, np.float32))


def test_g10_events_around_a_replay_take_its_time():
    x = tg.static_input((512, 512))
    g, y = record(lambda: jnp.linalg.matrix_power(x + 1, 16))
    start, end = tg.Event(enable_timing=True), tg.Event(enable_timing=True)
    g.replay()
    start.record()
    g.replay()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert y.shape == (512, 512)


def test_g35_g36_g37_raw_handles():
    driver = pytest.importorskip("cuda.bindings.driver")
    x = tg.static_input((N,))
    g, _ = record(lambda: x + 1)
    for call in (g.instantiate, g.raw_cuda_graph):
        with pytest.raises(tg.CaptureError, match="keeps no graph"):
            call()
    flags = driver.cuGraphExecGetFlags(driver.CUgraphExec(g.raw_cuda_graph_exec()))
    assert flags[0] == driver.CUresult.CUDA_SUCCESS
    kept = tg.CUDAGraph(keep_graph=True)
    with tg.graph(kept):
        y = jnp.cumsum(x) * 2
    with pytest.raises(tg.ReplayError, match="before the graph is executable"):
        kept.raw_cuda_graph_exec()
    error, _, count = driver.cuGraphGetNodes(driver.CUgraph(kept.raw_cuda_graph()))
    assert error == driver.CUresult.CUDA_SUCCESS
    assert count == len(kept.get_graph_data().list_nodes(0))
    first = kept.raw_cuda_graph_exec()
    kept.replay()
    assert kept.raw_cuda_graph_exec() == first
    assert_value(y, np.zeros(N, np.float32))


def test_g38_a_kept_graph_is_instantiated_twice():
    x, g = tg.static_input((N,)), tg.CUDAGraph(keep_graph=True)
    with tg.graph(g):
        x.copy_(x + 1)
    g.instantiate()
    g.replay()
    g.instantiate()
    for step in (2, 3):
        g.replay()
        assert_value(x, np.full(N, step, np.float32))


def test_g42_hooks_are_called_around_each_replay(tmp_path):
    x, g, seen = tg.static_input((N,)), tg.CUDAGraph(), []
    g.register_post_instantiate_hook(tg.export_dot(tmp_path / "graph.dot"))
    g.register_replay_start_hook(lambda graph: seen.append("start"))
    g.register_replay_end_hook(lambda graph: seen.append("end"))
    g.register_destroy_callback(lambda: seen.append("gone"), synchronize_before_release=True)
    with tg.graph(g):
        y = x + 1
    g.replay()
    g.replay()
    g.reset()
    assert seen == ["start", "end"] * 2 + ["gone"]
    assert (tmp_path / "graph.dot").read_text().startswith("digraph {")
    assert_value(y, np.ones(N, np.float32))


def test_a_graph_goes_to_cuda_core_and_comes_back():
    core = pytest.importorskip("cuda.core.graph")
    if not hasattr(core, "GraphDefinition"):
        pytest.skip("cuda.core is older than its explicit graphs")
    x = tg.static_input((N,))
    g, y = record(lambda: jnp.cumsum(x * 2))
    x.copy_(jnp.ones(N))
    exported = tg.export_to_cuda_core(g)
    (node,) = exported.definition.nodes()
    assert type(node).__name__ == "ChildGraphNode"
    imported = tg.import_from_cuda_core(exported.definition)
    assert [each.kind for each in imported.get_graph_data().nodes] == ["childgraph"]
    x.copy_(jnp.zeros(N))
    g.replay()
    # Writes where the graph does, and is read before the graph's next replay.
    imported.replay()
    assert exported.find_address(y) == y.data_ptr()
    assert_value(y, np.arange(1, N + 1, dtype=np.float32) * 2)
    g.replay()
    assert_value(y, np.zeros(N, np.float32))


def test_ranges_of_a_profiler_cost_nothing_without_one(monkeypatch):
    pytest.importorskip("nvtx")
    monkeypatch.setenv("TRACEGRAPH_NVTX", "1")
    step = tg.capture(lambda x: jnp.cumsum(x) + 1)
    for _ in range(3):
        assert_value(step(jnp.ones(N)), np.arange(2, N + 2, dtype=np.float32))


def test_g09_a_graph_of_two_streams_is_drawn(tmp_path):
    x, side, g = tg.static_input((N,)), tg.Stream(), tg.CUDAGraph()
    g.enable_debug_mode()
    g.register_post_instantiate_hook(tg.export_dot(tmp_path / "hook.dot"))
    with tg.graph(g):
        main = tg.current_stream()
        side.wait_stream(main)
        with tg.stream(side):
            a = jnp.cumsum(x)
        b = jnp.sort(x)
        main.wait_stream(side)
        y = a + b
    g.replay()
    data = g.get_graph_data()
    assert any(node.kind == "kernel" for node in data.nodes)
    assert any("test_raw_graph.py:" in node.where for node in data.nodes)
    for name, start in (("graph.dot", "digraph {"), ("graph.svg", "<svg")):
        g.debug_dump(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(start)
    assert (tmp_path / "hook.dot").read_text() == (tmp_path / "graph.dot").read_text()
    assert_value(y, np.zeros(N, np.float32))
