"""Reads of results by the host: right, of the replay that they are of, and without XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.definitions_anew import note_definitions

DTYPES = ("bool", "int8", "int32", "uint32", "float16", "bfloat16", "float32", "complex64")


@pytest.fixture
def defined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return note_definitions(monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_reads_as_with_jit(dtype: str, defined: list[Any]) -> None:
    def shift(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.roll(x, 1)
        return y, y[0, 0]

    values = np.random.default_rng(0).integers(0, 100, (37, 5))
    x = jnp.asarray(values, dtype)
    rows, corner = tg.capture(shift)(x)
    ours = [np.asarray(rows), corner.item(), str(corner), rows.tolist()]
    assert not defined
    rows, corner = jax.jit(shift)(x)
    theirs = [np.asarray(rows), corner.item(), str(corner), rows.tolist()]
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert ours[1:] == theirs[1:]


def test_a_loop_that_reads_each_loss_sees_each_loss(defined: list[Any]) -> None:
    @tg.capture(donate_argnums=0)
    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = state @ x / 8 + 1
        return state, state.sum()

    x = jax.random.normal(jax.random.key(0), (64, 64))
    state, wanted = jnp.ones((64, 64)), jnp.ones((64, 64))
    plain = jax.jit(lambda state, x: (state @ x / 8 + 1, (state @ x / 8 + 1).sum()))
    for _ in range(50):
        state, loss = step(state, x)
        wanted, wanted_loss = plain(wanted, x)
        assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-4, abs=1e-2)
    assert not defined


def test_a_read_that_was_begun_is_of_its_own_replay() -> None:
    captured = tg.capture(lambda x: jnp.tanh(x) * 3)
    values = [jnp.full((256, 256), value, jnp.float32) for value in range(20)]
    results = []
    for value in values:
        results.append(captured(value))
        results[-1].copy_to_host_async()
    for value, result in zip(values, results, strict=True):
        np.testing.assert_array_equal(result, jax.jit(lambda x: jnp.tanh(x) * 3)(value))


def test_values_that_jax_computes_from_a_result_after_a_read() -> None:
    captured = tg.capture(lambda x: x * 2)
    result = captured(jnp.arange(8.0))
    assert result.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert float((result + 1).sum()) == 64
    assert jax.device_get({"a": result})["a"].tolist() == result.tolist()


def test_a_raw_graph_is_read_after_each_replay(defined: list[Any]) -> None:
    graph, x = tg.CUDAGraph(), tg.static_input(jnp.arange(4096.0))
    with tg.graph(graph):
        y = jnp.sqrt(x) + 1
        total = y.sum()
    for start in range(5):
        values = np.arange(4096, dtype=np.float32) + start
        x.copy_(jnp.asarray(values))
        graph.replay()
        np.testing.assert_allclose(y, np.sqrt(values) + 1, rtol=1e-6)
        assert float(total) == pytest.approx(float((np.sqrt(values) + 1).sum()), rel=1e-5)
    assert not defined
