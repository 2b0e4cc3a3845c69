"""Train over several devices: one captured step, its collectives inside, state on each device.

The batch is split over a mesh, the parameters are whole on each device. XLA puts in the all-reduce
of the gradients, and each replay runs it on all devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg

DEVICES, ROWS, WIDTH, STEPS = 4, 64, 8, 20


def train(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
    """Returns the parameters after one step of gradient descent, and the loss before it."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def main() -> None:
    """Trains with `tg.capture` and with `jax.jit`, and compares."""
    # Has no effect where there are GPUs.
    jax.config.update("jax_num_cpu_devices", DEVICES)
    count = jax.local_device_count()
    mesh = jax.make_mesh((count,), ("data",), (jax.sharding.AxisType.Auto,))
    whole, split = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("data"))
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        "v": rng.normal(size=(WIDTH, 1)).astype(np.float32),
    }
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))
    batch = jax.device_put((x, y), split)

    step, twin = tg.capture(train, donate_argnums=0, name="step"), jax.jit(train, donate_argnums=0)
    ours, theirs = jax.device_put(weights, whole), jax.device_put(weights, whole)
    losses = []
    for _ in range(STEPS):
        ours, loss = step(ours, *batch)
        theirs, expected = twin(theirs, *batch)
        assert loss == expected
        losses.append(float(loss))
    assert all(np.array_equal(ours[name], theirs[name]) for name in weights)
    assert losses[-1] < losses[0]
    print(f"{len(ours['w'].devices())} devices, loss {losses[0]:.2f} to {losses[-1]:.2f}")
    print(step.explain(ours, *batch))


if __name__ == "__main__":
    main()
