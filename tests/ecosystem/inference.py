"""Inference of plain JAX: decoding, filtering, search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.ecosystem.program import Setup, draw, draw_key, normal, program


@program("whole", "partial")
def decode_with_a_cache() -> Setup:
    def step(cache, token):
        x = jnp.asarray(normal(9, 4))[token]
        q, k, v = jnp.split(x @ normal(4, 12), 3)
        keys = lax.dynamic_update_slice(cache["k"], k[None], (cache["n"], 0))
        values = lax.dynamic_update_slice(cache["v"], v[None], (cache["n"], 0))
        seen = jnp.arange(8) <= cache["n"]
        weights = jax.nn.softmax(jnp.where(seen, keys @ q, -jnp.inf))
        logits = (weights @ values) @ normal(4, 9)
        return {"k": keys, "v": values, "n": cache["n"] + 1}, (jnp.argmax(logits), logits)

    cache = {"k": jnp.zeros((8, 4)), "v": jnp.zeros((8, 4)), "n": jnp.int32(0)}
    return Setup(step, lambda rng: (int(rng.integers(9)),), cache)


@program()
def greedy_decoding() -> Setup:
    def run(prompt):
        def step(token, _):
            token = jnp.argmax(jnp.asarray(normal(9, 9))[token])
            return token, token

        return lax.scan(step, prompt[-1], None, length=5)[1]

    return Setup(run, lambda rng: (rng.integers(0, 9, 3),))


@program()
def beam_search() -> Setup:
    table = normal(7, 7)

    def run(start):
        def extend(index, beams):
            tokens, scores = beams
            logp = jax.nn.log_softmax(jnp.asarray(table)[tokens[:, index]])
            scores, flat = lax.top_k((scores[:, None] + logp).ravel(), 3)
            tokens = tokens[flat // 7].at[:, index + 1].set(flat % 7)
            return tokens, scores

        tokens = jnp.zeros((3, 6), jnp.int32).at[:, 0].set(start)
        return lax.fori_loop(0, 5, extend, (tokens, jnp.array([0.0, -9.0, -9.0])))

    return Setup(run, lambda rng: (int(rng.integers(7)),))


@program()
def top_p_sampling() -> Setup:
    def run(logits, key, temperature):
        ordered = jnp.sort(logits)[::-1]
        total = jnp.cumsum(jax.nn.softmax(ordered / temperature))
        limit = ordered[jnp.sum(total < 0.9)]
        return jax.random.categorical(key, jnp.where(logits < limit, -jnp.inf, logits))

    return Setup(run, lambda rng: (draw(rng, 12), draw_key(rng), 0.7))


@program()
def speculative_acceptance() -> Setup:
    def run(draft, target, tokens, key):
        p, q = (
            jnp.take_along_axis(jax.nn.softmax(v), tokens[:, None], 1)[:, 0]
            for v in (target, draft)
        )
        accepted = jax.random.uniform(key, (4,)) < jnp.minimum(1, p / q)
        count = jnp.cumprod(accepted.astype(jnp.int32)).sum()
        return count, jnp.where(jnp.arange(4) < count, tokens, -1)

    def make_batch(rng):
        return draw(rng, 4, 6), draw(rng, 4, 6), rng.integers(0, 6, 4), draw_key(rng)

    return Setup(run, make_batch)


@program()
def kalman_filter() -> Setup:
    a, noise = np.array([[1, 0.1], [0, 1]], np.float32), 0.1 * np.eye(2, dtype=np.float32)

    def step(carry, z):
        mean, cov = a @ carry[0], a @ carry[1] @ a.T + noise
        gain = cov[:, :1] / (cov[0, 0] + 0.5)
        mean = mean + gain[:, 0] * (z - mean[0])
        return (mean, cov - gain @ cov[:1]), mean

    def run(zs):
        return lax.scan(step, (jnp.zeros(2), jnp.eye(2)), zs)

    return Setup(run, lambda rng: (draw(rng, 6),))


@program()
def crf_likelihood_and_viterbi() -> Setup:
    transitions = normal(4, 4)

    def run(emissions, tags):
        def forward(alpha, e):
            return jax.nn.logsumexp(alpha[:, None] + transitions, axis=0) + e, None

        def best(delta, e):
            scores = delta[:, None] + transitions
            return scores.max(0) + e, scores.argmax(0)

        alpha, _ = lax.scan(forward, emissions[0], emissions[1:])
        last, pointers = lax.scan(best, emissions[0], emissions[1:])
        _, path = lax.scan(lambda t, p: (p[t], t), last.argmax(), pointers, reverse=True)
        steps = jnp.asarray(transitions)[tags[:-1], tags[1:]].sum()
        gold = emissions[jnp.arange(5), tags].sum() + steps
        return gold - jax.nn.logsumexp(alpha), path

    return Setup(run, lambda rng: (draw(rng, 5, 4), rng.integers(0, 4, 5)))


@program()
def state_space_model() -> Setup:
    def run(u, a, b, c):
        decay = jnp.exp(-jax.nn.softplus(a))
        inputs = u[:, None] * b
        decays = jnp.broadcast_to(decay, inputs.shape)
        _, h = lax.associative_scan(
            lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (decays, inputs)
        )
        return h @ c

    return Setup(run, lambda rng: (draw(rng, 8), draw(rng, 3), draw(rng, 3), draw(rng, 3)))


@program()
def rotary_embedding_and_grouped_heads() -> Setup:
    def run(x, positions):
        angles = positions[:, None] * (0.1 ** jnp.arange(2))
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        a, b = jnp.split(x, 2, -1)
        q = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
        k = jnp.repeat(q[:, :2], 2, axis=1)
        return jnp.einsum("thd,shd->hts", q, k)

    return Setup(run, lambda rng: (draw(rng, 5, 4, 4), np.arange(5) + rng.integers(9)))


@program()
def quantized_matmul() -> Setup:
    def run(x, w):
        scale = jnp.max(jnp.abs(w), axis=0) / 127
        codes = jnp.round(w / scale).astype(jnp.int8)
        row = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127
        inputs = jnp.round(x / row).astype(jnp.int8)
        return lax.dot(inputs, codes, preferred_element_type=jnp.int32) * row * scale

    return Setup(run, lambda rng: (draw(rng, 3, 6), draw(rng, 6, 4)))


@program()
def image_classifier() -> Setup:
    def run(image):
        for size, wide in ((2, 4), (4, 6)):
            image = lax.conv_general_dilated(
                image,
                normal(3, 3, size, wide),
                (2, 2),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            mean, var = image.mean((1, 2), keepdims=True), image.var((1, 2), keepdims=True)
            image = jax.nn.relu((image - mean) * lax.rsqrt(var + 1e-5))
        return jax.nn.softmax(image.mean((1, 2)) @ normal(6, 3))

    return Setup(run, lambda rng: (draw(rng, 2, 8, 8, 2),))
