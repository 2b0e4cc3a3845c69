"""What `tg.CUDAGraph` refuses; after each refusal the next capture works.

The names of cases (G5...) are those of PyTorch's own tests of graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.raw_graphs import N, assert_value, fill, record, use_device
from tracegraph.jax_internals import eval_trace, trace_state


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


def test_g5_capture_on_the_default_stream_is_refused():
    g = tg.CUDAGraph()
    with pytest.raises(tg.CaptureError, match="default stream"):
        g.capture_begin()
    with (
        pytest.raises(tg.CaptureError, match="default stream"),
        tg.graph(g, None, tg.default_stream()),
    ):
        pass
    assert not tg.is_current_stream_capturing()


def test_g7_a_capture_that_needs_too_much_memory_leaves_all_usable():
    g = tg.CUDAGraph()
    x = tg.static_input((N,))
    kept = []
    with pytest.raises(tg.OutOfMemoryError), tg.graph(g):
        kept.append(jnp.broadcast_to(x.sum(), (2**46,)) * 2)
    with pytest.raises(tg.ReplayError, match="the capture of its graph failed"):
        np.asarray(kept[0])
    with tg.graph(g):
        y = x + 1
    g.replay()
    assert_value(y, fill(1))


def test_g24_a_host_read_in_the_block_fails_and_the_next_capture_works():
    g, x = tg.CUDAGraph(), tg.static_input((N,))
    lines = []

    def read() -> None:
        y = x + 1
        lines.append(sys._getframe().f_lineno + 1)
        float(y[0])

    with pytest.raises(tg.CaptureError) as caught, tg.graph(g):
        read()
    assert caught.value.anchor == "host-read"
    assert f"raw_graph/test_errors.py:{lines[0]} in " in caught.value.where
    assert not tg.is_current_stream_capturing()
    assert trace_state.value is eval_trace
    with pytest.raises(tg.ReplayError, match="holds no graph"):
        g.replay()
    g2, z = record(lambda: jax.random.normal(jax.random.key(3), (N,)))
    g2.replay()
    assert_value(z, jax.random.normal(jax.random.key(3), (N,)))


@pytest.mark.parametrize(
    "read",
    [float, int, bool, np.asarray, lambda v: v.item(), lambda v: v.tolist(), range],
    ids=["float", "int", "bool", "asarray", "item", "tolist", "range"],
)
def test_g40_reading_a_value_is_refused(read):
    x = tg.static_input((), dtype=np.int32)
    g = tg.CUDAGraph()
    with pytest.raises(tg.CaptureError) as caught, tg.graph(g):
        read(x + 1)
    assert caught.value.anchor in ("host-read", "python-branch")
    # A static input has no value either: the next replay may read another.
    with pytest.raises(tg.CaptureError), tg.graph(g):
        read(x)


def test_reading_before_the_first_replay_is_refused():
    g, y = record(lambda: jnp.arange(N) + 1)
    for read in (np.asarray, lambda v: v + 1, float, jax.jit(lambda v: v)):
        with pytest.raises(tg.ReplayError) as caught:
            read(y)
        assert caught.value.anchor == "unreplayed-output"
    assert (y.shape, y.dtype) == ((N,), np.int32)
    g.replay()
    assert_value(y, [1, 2, 3, 4])


def test_a_second_capture_in_the_same_thread_is_refused():
    g, x = tg.CUDAGraph(), tg.static_input((N,))
    with tg.graph(g):
        y = x + 1
        with (
            pytest.raises(tg.CaptureError, match="while this thread records"),
            tg.graph(tg.CUDAGraph()),
        ):
            pass
        with pytest.raises(tg.CaptureError, match="while this thread records"):
            tg.CUDAGraph().capture_begin()
        with pytest.raises(tg.CaptureError, match="before the capture has ended"):
            g.replay()
        with pytest.raises(tg.CaptureError, match="before the capture has ended"):
            g.reset()
        with pytest.raises(tg.CaptureError, match="writes what a block has made"):
            y.copy_(x)
        with pytest.raises(tg.CaptureError, match="inside a block"):
            tg.static_input((N,))
    g.replay()
    assert_value(y, fill(1))
    with pytest.raises(tg.CaptureError, match="holds a graph already"), tg.graph(g):
        pass


def test_a_graph_is_not_replayed_inside_of_what_is_traced():
    g, y = record(lambda: jnp.arange(N) + 1)
    other = tg.CUDAGraph()
    with tg.graph(other):
        kept = jnp.ones(2) + 1
        with pytest.raises(tg.CaptureError, match="replay is called while"):
            g.replay()
    other.replay()
    assert_value(kept, [2, 2])

    @jax.jit
    def step(x: Any) -> Any:
        g.replay()
        return x

    with pytest.raises(tg.CaptureError, match="replay is called while"):
        step(1.0)
    g.replay()
    assert_value(y, [1, 2, 3, 4])


def test_capture_end_belongs_to_its_begin():
    g, side = tg.CUDAGraph(), tg.Stream()
    with pytest.raises(tg.CaptureError, match="without capture_begin"):
        g.capture_end()
    with tg.stream(side):
        g.capture_begin()
        y = jnp.ones(N) + 1
        with pytest.raises(tg.CaptureError, match="another stream"), tg.stream(tg.Stream()):
            g.capture_end()
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(g.capture_end).exception(60)
        assert isinstance(error, tg.CaptureError)
        assert "another thread" in str(error)
        g.capture_end()
    g.replay()
    assert_value(y, fill(2))


def test_use_after_reset_is_refused():
    g, _ = record(lambda: jnp.ones(N) + 1)
    g.reset()
    with pytest.raises(tg.ReplayError, match="holds no graph"):
        g.replay()
    with pytest.raises(tg.ReplayError, match="holds no graph"):
        g.pool()


def test_copy_of_another_shape_or_dtype_is_refused():
    x = tg.static_input((N,))
    for wrong in (jnp.zeros(N + 1), jnp.zeros(N, jnp.int32), 1.0):
        with pytest.raises(tg.ReplayError, match=r"copy_.*wanted float32"):
            x.copy_(wrong)
    assert_value(x, fill(0))


def test_a_static_input_takes_a_copy():
    value, mine = jnp.ones(N), np.ones(N, np.float32)
    for given in (value, mine):
        x = tg.static_input((N,))
        x.copy_(given)
        x = tg.static_input(given) if given is mine else x
        assert_value(x, fill(1))
    mine[:] = 5
    assert_value(x, fill(1))
    with pytest.raises(tg.ConfigError, match="static_input is given"):
        tg.static_input("text")
    with pytest.raises(tg.ConfigError, match="key_data"):
        tg.static_input(jax.random.key(1))
    assert tg.static_input(3).shape == (3,)
    assert tg.static_input((2, 3), jnp.int8).dtype == jnp.int8


def test_a_callback_in_the_block_is_refused_and_an_error_of_the_user_passes():
    g, x = tg.CUDAGraph(), tg.static_input((N,))
    kept = []

    def run(act: Callable[[Any], Any]) -> None:
        kept.append(x + 1)
        act(kept[-1])

    with pytest.raises(tg.CaptureError) as caught, tg.graph(g):
        run(lambda y: jax.debug.print("{}", y))
    assert caught.value.anchor == "callback"
    with pytest.raises(ZeroDivisionError), tg.graph(g):
        run(lambda y: 1 // 0)
    for value in kept:
        with pytest.raises(tg.ReplayError, match="the capture of its graph failed"):
            np.asarray(value)
    with tg.graph(g):
        y = x + 1
    g.replay()
    assert_value(y, fill(1))


def test_wrong_arguments_are_named():
    with pytest.raises(tg.ConfigError, match="graph is given str"):
        tg.graph("g")  # pyright: ignore[reportArgumentType]
    g = tg.CUDAGraph()
    wrongs: tuple[tuple[dict[str, Any], str], ...] = (
        ({"pool": 3}, "pool="),
        ({"stream": 3}, "stream="),
        ({"capture_error_mode": "wild"}, "capture_error_mode="),
    )
    for wrong, named in wrongs:
        with pytest.raises(tg.ConfigError, match=named), tg.graph(g, **wrong):
            pass
    with tg.graph(g, capture_error_mode="global"):
        y = jnp.ones(N) * 3
    g.replay()
    assert_value(y, fill(3))


@pytest.mark.parametrize(
    ("given", "dtype", "words"),
    [
        ((-1, 2), None, r"the shape \(-1, 2\)"),
        ((2,), "float7", "dtype='float7'"),
        (jnp.ones(2), 3.0, "dtype=3.0"),
    ],
)
def test_a_shape_or_dtype_that_is_none_is_refused(given: Any, dtype: Any, words: str) -> None:
    with pytest.raises(tg.ConfigError, match=words) as caught:
        tg.static_input(given, dtype)
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.filterwarnings("error")
def test_a_dtype_of_python_is_that_of_jax() -> None:
    assert tg.static_input((2,), float).dtype == jnp.zeros((), float).dtype
