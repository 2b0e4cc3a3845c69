"""`save` and `tg.load` on a CudaDevice over host memory, with a fake driver."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost, place
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.oracles.tree_equality import assert_same
from tracegraph.lowering.saved_lowering import decode_lowered
from tracegraph.runtime.streams.stream_capture import thread_state

X = np.linspace(0.5, 2.0, 16, dtype=np.float32).reshape(4, 4)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    # Another test of this process may have chosen a stream for its thread.
    monkeypatch.setattr(thread_state, "streams", [])
    return capture_for_gpu(monkeypatch)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "step.tg"


def train(state: Any, x: Any) -> Any:
    w = state["w"] - 0.1 * x
    return {"w": w, "count": state["count"] + 1}, (w @ x).sum()


def accumulate(total: Any, x: Any) -> Any:
    return total + jnp.sin(x), x * 2


def make_state() -> Any:
    return {"w": place(X), "count": place(0, dtype=np.int32)}


@pytest.mark.usefixtures("device")
def test_a_loaded_step_trains_at_fixed_addresses(path: pathlib.Path) -> None:
    step: Any = tg.capture(train, donate_argnums=0)
    wanted, loss_wanted = step(make_state(), place(X))
    for _ in range(3):
        wanted, loss_wanted = step(wanted, place(X))
    step.save(path)
    loaded: Any = tg.load(path)
    state, x = make_state(), place(X)
    state, _ = loaded(state, x)
    addresses = [leaf.data_ptr() for leaf in jax.tree.leaves(state)]
    for _ in range(2):
        state, _ = loaded(state, x)
    old = state
    state, loss = loaded(state, x)
    assert [leaf.data_ptr() for leaf in jax.tree.leaves(state)] == addresses
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert_same((state, loss), (wanted, loss_wanted))
    loaded.release()
    assert loaded.pool_bytes == 0
    step_state, step_loss = loaded(state, x)
    assert_same((step_state, step_loss), step(wanted, x))


@pytest.mark.usefixtures("device")
def test_weights_that_signatures_share_are_in_the_file_once(path: pathlib.Path) -> None:
    weights = jnp.ones((1024, 512))
    step = tg.capture(lambda x: (x @ weights).sum(0))
    results = [step(place(np.ones((rows, 1024)))) for rows in (1, 2, 3)]
    step.save(path)
    assert path.stat().st_size < 1.1 * weights.nbytes
    loaded = tg.load(path)
    for rows, result in zip((1, 2, 3), results, strict=True):
        assert_same(loaded(place(np.ones((rows, 1024)))), result)
    text = loaded.explain()
    assert "saved with cpu (0.0)" in text
    assert text.count("nodes: 1 graph: 1 kernel; 0 edges") == 3


@pytest.mark.usefixtures("device")
def test_nothing_of_xla_is_in_the_file(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = tg.capture(lambda x: x * 2, name="step")
    step(place(X))
    step.save(path)
    found = []
    monkeypatch.setattr(
        "tracegraph.saving.saved_function.decode_lowered",
        lambda *args: found.append(decode_lowered(*args)) or found[-1],
    )
    loaded = tg.load(path)
    with pytest.raises(tg.InternalError, match="asks for the executable"):
        found[0].regions[0].executable(X)
    assert_same(loaded(place(X)), step(place(X)))


@pytest.mark.usefixtures("device")
def test_keys_static_results_and_probes(path: pathlib.Path) -> None:
    def draw(key: Any) -> Any:
        key, sub = jax.random.split(key)
        return key, tg.probe("noise", jax.random.normal(sub, (3,)))

    step: Any = tg.capture(draw, donate_argnums=0, outputs="static")
    wanted = step(jax.random.key(1))
    wanted = jax.tree.map(np.asarray, (jax.random.key_data(wanted[0]), wanted[1]))
    step.save(path)
    loaded: Any = tg.load(path)
    key, noise = loaded(jax.random.key(1))
    assert_same((np.asarray(jax.random.key_data(key)), np.asarray(noise)), wanted)
    np.testing.assert_array_equal(loaded.probes()["noise"], wanted[1])


@pytest.mark.usefixtures("device")
def test_a_pool_that_two_loaded_functions_share(path: pathlib.Path) -> None:
    step = tg.capture(lambda x: (jnp.sin(x) @ x, x + 1), verify=False)
    step(place(X))
    step.save(path)
    first = tg.load(path)
    second = tg.load(path, pool=first.pool())
    assert first.pool() == second.pool()
    for x in (X, 2 * X):
        assert_same(first(place(x)), second(place(x)))
    assert "not compared with XLA's executable: verify=False" in first.explain()


@pytest.mark.usefixtures("device")
def test_a_file_for_a_gpu_is_refused_on_the_host(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tg.capture(lambda x: x * 2)
    step(place(X))
    step.save(path)
    monkeypatch.undo()
    with pytest.raises(tg.SavedFileError, match=r"is for a GPU of .*, and here is a CPU of"):
        tg.load(path)


@pytest.mark.parametrize("kind", ["host", "gpu"])
def test_a_graph_that_came_from_the_kernel_cache_is_saved(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(path.parent / "kernels"))
    monkeypatch.setattr(thread_state, "streams", [])
    if kind == "gpu":
        capture_for_gpu(monkeypatch)
    before = tg.kernel_cache.info().hits
    first, step = (tg.capture(accumulate, donate_argnums=0, name="step") for _ in range(2))
    wanted = first(place(X), place(X))
    assert_same(step(place(X), place(X)), wanted)
    assert tg.kernel_cache.info().hits == before + 1
    step.save(path)
    assert_same(tg.load(path)(place(X), place(X)), wanted)
