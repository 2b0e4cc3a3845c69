"""Look at every phase between a Python function and its replay, one at a time.

function -> Graph (our IR) -> regions -> memory plan -> graph -> replay
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import tracegraph as tg

Layers = list[jax.Array]


def loss(layers: Layers, x: jax.Array) -> jax.Array:
    """Mean square of a small network's output."""
    for weights in layers:
        x = jnp.tanh(x @ weights)
    return jnp.mean(x * x)


@tg.capture(donate_argnums=0)
def step(layers: Layers, x: jax.Array) -> tuple[Layers, jax.Array]:
    """One step of gradient descent."""
    value, gradients = jax.value_and_grad(loss)(layers, x)
    return [w - 0.1 * g for w, g in zip(layers, gradients, strict=True)], value


def make_layers() -> Layers:
    """Two layers with fixed random weights."""
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(keys[0], (8, 32)), jax.random.normal(keys[1], (32, 4))]


def main() -> None:
    """Prints each phase, then replays."""
    layers, x = make_layers(), jnp.ones((16, 8))

    print("--- trace: the Graph, one line per op, with the line that it comes from")
    ir_text = str(step.trace(layers, x))
    print(ir_text)

    print("--- lower: the program, and where each buffer is in the arena")
    lowered = step.lower(layers, x)
    print(lowered)
    assert lowered.plan.arena_bytes <= lowered.pool_bytes

    print("--- explain: all of it on one page")
    print(step.explain(layers, x))

    print("--- replay")
    values = []
    for _ in range(20):
        layers, value = step(layers, x)
        values.append(value)
    print(f"loss {values[0]:.4f} -> {values[-1]:.4f}, {step.cache_info()}")

    assert "dot_general" in ir_text
    assert "02_every_phase.py" in ir_text
    assert float(values[-1]) < float(values[0])
    assert step.cache_info().captures == 1


if __name__ == "__main__":
    main()
