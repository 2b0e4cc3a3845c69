"""What the parts of a function copy between them, on a CudaDevice over host memory."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost, place
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.replaying import replayable_graph
from tracegraph.runtime.cuda import buffer
from tracegraph.runtime.streams.stream_capture import thread_state

NBYTES = {"first": 64 * 32 * 4, "left": 32 * 16 * 4, "right": 32 * 8 * 4}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    monkeypatch.setattr(thread_state, "streams", [])
    # Memory of the host is less aligned than that of a GPU.
    monkeypatch.setattr(buffer, "ALIGNMENT", 1)
    return capture_for_gpu(monkeypatch)


def step(weights: Any, x: jax.Array) -> Any:
    def compute_loss(weights: Any) -> jax.Array:
        hidden = jnp.tanh(x @ weights["first"])
        return (hidden @ weights["left" if x[0, 0] > 0 else "right"]).mean()

    loss, gradients = jax.value_and_grad(compute_loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def make_weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"first": (64, 32), "left": (32, 16), "right": (32, 8)}
    return {name: place(rng.normal(size=shape) / 8) for name, shape in shapes.items()}


def make_batch(sign: float) -> jax.Array:
    return place(np.full((4, 64), sign, np.float32))


def advance(captured: Any, state: Any, expected: Any, sign: float) -> tuple[Any, Any]:
    """Makes a step, and the same one in plain Python; compares the losses."""
    state, loss = captured(state, make_batch(sign))
    expected, wanted = step(expected, make_batch(sign))
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    return state, expected


@pytest.fixture
def trained(device: CudaOnHost) -> tuple[Any, Any, Any]:
    captured = tg.capture(step, mode="partial", donate_argnums=0, verify=False)
    state, expected = make_weights(), make_weights()
    for sign in (1.0, -1.0, 1.0, 1.0):
        state, expected = advance(captured, state, expected, sign)
    return captured, state, expected


def note_copies(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the size of each copy of a weight, as copies are made."""
    copied: list[int] = []
    copy = device.driver.copy_async

    def note(target: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes in NBYTES.values():
            copied.append(nbytes)
        copy(target, source, nbytes, stream)

    monkeypatch.setattr(device.driver, "copy_async", note)
    return copied


def test_weights_are_read_where_they_are(
    device: CudaOnHost, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, state, expected = trained
    copied = note_copies(device, monkeypatch)
    # Another branch has them in the same place.
    for sign in (1.0, 1.0, -1.0, -1.0, 1.0):
        state, expected = advance(captured, state, expected, sign)
    assert copied == []
    for name, value in state.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6)


def test_weights_of_a_graph_that_another_thread_holds_are_copied(
    device: CudaOnHost, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, state, expected = trained
    lock = state["first"].lock
    copy_together, done = replayable_graph.copy_together, threading.Event()
    is_held = threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            done.wait(timeout=300)

    def copy_later(arrays: Any) -> Any:
        done.set()
        thread.join()
        return copy_together(arrays)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait(timeout=300)
    monkeypatch.setattr(replayable_graph, "copy_together", copy_later)
    copied = note_copies(device, monkeypatch)
    # A private copy, and one into the first part; in the last part it is in its place.
    state, expected = advance(captured, state, expected, -1.0)
    assert done.is_set()
    assert copied.count(NBYTES["first"]) == 2
    advance(captured, state, expected, -1.0)


def test_a_call_that_fails_gives_the_locks_back(
    device: CudaOnHost, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, state, expected = trained
    copy = device.driver.copy_async

    def fail(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    lock = state["first"].lock
    monkeypatch.setattr(device.driver, "copy_async", fail)
    with pytest.raises(KeyboardInterrupt):
        captured(state, make_batch(-1.0))
    assert not lock._is_owned()
    monkeypatch.setattr(device.driver, "copy_async", copy)
    advance(captured, state, expected, 1.0)


def test_the_owner_of_what_is_read_in_place_cannot_replay_before_the_launch(trained: Any) -> None:
    captured, state, expected = trained
    lock, held = state["first"].lock, []
    graph = captured._latest.root.part.find()
    launch = graph._launch_stages

    def note() -> None:
        held.append(lock._is_owned())
        launch()

    graph._launch_stages = note
    advance(captured, state, expected, 1.0)
    assert held == [True]
    assert not lock._is_owned()
