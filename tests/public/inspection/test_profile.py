"""`GraphedFunction.profile`: what it measures, what it leaves as it was, what it refuses."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost, count_work
from tests.fakes.memory_driver import MemoryDriver
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.oracles.error_lines import line, match
from tracegraph.graph_pictures import lines
from tracegraph.lowering.xla.origins import Origins
from tracegraph.profiling import measure
from tracegraph.profiling.profile_graph import find_profiled
from tracegraph.replaying.jit_call import JitCall
from tracegraph.replaying.spread_call import SpreadCall
from tracegraph.runtime.cuda.driver.calls import make_call_error

X = jnp.linspace(0.1, 1.0, 4)


def fork(state: Any, x: Any) -> Any:
    side, main = tg.Stream(), tg.current_stream()
    side.wait_stream(main)
    with tg.stream(side):
        left = jnp.tanh(x)
    right = jnp.sin(x)
    main.wait_stream(side)
    return state + left * right, left + right


FIRST_LINE = line() - 8


def make_state() -> Any:
    return jnp.arange(4.0)


@pytest.fixture(scope="module")
def step() -> Any:
    captured: Any = tg.capture(fork, donate_argnums=0, name="step")
    captured(make_state(), X)
    return captured


def test_regions_are_nodes_with_their_lines(step: Any) -> None:
    data = step.get_graph_data(make_state(), X)
    profile = step.profile(make_state(), X)
    assert [node.name for node in profile.nodes] == [node.name for node in data.nodes]
    assert [node.stream for node in profile.nodes].count(0) == 2
    assert all(node.warm_us > 0 for node in profile.nodes)
    assert all(node.scope == "" for node in profile.nodes)
    assert profile.edges == data.edges
    assert profile.critical_path()[-1] == 2
    assert len(profile.critical_path()) == 2
    assert profile.whole_us > 0
    assert profile.floor_us is None
    assert f"test_profile.py:{FIRST_LINE + 3} in fork" in str(profile)
    total = sum(line.warm_us for line in profile.by_line())
    assert total == pytest.approx(profile.parts[0].node_us)


def test_nothing_that_users_hold_is_changed(step: Any) -> None:
    state, y = step(make_state(), X)
    before, address = np.asarray(state).copy(), state.data_ptr()
    calls, pool_bytes = step.cache_info(), step.pool_bytes
    step.profile(state, X)
    step.profile(state, X)
    assert not state.is_deleted()
    assert state.data_ptr() == address
    np.testing.assert_array_equal(state, before)
    np.testing.assert_array_equal(y, jnp.tanh(X) + jnp.sin(X))
    assert (step.cache_info(), step.pool_bytes) == (calls, pool_bytes)
    state, _ = step(state, X)
    np.testing.assert_allclose(state, before + jnp.tanh(X) * jnp.sin(X), rtol=1e-6)


def test_random_numbers_are_not_drawn() -> None:
    gen = tg.random.Generator(3)
    captured: Any = tg.capture(lambda x: x + jax.random.normal(gen.next_key(), x.shape))
    captured(X)
    state = np.asarray(gen.get_state())
    assert captured.profile(X).nodes
    np.testing.assert_array_equal(gen.get_state(), state)


def test_eager_parts_have_times_of_their_own() -> None:
    seen: list[int] = []

    def look(y: Any) -> Any:
        seen.append(1)
        return np.asarray(y)

    def call_back(x: Any) -> Any:
        y = jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x * 2)
        return y + 1

    captured: Any = tg.capture(call_back, mode="partial", prefer="graph")
    captured(X)
    before = len(seen)
    profile = captured.profile(X)
    assert [part.kind for part in profile.parts] == ["graph", "eager", "graph"]
    assert all(part.whole_us > 0 for part in profile.parts)
    assert all(node.warm_us > 0 for node in profile.nodes)
    assert profile.whole_us == pytest.approx(sum(part.whole_us for part in profile.parts))
    assert len(seen) - before == measure.REPEATS_WITH_EAGER + 2
    np.testing.assert_array_equal(captured(X), X * 2 + 1)


def test_buckets_are_profiled_as_they_are_padded() -> None:
    captured: Any = tg.capture(lambda x: x * 2, buckets={0: {0: (2, 4)}})
    captured(jnp.ones(3))
    profile = captured.profile(jnp.ones(3))
    assert profile.nodes[0].nbytes >= 32


def test_a_graph_that_is_not_there(step: Any) -> None:
    with pytest.raises(tg.ReplayError) as caught:
        step.profile(jnp.arange(5.0), jnp.ones(5))
    match(caught.value, "`step` was not captured", "profile, ", "a profile times", "call step(")
    assert caught.value.anchor == "profile"
    assert len(step._cache) == 1


def test_what_is_no_graph_says_so() -> None:
    reads: Any = tg.capture(lambda x: x * 2 if x.sum() > 0 else x, mode="partial", name="reads")
    reads(X)
    with pytest.raises(tg.ReplayError) as caught:
        reads.profile(X)
    match(caught.value, "`reads` is captured in several", "profile, ", "it reads", "capture and")
    nothing: Any = tg.capture(lambda: (), name="nothing")
    nothing()
    with pytest.raises(tg.ReplayError) as caught:
        nothing.profile()
    match(caught.value, "`nothing` has nothing", "profile, ", "its graph has no", "profile what")
    for kind, what in ((JitCall, "`f` runs as jax.jit"), (SpreadCall, "`f` runs over several")):
        with pytest.raises(tg.ReplayError) as caught:
            find_profiled("f", kind.__new__(kind))
        match(caught.value, what, "profile, ", "", "profile it with jax")


def test_no_memory_for_a_second_instance(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise tg.OutOfMemoryError("none", where="here", why="w", fix="f", anchor="out-of-memory")

    monkeypatch.setattr(measure, "Replay", refuse)
    with pytest.raises(tg.OutOfMemoryError) as caught:
        step.profile(make_state(), X)
    match(caught.value, "no memory is left to pr", "profile: here", "its nodes", "release() ")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    device = capture_for_gpu(monkeypatch)
    count_work(device, monkeypatch)
    monkeypatch.setattr(lines, "read_origins", lambda _: Origins(None, {}))
    return device


def read_reserved(device: CudaOnHost) -> int:
    return sum(segment["total_size"] for segment in device.allocator.snapshot())


def test_a_gpu_graph(gpu: CudaOnHost) -> None:
    captured: Any = tg.capture(fork, donate_argnums=0)
    state, y = captured(make_state(), X)
    before, live = np.asarray(state).copy(), gpu.driver.live_handles()
    gc.collect()
    reserved = read_reserved(gpu)
    profile = captured.profile(state, X)
    assert [node.warm_us for node in profile.nodes] == [1, 1, 1]
    assert [node.is_critical for node in profile.nodes] == [True, False, True]
    assert (profile.floor_us, profile.path_us, profile.whole_us) == (1, 2, 3)
    assert "chain x floor  2 x 1.00 us" in str(profile)
    assert gpu.driver.live_handles().keys() <= live.keys()
    assert read_reserved(gpu) == reserved
    np.testing.assert_array_equal(state, before)
    np.testing.assert_allclose(y, jnp.tanh(X) + jnp.sin(X), rtol=1e-6)
    state, _ = captured(state, X)
    np.testing.assert_allclose(state, before + jnp.tanh(X) * jnp.sin(X), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "number"),
    [("instantiate", 1), ("instantiate", 4), ("launch", 9), ("record_event", 1), ("fill_async", 2)],
)
def test_a_profile_that_fails_changes_nothing(
    gpu: CudaOnHost, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    captured: Any = tg.capture(lambda s, x: (s + x, s * x), donate_argnums=0)
    state, _ = captured(make_state(), X)
    live = gpu.driver.live_handles()
    with monkeypatch.context() as patch:
        fail_at(gpu.driver, name, number, patch)
        with pytest.raises(tg.CudaError, match="CUDA_ERROR_UNKNOWN"):
            captured.profile(state, X)
    gc.collect()
    assert gpu.driver.live_handles().keys() <= live.keys()
    np.testing.assert_allclose(captured(state, X)[0], make_state() + 2 * X, rtol=1e-6)


def fail_at(driver: MemoryDriver, name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    enter, counts = driver._enter, iter(range(1, 1_000_000))

    def enter_or_fail(method: str, *arguments: Any, **options: Any) -> None:
        enter(method, *arguments, **options)
        if method == name and next(counts) == number:
            raise make_call_error("CUDA_ERROR_UNKNOWN", name, name, "chosen by the test")

    monkeypatch.setattr(driver, "_enter", enter_or_fail)


def test_a_budget_that_is_over_leaves_nodes_untimed(
    gpu: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "BUDGET_SECONDS", -1.0)
    captured: Any = tg.capture(fork)
    captured(make_state(), X)
    profile = captured.profile(make_state(), X)
    assert [node.warm_us for node in profile.nodes] == [None] * 3
    assert "3 nodes: the -1 seconds that a profile takes were over" in profile.notes
    assert "3 not timed" in str(profile)
    del gpu


def test_a_loop_is_one_node_of_a_region() -> None:
    captured: Any = tg.capture(lambda x: lax.fori_loop(0, 3, lambda _, c: c * 2, x))
    captured(X)
    assert len(captured.profile(X).nodes) == 1


def test_a_recorded_block() -> None:
    graph, x = tg.CUDAGraph(), tg.static_input((4,))
    with pytest.raises(tg.ReplayError):
        graph.profile()
    total = tg.static_input((4,))
    with tg.graph(graph):
        y = jnp.sin(x) * 2
        total.copy_(total + y)
    x.copy_(X)
    graph.replay()
    held = np.asarray(total).copy()
    profile = graph.profile()
    assert all(node.warm_us is not None and node.warm_us > 0 for node in profile.nodes)
    np.testing.assert_array_equal(total, held)
    np.testing.assert_allclose(y, jnp.sin(X) * 2, rtol=1e-6)
    graph.replay()
    np.testing.assert_allclose(total, 2 * held, rtol=1e-6)


@pytest.mark.parametrize("kind", ["host", "gpu"])
def test_events_are_left_out(kind: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("gpu") if kind == "gpu" else None
    event = tg.Event(external=True)
    graph, x = tg.CUDAGraph(), tg.static_input((4,))
    with tg.graph(graph):
        y = jnp.sin(x)
        event.record()
        z = y + 1
    graph.replay()
    first = len(device.driver.calls) if device is not None else 0
    nodes = graph.profile().nodes
    assert [node.warm_us is None for node in nodes] == ["event" in node.kind for node in nodes]
    if device is not None:
        names = {call.name for call in device.driver.calls[first:]}
        assert not names & {"add_event_record_node", "add_event_wait_node"}
    np.testing.assert_array_equal(z, y + 1)


def test_objects_of_libraries_keep_their_state() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def update(model: Any, x: Any) -> Any:
        model.kernel[...] = model.kernel[...] + 1
        return model(x)

    captured: Any = tg.capture(update)
    captured(model, X)
    kernel = np.asarray(model.kernel[...])
    assert captured.profile(model, X).nodes
    np.testing.assert_array_equal(model.kernel[...], kernel)
