"""Graphs of one function that update the same state have it in one place, on a CudaDevice."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.runtime.cuda import buffer

SIZE = 1 << 16  # 256 KiB of floats
NBYTES = 4 * SIZE


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    monkeypatch.setattr(buffer, "ALIGNMENT", 64)
    return capture_for_gpu(monkeypatch)


def read_reserved(device: CudaOnHost) -> int:
    gc.collect()
    return device.allocator.statistics.all.reserved_bytes.current


def make_state() -> dict[str, jax.Array]:
    return {"w": jnp.arange(SIZE, dtype=jnp.float32), "b": jnp.ones(3)}


def branch(state: Any, x: Any) -> Any:
    """Reads a value, and updates the state in one of two ways."""
    mean = x.mean()
    if mean > 0:
        state = {"w": state["w"] + mean, "b": state["b"] * 2}
    else:
        state = {"w": state["w"] - 1, "b": state["b"] + x[0]}
    return state, state["b"].sum()


def update(state: Any, x: Any) -> Any:
    """Has a graph for each shape of x."""
    return {"w": state["w"] + x.mean(), "b": state["b"] * 2 + x.sum()}, state["w"][1]


def run_plainly(function: Any, state: Any, inputs: list[Any]) -> tuple[Any, list[Any]]:
    losses = []
    for x in inputs:
        state, loss = function(state, x)
        losses.append(np.asarray(loss))
    return state, losses


PLUS, MINUS = jnp.array([3.0, 1.0]), jnp.array([-3.0, -1.0])
WAYS = [PLUS, MINUS, MINUS, PLUS, MINUS, PLUS, PLUS]
SHAPES = [PLUS, jnp.ones(5), jnp.ones(5), PLUS, jnp.ones(5), PLUS]
CASES: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    "branches": (branch, WAYS, {"mode": "partial"}),
    "shapes": (update, SHAPES, {}),
}


def capture(name: str) -> tuple[Any, Any, list[Any]]:
    function, inputs, options = CASES[name]
    return tg.capture(function, donate_argnums=0, **options), function, inputs


def assert_equal(found: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("name", CASES)
def test_graphs_in_turns_compute_what_python_does(name: str, device: CudaOnHost) -> None:
    captured, function, inputs = capture(name)
    wanted, losses = run_plainly(function, make_state(), inputs)
    state, found = make_state(), []
    addresses = set()
    for x in inputs:
        state, loss = captured(state, x)
        found.append(np.asarray(loss))
        addresses.add(state["w"].data_ptr())
    assert_equal(found, losses)
    assert_equal(state, wanted)
    assert len(addresses) == 1


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_in_memory_once_and_never_copied(name: str, device: CudaOnHost) -> None:
    before = read_reserved(device)
    captured, _, inputs = capture(name)
    state = make_state()
    for x in inputs:
        state, _ = captured(state, x)
    assert NBYTES <= read_reserved(device) - before < 1.5 * NBYTES
    copies = device.driver.count_calls("copy_async")
    for x in inputs:
        state, _ = captured(state, x)
    # Those of the reads in `branch`, and of no leaf.
    reads = len(inputs) if name == "branches" else 0
    assert device.driver.count_calls("copy_async") - copies == reads


@pytest.mark.parametrize("name", CASES)
def test_old_leaves_are_deleted_and_other_states_are_kept_apart(
    name: str, device: CudaOnHost
) -> None:
    captured, function, inputs = capture(name)
    first, other = inputs[0], next(x for x in inputs if x is not inputs[0])
    old, _ = captured(make_state(), first)
    new, _ = captured(old, other)
    assert old["w"].is_deleted()
    with pytest.raises(tg.TracegraphError, match="donated"):
        captured(old, first)
    # A second state takes the place; the first keeps its value.
    start = {"w": jnp.zeros(SIZE), "b": jnp.zeros(3)}
    second, _ = captured(start, first)
    wanted, _ = run_plainly(function, make_state(), [first, other])
    assert_equal(new, wanted)
    start = {"w": jnp.zeros(SIZE), "b": jnp.zeros(3)}
    assert_equal(second, function(start, first)[0])
    # And both go on.
    new, _ = captured(new, first)
    second, _ = captured(second, other)
    assert_equal(new, run_plainly(function, make_state(), [first, other, first])[0])
    start = {"w": jnp.zeros(SIZE), "b": jnp.zeros(3)}
    assert_equal(second, run_plainly(function, start, [first, other])[0])


@pytest.mark.parametrize("name", CASES)
def test_a_changed_tree_is_seen_by_every_graph(name: str, device: CudaOnHost) -> None:
    captured, function, inputs = capture(name)
    first, other = inputs[0], next(x for x in inputs if x is not inputs[0])
    state, _ = captured(make_state(), first)
    state, _ = captured(state, other)
    state["b"] = jnp.full(3, 7.0)
    state, _ = captured(state, first)
    wanted, _ = run_plainly(function, make_state(), [first, other])
    wanted["b"] = jnp.full(3, 7.0)
    assert_equal(state, function(wanted, first)[0])


def test_leaves_that_change_places(device: CudaOnHost) -> None:
    def swap(state: Any, x: Any) -> Any:
        return [state[0] + x.sum(), state[1] * 2], x.sum()

    captured = tg.capture(swap, donate_argnums=0)
    state = [jnp.zeros(SIZE), jnp.ones(SIZE)]
    state, _ = captured(state, PLUS)
    state, _ = captured(state, jnp.ones(5))
    # Each is read before the other is written, whichever graph runs.
    state, _ = captured([state[1], state[0]], PLUS)
    assert_equal(state, [jnp.full(SIZE, 8.0), jnp.full(SIZE, 18.0)])


@pytest.mark.parametrize("name", CASES)
def test_a_launch_that_fails_loses_the_state_for_all(name: str, device: CudaOnHost) -> None:
    captured, function, inputs = capture(name)
    first, other = inputs[0], next(x for x in inputs if x is not inputs[0])
    state, _ = captured(make_state(), first)
    state, _ = captured(state, other)
    device.driver.fail_on = "launch"
    with pytest.raises(tg.TracegraphError):
        captured(state, first)
    if not state["w"].is_deleted():
        state, _ = captured(state, first)
        wanted, _ = run_plainly(function, make_state(), [first, other, first])
        assert_equal(state, wanted)
    state, _ = captured(make_state(), other)
    assert_equal(state, run_plainly(function, make_state(), [other])[0])


@pytest.mark.parametrize("name", CASES)
def test_release_reset_and_counts(name: str, device: CudaOnHost) -> None:
    before = read_reserved(device)
    captured, function, inputs = capture(name)
    state, seen = make_state(), []
    for x in inputs[:3]:
        state, _ = captured(state, x)
        seen.append(x)
    captured.release()
    for x in inputs[3:]:
        state, _ = captured(state, x)
        seen.append(x)
    assert_equal(state, run_plainly(function, make_state(), seen)[0])
    info = captured.cache_info()
    assert info.hits + info.misses == len(seen)
    captured.reset()
    del state
    assert read_reserved(device) == before


def test_another_tree_of_results_has_a_home_of_its_own(device: CudaOnHost) -> None:
    def step(state: Any, x: Any) -> Any:
        state = state + x[0]
        return (state, x) if x.size == 2 else (state, x, x)

    captured, state = tg.capture(step, donate_argnums=0), jnp.zeros(SIZE)
    for count, x in enumerate([PLUS, jnp.full(5, 3.0), PLUS], start=1):
        state, *_ = captured(state, x)
        assert_equal(state, jnp.full(SIZE, 3.0 * count))
