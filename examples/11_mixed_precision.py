"""Train in bfloat16, and in float16 with a scaled loss: the whole step is one graph.

PyTorch keeps the step of its scaler out of a graph, since it asks the device whether to skip. Here
the graph decides: steps whose gradients overflow are skipped in it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg

BATCH, WIDTH, OUTPUT, STEPS, RATE = 64, 128, 16, 20, 0.05

Params = list[jax.Array]


def make_params() -> Params:
    """Returns the weights of two layers, in float32."""
    drawn = jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    return [drawn[0], drawn[1, :, :OUTPUT]]


def sgd(grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
    """Makes a step; any function like this will do, or an optimizer of optax."""
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), state


def make_step(dtype: Any) -> Any:
    """Returns a captured train step that computes in a dtype."""

    def compute_loss(params: Params, x: jax.Array, target: jax.Array) -> jax.Array:
        with tg.amp.autocast(dtype):
            output = jnp.tanh(x @ params[0]) @ params[1]
        return jnp.mean((output - target) ** 2)  # in float32

    @tg.capture(donate_argnums=(0, 1))
    def step(params: Params, scaler: tg.amp.GradScaler, x: jax.Array, target: jax.Array) -> Any:
        def scaled(params: Params) -> tuple[jax.Array, jax.Array]:
            value = compute_loss(params, x, target)
            return scaler.scale(value), value

        grads, value = jax.grad(scaled, has_aux=True)(params)
        params, _, found_inf = scaler.step(sgd, grads, (), params)
        return params, scaler.update(found_inf), value, found_inf

    return step


def train(dtype: Any, scaler: tg.amp.GradScaler) -> tuple[list[float], int]:
    """Returns the losses, and how many steps were skipped."""
    step, params, losses, skipped = make_step(dtype), make_params(), [], 0
    x, target = jax.random.normal(jax.random.key(1), (2, BATCH, WIDTH))
    for _ in range(STEPS):
        params, scaler, loss, found_inf = step(params, scaler, x, jnp.sign(target[:, :OUTPUT]))
        losses.append(float(loss))
        skipped += int(found_inf)
    scaler.check()
    assert step.cache_info().misses == 1
    return losses, skipped


def main() -> None:
    """Trains twice from the same weights, and compares the losses."""
    losses, _ = train(jnp.bfloat16, tg.amp.GradScaler(enabled=False))
    print(f"bfloat16: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    halves, skipped = train(jnp.float16, tg.amp.GradScaler(2.0**24))
    print(f"float16:  loss {halves[0]:.4f} -> {halves[-1]:.4f}, {skipped} steps skipped")
    assert 0 < skipped < STEPS
    np.testing.assert_allclose(losses[: STEPS - skipped], halves[skipped:], rtol=2e-2)
    print("one graph each, and no wait for the device in it")


if __name__ == "__main__":
    main()
