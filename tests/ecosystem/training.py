"""Train steps of plain JAX, with their state donated."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.ecosystem.program import Setup, draw, draw_key, normal, program


def descend(params, gradients, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients)


def make_layers(*sizes):
    pairs = itertools.pairwise(sizes)
    return [{"w": jnp.asarray(normal(a, b)), "b": np.zeros(b, np.float32)} for a, b in pairs]


def apply_layers(layers, x):
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def squared_error(layers, x, y):
    return jnp.mean((apply_layers(layers, x) - y) ** 2)


def draw_pairs(rng):
    return draw(rng, 6, 3), draw(rng, 6, 2)


@program("whole", "partial")
def sgd_on_an_mlp() -> Setup:
    def step(layers, x, y):
        loss, gradients = jax.value_and_grad(squared_error)(layers, x, y)
        return descend(layers, gradients), loss

    return Setup(step, draw_pairs, make_layers(3, 8, 2))


@program()
def adam_on_a_transformer() -> Setup:
    def block(p, x):
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        x = x + jax.nn.softmax(jnp.where(mask, q @ k.T, -1e9)) @ v
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss(params, tokens):
        x = params["embed"][tokens[:-1]]
        for p in params["blocks"]:
            x = block(p, x)
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.take_along_axis(logits, tokens[1:, None], 1).mean()

    def step(state, tokens):
        value, gradients = jax.value_and_grad(loss)(state["params"], tokens)
        count = state["count"] + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], gradients)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], gradients)
        params = jax.tree.map(
            lambda p, m, v: p - 0.01 * m / (1 - 0.9**count) / (jnp.sqrt(v) + 1e-8),
            state["params"],
            m,
            v,
        )
        return {"params": params, "m": m, "v": v, "count": count}, value

    block_params = {"qkv": normal(8, 24), "up": normal(8, 16), "down": normal(16, 8)}
    params = {"embed": normal(11, 8), "blocks": [block_params]}
    zeros = jax.tree.map(np.zeros_like, params)
    state = {"params": params, "m": zeros, "v": zeros, "count": np.float32(0)}
    return Setup(step, lambda rng: (rng.integers(0, 11, 7),), state)


@program()
def low_rank_adapters() -> Setup:
    base = normal(6, 5)

    def loss(adapter, x, y):
        return jnp.mean((x @ (base + adapter["a"] @ adapter["b"] * 0.5) - y) ** 2)

    def step(adapter, x, y):
        value, gradients = jax.value_and_grad(loss)(adapter, x, y)
        return descend(adapter, gradients), value

    state = {"a": normal(6, 2), "b": np.zeros((2, 5), np.float32)}
    return Setup(step, lambda rng: (draw(rng, 4, 6), draw(rng, 4, 5)), state)


@program()
def accumulated_gradients() -> Setup:
    def step(layers, x, y):
        def add(total, pair):
            value, gradients = jax.value_and_grad(squared_error)(layers, *pair)
            return jax.tree.map(jnp.add, total, gradients), value

        total, losses = lax.scan(add, jax.tree.map(jnp.zeros_like, layers), (x, y))
        return descend(layers, total), losses

    return Setup(step, lambda rng: (draw(rng, 3, 4, 3), draw(rng, 3, 4, 2)), make_layers(3, 4, 2))


@program()
def mixed_precision_with_loss_scale() -> Setup:
    def step(state, x, y):
        params, scale, good = state
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        gradients = jax.grad(lambda p: squared_error(p, x.astype(jnp.bfloat16), y) * scale)(half)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, gradients)
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]))
        moved = descend(params, gradients)
        params = jax.tree.map(lambda n, o: jnp.where(finite, n, o), moved, params)
        good = jnp.where(finite, good + 1, 0)
        scale = jnp.where(finite, jnp.where(good % 2 == 0, scale * 2, scale), scale / 2)
        return (params, scale, good), finite

    state = (make_layers(3, 4, 2), jnp.float32(1024), jnp.int32(0))
    return Setup(step, draw_pairs, state)


@program()
def deep_q_update() -> Setup:
    def loss(online, target, batch):
        q = apply_layers(online, batch["s"])[jnp.arange(6), batch["a"]]
        best = apply_layers(target, batch["t"]).max(axis=1)
        goal = batch["r"] + 0.9 * (1 - batch["done"]) * lax.stop_gradient(best)
        return jnp.mean(jnp.where(jnp.abs(q - goal) < 1, 0.5 * (q - goal) ** 2, jnp.abs(q - goal)))

    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["online"], state["target"], batch)
        online = descend(state["online"], gradients)
        copied = (state["n"] + 1) % 3 == 0
        target = jax.tree.map(lambda o, t: jnp.where(copied, o, t), online, state["target"])
        return {"online": online, "target": target, "n": state["n"] + 1}, value

    def make_batch(rng):
        batch = {"s": draw(rng, 6, 3), "t": draw(rng, 6, 3), "r": draw(rng, 6)}
        return ({**batch, "a": rng.integers(0, 2, 6), "done": rng.integers(0, 2, 6)},)

    layers = make_layers(3, 4, 2)
    state = {"online": layers, "target": jax.tree.map(jnp.copy, layers), "n": jnp.int32(0)}
    return Setup(step, make_batch, state)


@program()
def physics_informed_network() -> Setup:
    def residual(layers, t):
        def u(t):
            return apply_layers(layers, t[None])[0]

        return jax.grad(jax.grad(u))(t) + u(t)

    def loss(layers, ts):
        return jnp.mean(jax.vmap(residual, (None, 0))(layers, ts) ** 2)

    def step(layers, ts):
        value, gradients = jax.value_and_grad(loss)(layers, ts)
        return descend(layers, gradients, 0.01), value

    return Setup(step, lambda rng: (draw(rng, 4),), make_layers(1, 5, 1))


@program()
def variational_autoencoder() -> Setup:
    def loss(params, x, key):
        mean, log_variance = jnp.split(apply_layers(params["encoder"], x), 2, -1)
        z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
        kl = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance))
        return jnp.sum((apply_layers(params["decoder"], z) - x) ** 2) + kl

    def step(params, x, key):
        value, gradients = jax.value_and_grad(loss)(params, x, key)
        return descend(params, gradients, 0.001), value

    state = {"encoder": make_layers(4, 5, 4), "decoder": make_layers(2, 5, 4)}
    return Setup(step, lambda rng: (draw(rng, 3, 4), draw_key(rng)), state)


@program()
def normalizing_flow() -> Setup:
    def transform(layers, x):
        total = jnp.zeros(x.shape[0])
        for index, layer in enumerate(layers):
            x = x[:, ::-1] if index else x
            kept, moved = jnp.split(x, 2, -1)
            shift, log_scale = jnp.split(apply_layers(layer, kept), 2, -1)
            log_scale = jnp.tanh(log_scale)
            x = jnp.concatenate([kept, moved * jnp.exp(log_scale) + shift], -1)
            total += log_scale.sum(-1)
        return x, total

    def loss(layers, x):
        z, log_det = transform(layers, x)
        return jnp.mean(0.5 * jnp.sum(z**2, -1) - log_det)

    def step(layers, x):
        value, gradients = jax.value_and_grad(loss)(layers, x)
        return descend(layers, gradients), value

    return Setup(step, lambda rng: (draw(rng, 5, 4),), [make_layers(2, 4, 4) for _ in range(2)])


@program()
def diffusion_step() -> Setup:
    alphas = np.cumprod(1 - np.linspace(0.01, 0.2, 8)).astype(np.float32)

    def loss(layers, x, key):
        time_key, noise_key = jax.random.split(key)
        t = jax.random.randint(time_key, (x.shape[0],), 0, 8)
        noise = jax.random.normal(noise_key, x.shape)
        alpha = jnp.asarray(alphas)[t][:, None]
        noisy = jnp.sqrt(alpha) * x + jnp.sqrt(1 - alpha) * noise
        angles = t[:, None] * jnp.array([1.0, 0.1])
        inputs = jnp.concatenate([noisy, jnp.sin(angles), jnp.cos(angles)], -1)
        return jnp.mean((apply_layers(layers, inputs) - noise) ** 2)

    def step(layers, x, key):
        value, gradients = jax.value_and_grad(loss)(layers, x, key)
        return descend(layers, gradients), value

    return Setup(step, lambda rng: (draw(rng, 5, 3), draw_key(rng)), make_layers(7, 6, 3))


@program()
def graph_network() -> Setup:
    def apply(params, nodes, senders, receivers):
        for p in params:
            messages = jax.nn.relu(nodes[senders] @ p["message"])
            pooled = jax.ops.segment_sum(messages, receivers, nodes.shape[0])
            degree = jax.ops.segment_sum(jnp.ones(len(senders)), receivers, nodes.shape[0])
            nodes = jnp.tanh(nodes @ p["self"] + pooled / jnp.maximum(degree, 1)[:, None])
        return nodes

    def step(params, nodes, senders, receivers, goal):
        def loss(params):
            return jnp.mean((apply(params, nodes, senders, receivers) - goal) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), value

    def make_batch(rng):
        edges = rng.integers(0, 5, (2, 9))
        return draw(rng, 5, 3), edges[0], edges[1], draw(rng, 5, 3)

    return Setup(step, make_batch, [{"message": normal(3, 3), "self": normal(3, 3)}] * 2)


@program()
def mixture_of_experts() -> Setup:
    def apply(params, x):
        gates = jax.nn.softmax(x @ params["router"])
        weights, chosen = lax.top_k(gates, 2)
        mask = jax.nn.one_hot(chosen, 4) * weights[..., None]
        dispatch = mask.sum(1) / weights.sum(1, keepdims=True)
        outputs = jnp.einsum("td,edf->etf", x, params["experts"])
        balance = jnp.mean(gates, 0) @ jnp.mean(dispatch > 0, 0)
        return jnp.einsum("te,etf->tf", dispatch, outputs), balance

    def step(params, x, y):
        def loss(params):
            out, balance = apply(params, x)
            return jnp.mean((out - y) ** 2) + 0.01 * balance

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), value

    state = {"router": normal(3, 4), "experts": normal(4, 3, 2)}
    return Setup(step, draw_pairs, state)


@program()
def policy_gradient_with_clipping() -> Setup:
    def loss(layers, batch):
        logp = jax.nn.log_softmax(apply_layers(layers, batch["s"]))
        chosen = jnp.take_along_axis(logp, batch["a"][:, None], 1)[:, 0]
        ratio = jnp.exp(chosen - batch["old"])
        clipped = jnp.clip(ratio, 0.8, 1.2)
        entropy = -jnp.sum(jnp.exp(logp) * logp, -1).mean()
        gain = jnp.minimum(ratio * batch["adv"], clipped * batch["adv"])
        return -gain.mean() - 0.01 * entropy

    def step(layers, batch):
        value, gradients = jax.value_and_grad(loss)(layers, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / (norm + 1e-6)), gradients)
        return descend(layers, gradients), (value, norm)

    def make_batch(rng):
        batch = {"s": draw(rng, 6, 3), "old": -np.abs(draw(rng, 6)), "adv": draw(rng, 6)}
        return ({**batch, "a": rng.integers(0, 2, 6)},)

    return Setup(step, make_batch, make_layers(3, 4, 2))


@program()
def recurrent_language_model() -> Setup:
    def loss(params, tokens):
        def cell(h, token):
            h = jnp.tanh(params["embed"][token] + h @ params["w"])
            return h, h @ params["out"]

        _, logits = lax.scan(cell, jnp.zeros(5), tokens[:-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], 1)
        return -picked.mean()

    def step(params, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        return descend(params, gradients), value

    state = {"embed": normal(7, 5), "w": normal(5, 5), "out": normal(5, 7)}
    return Setup(step, lambda rng: (rng.integers(0, 7, 6),), state)
