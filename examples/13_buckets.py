"""Serve any batch size from a few graphs: pad to the next size, replay, cut the result.

One decode step of a small network, for 1 to 16 requests at a time. The mean over a
batch is masked by its true size; without a mask the capture is refused.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg

VOCABULARY, WIDTH, LENGTH = 64, 32, 12
SIZES = (1, 2, 4, 8, 16)

Weights = dict[str, jax.Array]


def make_weights(seed: int) -> Weights:
    """Returns random weights."""
    shapes = {"embed": (VOCABULARY, WIDTH), "hidden": (WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    items = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape) / np.sqrt(WIDTH) for (name, shape), key in items}


def decode(weights: Weights, prompts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the next token of each prompt, and how sure the batch is on average."""
    values = weights["embed"][prompts].mean(1)
    logits = jnp.tanh(values @ weights["hidden"]) @ weights["head"]
    best = jax.nn.softmax(logits).max(1)
    size = tg.bucket_size()
    is_true = jnp.arange(prompts.shape[0]) < size
    return logits.argmax(1), jnp.where(is_true, best, 0).sum() / size


def main() -> None:
    """Serves 40 batches of random sizes."""
    weights = make_weights(0)
    serve = tg.capture(decode, buckets={"prompts": {0: SIZES}})
    plain = jax.jit(serve)
    draw = np.random.default_rng(0)
    for _ in range(40):
        size = int(draw.integers(1, SIZES[-1] + 1))
        prompts = jnp.asarray(draw.integers(0, VOCABULARY, (size, LENGTH)), jnp.int32)
        tokens, surety = serve(weights, prompts)
        expected = plain(weights, prompts)
        assert np.array_equal(tokens, expected[0])
        assert np.allclose(surety, expected[1], rtol=1e-5)
    print(f"40 batches, {serve.cache_info().captures} captures, pool: {serve.pool_bytes:,} bytes")
    serve.release()
    print(f"released: {serve.pool_bytes:,} bytes")

    def forget_mask(prompts: jax.Array) -> jax.Array:
        return prompts.mean(0)

    try:
        tg.capture(forget_mask, buckets={"prompts": {0: SIZES}})(jnp.zeros((3, LENGTH)))
    except tg.CaptureError as error:
        print(error.violations[0].what)


if __name__ == "__main__":
    main()
