"""Primitives that stand for several others, some only since JAX 0.12, in buckets and autocast."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.scipy import special

import tracegraph as tg


def take_apart(x: Any) -> Any:
    one, other, third = jnp.moveaxis(x, 1, 0)
    return one * other + third


def put_together(x: Any) -> Any:
    return jnp.stack([x[:, 0], x[:, 2], x[:, 1]], axis=1), jnp.stack([x, 2 * x])


FUNCTIONS = {
    "unstack": take_apart,
    "stack": put_together,
    "gradient of unstack": jax.grad(lambda x: jnp.sin(take_apart(x)).sum()),
    "log2": jnp.log2,
    "polynomial": lambda x: special.ndtri(x / 4) + special.gammaln(x),
    "one minus square": jax.vmap(jax.vmap(jax.grad(jnp.tanh))),
    "tile": lambda x: jnp.tile(x, (1, 2)),
    "bits": lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint8), jnp.int32),
    "named": lambda x: checkpoint_name(x, "hidden") + 1,
    "barrier": lambda x: sum(lax.optimization_barrier((x, 2 * x))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_buckets_know_what_they_are(name: str) -> None:
    function = FUNCTIONS[name]
    captured: Any = tg.capture(function, buckets={"x": {0: (4, 8)}}, name="f")
    for size in (3, 4, 7):
        x = jnp.asarray(np.random.default_rng(size).uniform(1, 3, (size, 3)), jnp.float32)
        found = captured(x)
        jax.tree.map(np.testing.assert_array_equal, found, jax.jit(function)(x))


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x: lax.unstack(x)[0], "traced in another way for other sizes"),
        (lambda x: lax.tile(x, [2, 1]), "repeats the padded axis 0"),
        (lambda x: lax.stack([x, x]).sum(1), "sums over the padded axis 1"),
    ],
)
def test_what_mixes_padding_with_values_is_refused(function: Any, what: str) -> None:
    captured: Any = tg.capture(function, buckets={"x": {0: (4, 8)}}, name="f")
    with pytest.raises(tg.CaptureError, match=what):
        captured(jnp.ones((3, 2)))
    whole: Any = tg.capture(function, name="g")
    np.testing.assert_array_equal(whole(jnp.ones((3, 2))), function(jnp.ones((3, 2))))


def test_autocast_computes_logarithms_in_float32() -> None:
    def compute(x: Any) -> Any:
        with tg.amp.autocast(jnp.bfloat16):
            return jnp.log2(x)

    assert ":f32[2] = log" in str(jax.make_jaxpr(compute)(jnp.ones(2, jnp.bfloat16)))
