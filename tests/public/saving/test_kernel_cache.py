"""The kernel cache: another process, or the next function, replays what was compiled before."""

from __future__ import annotations

import gc
import json
import logging
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.processes import run_copy, run_python
from tracegraph.kernel_caching import cached_lowering
from tracegraph.kernel_caching.storing import wait_for_stores
from tracegraph.runtime.saving.kernel_store import KernelStore

X = jnp.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    path = tmp_path / "kernels"
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(path))
    return path


def make_step(rate: float = 0.1, **options: Any) -> Any:
    def step(state: dict[str, Any], x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.tanh(x @ w["w"]).mean()

        value, gradient = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda a, b: a - rate * b, state, gradient), value

    return tg.capture(step, donate_argnums=0, **options)


def make_state() -> dict[str, Any]:
    return {"w": jnp.linspace(0, 1, 16).reshape(8, 2)}


def train(step: Any, steps: int = 3) -> tuple[Any, list[float]]:
    state, values = make_state(), []
    for _ in range(steps):
        state, value = step(state, X)
        values.append(float(value))
    return jax.tree.map(np.asarray, state), values


def count() -> tuple[int, int, int]:
    info = tg.kernel_cache.info()
    return info.hits, info.misses, info.stores


def subtract(before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(count(), before, strict=True))


def test_the_next_function_with_the_same_program_compiles_nothing(compiled: list[str]):
    before = count()
    first = train(make_step())
    assert subtract(before) == (0, 1, 1)
    assert compiled == ["region0"]
    step = make_step()
    second = train(step)
    assert subtract(before) == (1, 1, 1)
    assert compiled == ["region0"]
    jax.tree.map(np.testing.assert_array_equal, first, second)
    report = step.explain(make_state(), X)
    assert "compared when it was stored in the kernel cache" in report
    assert "compile" not in step.timings()


def test_the_key_of_a_first_capture_is_made_while_xla_compiles(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
):
    write_key = cached_lowering.make_key

    def note(*args: Any) -> str:
        compiled.append("key")
        return write_key(*args)

    monkeypatch.setattr(cached_lowering, "make_key", note)
    make_step()(make_state(), X)
    assert compiled == ["region0", "key"]
    # A file begins as this key does: it may be that of the program.
    make_step(0.2)(make_state(), X)
    assert compiled[2:] == ["key", "region0"]
    make_step(0.2)(make_state(), X)
    assert compiled[4:] == ["key"]


TRAIN = """
import gc
import json
import tests.public.saving.test_kernel_cache as t
state, values = t.train(t.make_step())
print(json.dumps([state["w"].tolist(), values, t.count()]))
"""


def test_another_process_replays_equal_bits():
    # Two interpreters, whose sets are in other orders: the second one is no copy.
    variables = {"JAX_PLATFORMS": "cpu"}
    done = [run(["-c", TRAIN], variables=variables) for run in (run_copy, run_python)]
    found = [json.loads(each.stdout.splitlines()[-1]) for each in done]
    assert found[0][:2] == found[1][:2]
    assert [each[2] for each in found] == [[0, 1, 1], [1, 0, 0]]


def test_any_difference_compiles(monkeypatch: pytest.MonkeyPatch, compiled: list[str]):
    make_step()(make_state(), X)
    wanted = 1
    for change in (
        lambda: make_step(0.2)(make_state(), X),
        lambda: make_step(outputs="static")(make_state(), X),
        lambda: make_step(name="other")(make_state(), X),
        lambda: make_step()(make_state(), X[:2]),
        lambda: make_step()(make_state(), X.astype(jnp.bfloat16)),
    ):
        change()
        wanted += 1
        assert len(compiled) == wanted
    with jax.default_matmul_precision("highest"):
        make_step()(make_state(), X)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    make_step()(make_state(), X)
    assert len(compiled) == wanted + 2


def record_block(rows: int = 4) -> tuple[Any, Any, Any]:
    """Returns a raw graph, its static input, and what it computes from that."""
    given, graph = tg.static_input(jnp.zeros((rows, 8))), tg.CUDAGraph()
    with tg.graph(graph):
        result = jnp.tanh(given @ X.T).sum(axis=1)
    return graph, given, result


def test_raw_graphs_are_stored_and_found(compiled: list[str]):
    before, results = count(), []
    for stores in ((0, 1, 1), (1, 1, 1)):
        graph, given, result = record_block()
        for factor in (1.0, -2.0):
            given.copy_(X * factor)
            graph.replay()
            results.append(np.asarray(result))
            np.testing.assert_allclose(result, jnp.tanh(given @ X.T).sum(axis=1), atol=1e-5)
        assert subtract(before) == stores
    np.testing.assert_array_equal(results[:2], results[2:])
    assert len(compiled) == 1
    record_block(rows=2)
    assert subtract(before) == (1, 2, 2)
    # A recorded block is no captured function of the same ops: its results live in the graph.
    tg.capture(lambda x: jnp.tanh(x @ X.T).sum(axis=1))(X)
    assert subtract(before)[0] == 1


def test_a_raw_graph_that_was_not_right_is_not_stored(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> Any:
        raise tg.VerificationError("planted", where="", why="", fix="", anchor="x")

    before = count()
    with monkeypatch.context() as patch:
        patch.setattr("tracegraph.capturing.pipeline.verify_capture", fail)
        with pytest.raises(tg.VerificationError):
            record_block()
    assert subtract(before) == (0, 1, 0)
    record_block()
    assert subtract(before) == (0, 2, 1)


def test_what_is_not_verified_is_not_stored(folder: pathlib.Path, compiled: list[str]):
    before = count()
    train(make_step(verify=False))
    assert subtract(before) == (0, 0, 0)
    make_step().lower(make_state(), X)
    assert subtract(before) == (0, 1, 0)
    assert not folder.exists()
    train(make_step())
    make_step().lower(make_state(), X)
    assert subtract(before) == (1, 2, 1)


def test_in_checking_mode_each_capture_is_compared(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str]
):
    monkeypatch.setenv("TRACEGRAPH_CHECK_REPLAY", "1")
    before = count()
    for _ in range(2):
        train(make_step())
    assert subtract(before) == (0, 0, 0)
    assert len(compiled) == 2


def test_the_collector_rests_while_a_file_is_read(monkeypatch: pytest.MonkeyPatch):
    train(make_step())
    states, decode = [], cached_lowering.decode_lowered
    monkeypatch.setattr(
        cached_lowering,
        "decode_lowered",
        lambda *args: (states.append(gc.isenabled()), decode(*args))[1],
    )
    train(make_step())
    assert states == [False]
    assert gc.isenabled()


def test_off_it_reads_and_writes_nothing(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
):
    train(make_step())
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")
    train(make_step())
    assert len(compiled) == 2
    info = tg.kernel_cache.info()
    assert (info.path, info.entries) == (None, 0)
    assert "off" in str(info)
    assert tg.kernel_cache.clear() == 0
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    info = tg.kernel_cache.info()
    assert (info.path, info.entries) == (folder, 1)
    assert f"1 file, {info.nbytes:,} of" in str(info)
    assert tg.kernel_cache.clear() == 1


def test_another_shape_does_not_wait_for_the_file_of_the_last(
    folder: pathlib.Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
):
    may_store, add = threading.Event(), KernelStore.add
    monkeypatch.setattr(KernelStore, "add", lambda *args: may_store.wait(60) and add(*args))
    step = tg.capture(lambda x: x * 2)
    for x in (X, X[:2]):
        np.testing.assert_array_equal(step(x), x * 2)
    assert len(compiled) == 2
    assert not folder.exists()
    may_store.set()
    wait_for_stores()
    assert len(list(folder.iterdir())) == 2
    # The same program in another function has waited for its file.
    np.testing.assert_array_equal(tg.capture(lambda x: x * 2)(X), X * 2)
    assert len(compiled) == 2


def test_callbacks_and_parts_that_run_as_python_are_not_stored(compiled: list[str]):
    before = count()

    def log(x: jax.Array) -> jax.Array:
        return jnp.cos(jax.pure_callback(np.sin, x, x))

    for _ in range(2):
        step = tg.capture(log, mode="partial", prefer="graph")
        np.testing.assert_allclose(step(X), jnp.cos(jnp.sin(X)), rtol=1e-6)
    assert subtract(before) == (0, 0, 0)


@pytest.mark.parametrize("place", [0.01, 0.5, 0.99])
def test_a_damaged_file_is_a_miss(
    place: float,
    folder: pathlib.Path,
    compiled: list[str],
    caplog: pytest.LogCaptureFixture,
):
    expected = train(make_step())
    wait_for_stores()
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, logger="tracegraph"):
        jax.tree.map(np.testing.assert_array_equal, train(make_step()), expected)
    assert len(caplog.records) == 1
    assert len(compiled) == 2
    train(make_step())
    assert len(compiled) == 2


def test_a_file_with_another_content_is_a_miss(
    folder: pathlib.Path, compiled: list[str], caplog: pytest.LogCaptureFixture
):
    train(make_step())
    tg.capture(lambda x: x + 1, name="other")(X)
    wait_for_stores()
    first, second = sorted(folder.iterdir(), key=lambda path: path.stat().st_size)
    # A right file in the place of another one: graphs are checked, and so are their arguments.
    second.write_bytes(first.read_bytes())
    with caplog.at_level(logging.WARNING, logger="tracegraph"):
        train(make_step())
    assert len(caplog.records) == 1
    assert len(compiled) == 3


def test_weights_that_are_closed_over_are_those_of_the_process(compiled: list[str]):
    def make(value: float) -> Any:
        weights = jnp.full((1 << 10, 1 << 9), value)
        return tg.capture(lambda x: x @ weights[:8], name="apply")

    np.testing.assert_allclose(make(1.0)(X), X @ jnp.full((8, 512), 1.0), rtol=1e-6)
    np.testing.assert_allclose(make(2.0)(X), X @ jnp.full((8, 512), 2.0), rtol=1e-6)
    assert len(compiled) == 1


def test_a_graph_of_kernels(monkeypatch: pytest.MonkeyPatch, compiled: list[str]):
    capture_for_gpu(monkeypatch)
    before = count()
    first = train(make_step())
    known = len(compiled)
    step = make_step()
    jax.tree.map(np.testing.assert_array_equal, train(step), first)
    assert subtract(before) == (1, 1, 1)
    assert len(compiled) == known
    # XLA's program is compiled when it is asked for.
    assert step.lower(make_state(), X).cost_analysis()["flops"] > 0
    assert len(compiled) > known
