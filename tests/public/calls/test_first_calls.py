"""Files that are still to be verified: the first call compares the graph with XLA's executable."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.regions_as_kernels import capture_for_gpu

# XLA:CPU, which stands for a GPU's compiler, does not write what it has read from JAX's cache.
from tests.optimized import optimized as optimized
from tracegraph.capturing.pipeline import Capture
from tracegraph.saving import first_calls
from tracegraph.saving.save_captures import collect_captures, write_captures

X = jnp.linspace(-1, 1, 8)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> CudaOnHost:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(tmp_path / "kernels"))
    return capture_for_gpu(monkeypatch)


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs that were compared."""
    names: list[str] = []
    verify = first_calls.verify_on_device

    def note(comparison: Any, graph: Any, *args: Any) -> Any:
        names.append(graph.name)
        return verify(comparison, graph, *args)

    monkeypatch.setattr(first_calls, "verify_on_device", note)
    return names


def save_unverified(path: pathlib.Path) -> pathlib.Path:
    @tg.capture(donate_argnums=0)
    def step(state: Any, x: Any) -> Any:
        return state + jnp.tanh(x), (state * x).sum()

    captures: list[Any] = [
        Capture(None, None, {}, recipe=step.lower(jnp.ones(size), jnp.ones(size)))  # pyright: ignore[reportArgumentType]
        for size in (8, 4)
    ]
    device = jax.devices()[0]
    collected = collect_captures(
        step._function, step._options, captures, device, has_constants=True
    )
    write_captures(path, collected)
    return path


def run(step: Any) -> list[Any]:
    state, found = jnp.zeros(8), []
    for _ in range(3):
        state, total = step(state, X)
        found.append(float(total))
    return [*found, np.asarray(state).tolist()]


def test_the_first_call_of_a_signature_verifies_it(
    device: CudaOnHost, proven: list[str], tmp_path: pathlib.Path
):
    loaded = tg.load(save_unverified(tmp_path / "step.tg"))
    assert "verification: still to be done" in loaded.explain()
    found = run(loaded)
    assert proven == ["step"]
    expected, state = [], np.zeros(8, np.float32)
    for _ in range(3):
        expected.append(float((state * X).sum()))
        state = state + np.tanh(X)
    np.testing.assert_allclose(found[:3], expected, rtol=1e-6)
    np.testing.assert_allclose(found[3], state, rtol=1e-6)
    loaded(jnp.zeros(4), X[:4])
    run(loaded)
    assert proven == ["step", "step"]


def test_what_was_found_is_kept_for_the_next_process(
    device: CudaOnHost,
    proven: list[str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    path = save_unverified(tmp_path / "step.tg")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")
    run(tg.load(path))
    run(tg.load(path))
    assert len(proven) == 2, "without a cache each process verifies"
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    run(tg.load(path))
    run(tg.load(path))
    assert len(proven) == 3
    for proof in (tmp_path / "kernels").iterdir():
        proof.write_bytes(b"damaged")
    run(tg.load(path))
    assert len(proven) == 4


def test_a_wrong_graph_is_not_used(
    device: CudaOnHost, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = save_unverified(tmp_path / "step.tg")
    loaded = tg.load(path)
    monkeypatch.setattr(
        "tracegraph.verification.device_verification.run_reference",
        lambda graph, inputs: [jnp.full(8, 7.0), jnp.asarray(7.0)],
    )
    for _ in range(2):
        with pytest.raises(tg.VerificationError, match="`step`"):
            loaded(jnp.zeros(8), X)
    monkeypatch.undo()
