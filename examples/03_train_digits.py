"""Train a digit classifier: forward pass, gradients and Adam are captured as one graph.

The state is donated: it lives in the graph's memory and is updated there. The same step under
jax.jit runs next to it, and must give the same losses.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib import pyplot as plt

import tracegraph as tg

DATA = pathlib.Path(__file__).parent / "data" / "digits.csv.gz"
EPOCHS, BATCH, TRAIN = 15, 50, 1500
OPTIMIZER = optax.adam(2e-3)


def make_state() -> Any:
    """Weights of a 64-128-10 network, and Adam's state."""
    w1, w2 = (jax.random.normal(jax.random.key(n), (n, m)) / 7 for n, m in [(64, 128), (128, 10)])
    params = {"w1": w1, "b1": jnp.zeros(128), "w2": w2, "b2": jnp.zeros(10)}
    return params, OPTIMIZER.init(params)


def predict(params: Any, images: Any) -> jax.Array:
    """Returns one score per digit."""
    return jax.nn.relu(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def update(state: Any, images: Any, labels: Any) -> Any:
    """One train step: (state, images, labels) to (state, loss)."""

    def find_loss(params: Any) -> jax.Array:
        scores = predict(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    loss, gradients = jax.value_and_grad(find_loss)(state[0])
    changes, adam = OPTIMIZER.update(gradients, state[1])
    return (optax.apply_updates(state[0], changes), adam), loss


def main(plot: str) -> None:
    rows = np.random.default_rng(0).permutation(np.loadtxt(DATA, delimiter=",", dtype=np.int32))
    images, labels = (rows[:, :64] / 16).astype(np.float32), rows[:, 64]
    step, reference = tg.capture(update, donate_argnums=0), jax.jit(update, donate_argnums=0)
    states, losses = [make_state(), make_state()], []
    for epoch in range(EPOCHS):
        for batch in np.random.default_rng(epoch).permutation(TRAIN).reshape(-1, BATCH):
            states[0], loss = step(states[0], images[batch], labels[batch])
            states[1], wanted = reference(states[1], images[batch], labels[batch])
            losses.append((loss, wanted))
        print(f"epoch {epoch + 1:2}/{EPOCHS}, loss {losses[-1][0]:.4f}", flush=True)
    curve, wanted_curve = np.asarray(losses, np.float32).T
    accuracy = np.mean(np.argmax(predict(states[0][0], images[TRAIN:]), axis=1) == labels[TRAIN:])
    print(f"accuracy on {len(labels) - TRAIN} held-out digits: {accuracy:.1%}")
    print("loss curve equals jax.jit's bit for bit:", curve.tobytes() == wanted_curve.tobytes())
    pool_bytes = step.lower(states[0], images[:BATCH], labels[:BATCH]).pool_bytes
    print(f"calls: {len(losses)}, captures: {step.cache_info().captures}, pool: {pool_bytes} bytes")
    plt.semilogy(curve)
    plt.gca().set(title=f"{accuracy:.1%} of held-out digits right", xlabel="step", ylabel="loss")
    plt.savefig(plot)
    print("loss plot:", plot)
    assert accuracy >= 0.95
    assert curve.tobytes() == wanted_curve.tobytes()
    assert step.cache_info().captures == 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", default="digits_loss.png", help="where to write the loss plot")
    main(parser.parse_args().plot)
