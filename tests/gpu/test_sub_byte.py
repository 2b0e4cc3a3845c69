"""Elements of less than a byte on a GPU: arguments, state, results and constants."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import assert_replayed
from tracegraph.runtime.definition.packing import PACKED_BITS

pytestmark = pytest.mark.usefixtures("gpu")


def draw(name: str, *shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 4, shape)
    return (values - (0 if name.startswith("u") else 2)).astype(getattr(jnp, name))


@pytest.mark.parametrize("name", PACKED_BITS)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (64, 128)])
def test_arguments_and_results_equal_jit(name: str, shape: tuple[int, ...]) -> None:
    def run(x: Any, y: Any) -> Any:
        wide = x.astype(jnp.float32)
        return x[::-1], wide * 2, (wide + y).astype(x.dtype), x

    captured: Any = tg.capture(run)
    for seed in range(3):
        host, y = draw(name, *shape, seed=seed), jnp.float32(seed % 2)
        for x in (host, jnp.asarray(host)):
            result = captured(x, y)
            assert_replayed(captured, result, (x, y))
            for one, other in zip(result, jax.jit(run)(x, y), strict=True):
                assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert captured.cache_info().captures == 1


def test_quantized_weights() -> None:
    weights, scales = jnp.asarray(draw("int4", 256, 128)), jnp.linspace(0.5, 1.5, 128)

    def forward(x: Any, w: Any, s: Any) -> Any:
        return x @ (w.astype(jnp.bfloat16) * s.astype(jnp.bfloat16))

    captured: Any = tg.capture(forward)
    for seed in range(3):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=(8, 256)), jnp.bfloat16)
        assert_replayed(captured, captured(x, weights, scales), (x, weights, scales))


def test_donated_state_is_updated_in_place() -> None:
    def step(state: Any, x: Any) -> Any:
        return (state.astype(jnp.float32) * x).astype(state.dtype)

    captured: Any = tg.capture(step, donate_argnums=0)
    state, wanted = jnp.asarray(draw("int4", 33)), jnp.asarray(draw("int4", 33))
    for factor in (-1.0, 1.0, -1.0):
        state = captured(state, jnp.float32(factor))
        wanted = jax.jit(step)(wanted, jnp.float32(factor))
        assert np.asarray(state).tobytes() == np.asarray(wanted).tobytes()


def test_closed_over_tables() -> None:
    for size in (9, 1 << 21):
        table = jnp.asarray(draw("uint4", size))
        captured: Any = tg.capture(lambda i, table=table: table[i].astype(jnp.int32) * 2)
        i = jnp.arange(5)
        assert (np.asarray(captured(i)) == 2 * np.asarray(table[:5].astype(jnp.int32))).all()
