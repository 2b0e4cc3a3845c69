"""Capture once, save, and replay in a fresh process that has no source and compiles nothing.

A small language model serves batches of 1 to 8 prompts. One process captures the graphs of all
sizes and writes them to a file; another loads it and answers. Its weights come beside it.
"""

from __future__ import annotations

import hashlib
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg

VOCABULARY, WIDTH, LENGTH = 512, 512, 12
SERVE = """
import pathlib, sys, time
import numpy as np
import tracegraph as tg

folder, digest = pathlib.Path(sys.argv[1]), sys.argv[2]
weights = dict(np.load(folder / "weights.npz"))
start = time.perf_counter()
answer = tg.load(folder / "answer.tg", sha256=digest, constants={"WEIGHTS": weights})
loaded = time.perf_counter()
for size in (3, 8, 1):
    prompts = np.arange(size * 12, dtype=np.int32).reshape(size, 12) % 512
    np.save(folder / f"tokens{size}.npy", answer(prompts))
print(f"loaded in {loaded - start:.2f} s, 3 batches in {time.perf_counter() - loaded:.2f} s")
print(answer.explain().splitlines()[0].partition(",")[0], [i.hits for i in answer.bucket_info()])
"""


def make_weights(seed: int) -> dict[str, jax.Array]:
    """Returns random weights of a mebibyte each."""
    names = ("embed", "hidden", "head")
    keys = jax.random.split(jax.random.key(seed), len(names))
    shape = (VOCABULARY, WIDTH)
    return {name: jax.random.normal(key, shape) / 16 for name, key in zip(names, keys, strict=True)}


WEIGHTS = make_weights(0)


@tg.capture(buckets={"prompts": {0: (2, 4, 8)}})
def answer(prompts: jax.Array) -> jax.Array:
    """Returns the next token of each prompt."""
    values = WEIGHTS["embed"][prompts].mean(1)
    return (jnp.tanh(values @ WEIGHTS["hidden"]) @ WEIGHTS["head"].T).argmax(1)


def main() -> None:
    """Saves, and lets another process serve."""
    assert isinstance(answer, tg.BucketedFunction)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        answer.warm_up(jax.ShapeDtypeStruct((1, LENGTH), jnp.int32))
        answer.save(folder / "answer.tg", constants=False)
        np.savez(folder / "weights.npz", **jax.tree.map(np.asarray, WEIGHTS))
        size = (folder / "answer.tg").stat().st_size
        print(f"{answer.cache_info().captures} graphs in {size:,} bytes, without weights")
        digest = hashlib.sha256((folder / "answer.tg").read_bytes()).hexdigest()
        command = [sys.executable, "-c", SERVE, name, digest]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
        for size in (3, 8, 1):
            prompts = jnp.arange(size * LENGTH, dtype=jnp.int32).reshape(size, LENGTH)
            expected = answer(prompts % VOCABULARY)
            assert np.array_equal(np.load(folder / f"tokens{size}.npy"), expected)


if __name__ == "__main__":
    main()
