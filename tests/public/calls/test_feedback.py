"""Results passed to graphs again: read where they are, on the host and on a CudaDevice alike."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.runtime.cuda import buffer

N = 8


@pytest.fixture(params=["host", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    # Host memory of JAX is on borders of 64 bytes; what is not on one of XLA's is copied.
    monkeypatch.setattr(buffer, "ALIGNMENT", 64)
    return capture_for_gpu(monkeypatch) if request.param == "cuda" else None


def assert_value(array: jax.Array, value: float) -> None:
    np.testing.assert_array_equal(np.asarray(array), np.full(N, value, np.float32))


def count_copies(device: CudaOnHost | None) -> int:
    return device.driver.count_calls("copy_async") if device is not None else 0


def test_a_loop_feeds_its_result_back(device):
    """As a decode loop does; no copy is made, and the graph never writes what it reads."""
    step = tg.capture(lambda x: x + 1)
    x = step(jnp.zeros(N))
    x = step(x)
    copies = count_copies(device)
    for _ in range(50):
        x = step(x)
    assert count_copies(device) == copies
    assert_value(x, 52)
    assert step.cache_info().captures == 1


def test_results_that_are_held_keep_their_values(device):
    step = tg.capture(lambda x: x + 1)
    kept = [step(jnp.zeros(N))]
    for _ in range(30):
        kept.append(step(kept[-1]))
    for index in range(0, 30, 3):
        kept[index] = None
    gc.collect()
    for _ in range(10):
        kept.append(step(kept[-1]))
    for index, array in enumerate(kept):
        if array is not None:
            assert_value(array, index + 1)


@pytest.mark.parametrize("reads", ["never", "before", "after"])
def test_a_result_that_was_read_is_fed_back(device, reads):
    step = tg.capture(lambda x: x * 2)
    x = step(jnp.ones(N))
    for power in range(2, 8):
        if reads == "before":
            assert_value(x, 2.0 ** (power - 1))
        y = step(x)
        if reads == "after":
            assert_value(x, 2.0 ** (power - 1))
        x = y
    assert_value(x, 2.0**7)


def test_one_graph_feeds_another(device):
    first, second = tg.capture(lambda x: x + 1), tg.capture(lambda x, y: x * 2 + y)
    for value in range(5):
        y = first(jnp.full(N, float(value)))
        copies = count_copies(device) if value > 1 else None
        z = second(y, y)
        assert copies in (None, count_copies(device))
        assert_value(z, 3.0 * (value + 1))
        assert_value(y, value + 1.0)


def test_trees_of_results(device):
    step = tg.capture(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    tree = {"a": jnp.zeros(N), "b": [jnp.ones(N), jnp.full(N, 2.0)]}
    for _ in range(10):
        tree = step(tree)
    for index, leaf in enumerate(jax.tree.leaves(tree)):
        assert_value(leaf, index + 10.0)


def test_a_result_may_be_donated(device):
    step, update = tg.capture(lambda x: x + 1), tg.capture(lambda s: s * 2, donate_argnums=0)
    x = step(jnp.zeros(N))
    state = update(x)
    assert_value(state, 2.0)
    with pytest.raises((RuntimeError, tg.ReplayError), match="deleted"):
        np.asarray(x)
    with pytest.raises((RuntimeError, ValueError, tg.TracegraphError)):
        step(x)
    assert_value(step(state), 3.0)


def test_results_of_other_types_are_other_signatures(device):
    make = tg.capture(lambda x: (x.astype(jnp.int32), x[:4]))
    step = tg.capture(lambda x: x + 1)
    integers, short = make(jnp.full(N, 3.0))
    assert_value(step(jnp.zeros(N)), 1.0)
    assert np.asarray(step(integers)).dtype == np.int32
    assert step(short).shape == (4,)
    assert step.cache_info().captures == 3


def test_static_and_resident_results_are_copied(device):
    static = tg.capture(lambda x: x + 1, outputs="static")
    step = tg.capture(lambda x: x * 3)
    for value in range(4):
        y = static(jnp.full(N, float(value)))
        z = step(y)
        static(jnp.full(N, 100.0))
        assert_value(z, 3.0 * (value + 1))
