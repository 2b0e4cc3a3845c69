"""Transformations of JAX and ways to call: what a function may be made of, and called with."""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import tracegraph as tg
from tests.ecosystem.program import BOTH, Setup, draw, normal, program


@program()
def custom_vjp_clip() -> Setup:
    @jax.custom_vjp
    def clip_gradient(x, bound):
        return x

    clip_gradient.defvjp(
        lambda x, bound: (x, bound), lambda bound, g: (jnp.clip(g, -bound, bound), None)
    )

    def run(x):
        return jax.value_and_grad(lambda x: (clip_gradient(x, 0.5) ** 3).sum())(x)

    return Setup(run, lambda rng: (draw(rng, 6),))


@program()
def custom_jvp_softplus() -> Setup:
    @jax.custom_jvp
    def softplus(x):
        return jnp.log1p(jnp.exp(x))

    softplus.defjvps(lambda t, _, x: t * jax.nn.sigmoid(x))

    def run(x, t):
        return jax.jvp(softplus, (x,), (t,)), jax.vmap(jax.grad(softplus))(x)

    return Setup(run, lambda rng: (draw(rng, 6), draw(rng, 6)))


@program()
def rematerialized_layers() -> Setup:
    policy = jax.checkpoint_policies.dots_saveable

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        return jnp.tanh(x @ w)

    def run(weights, x):
        return jax.grad(lambda ws: functools.reduce(layer, ws, x).sum())(weights)

    return Setup(run, lambda rng: ([draw(rng, 4, 4) for _ in range(3)], draw(rng, 2, 4)))


@program()
def vmap_of_everything() -> Setup:
    def loss(w, x):
        _, ys = jax.lax.scan(lambda c, v: (jnp.tanh(c * w + v), c), jnp.zeros(()), x)
        return jnp.sort(ys)[1:].sum()

    def run(w, x):
        gradients = jax.vmap(jax.vmap(jax.grad(loss), (None, 0)), (0, None))(w, x)
        return gradients, jax.vmap(jnp.linalg.norm, in_axes=1, out_axes=0)(x)

    return Setup(run, lambda rng: (draw(rng, 3), draw(rng, 2, 5)))


@program()
def second_derivatives() -> Setup:
    def energy(x):
        return jnp.sum(jnp.sin(x) * x[::-1] ** 2)

    def run(x, v):
        product = jax.jvp(jax.grad(energy), (x,), (v,))[1]
        return jax.hessian(energy)(x), jax.jacrev(jnp.cumsum)(x), product

    return Setup(run, lambda rng: (draw(rng, 3), draw(rng, 3)))


@program()
def linearize_and_transpose() -> Setup:
    def run(x, t):
        y, push = jax.linearize(lambda x: jnp.sin(x) @ normal(4, 3), x)
        _, pull = jax.vjp(lambda x: jnp.exp(x), x)
        return y, push(t), pull(t), jax.linear_transpose(push, x)(y)

    return Setup(run, lambda rng: (draw(rng, 4), draw(rng, 4)))


@program()
def nested_jit() -> Setup:
    @jax.jit
    def inner(x, n):
        return x * n

    @functools.partial(jax.jit, static_argnums=1)
    def power(x, n):
        return inner(x, 2.0) ** n

    return Setup(lambda x: power(x, 3) + jax.jit(jnp.sin)(x), lambda rng: (draw(rng, 4),))


@program()
def static_arguments() -> Setup:
    def run(x, sizes, *, kind):
        y = x.reshape(sizes)
        return jnp.sin(y) if kind == "sin" else y

    function = functools.partial(run, kind="sin")
    return Setup(
        lambda x, sizes: function(x, sizes),
        lambda rng: (draw(rng, 6), (2, 3)),
        options={"static_argnums": 1},
    )


@program()
def alternating_shapes() -> Setup:
    def make_batch(rng):
        return (draw(rng, int(rng.integers(2, 4)), 3),)

    return Setup(lambda x: (x.sum(axis=0), x @ x.T), make_batch)


Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    """A node with data and static metadata."""

    low: Any
    high: Any
    name: str = dataclasses.field(default="box", metadata={"static": True})


@program()
def trees_as_arguments() -> Setup:
    def run(box, point, rest):
        low = jax.tree.map(jnp.minimum, box.low, point)
        return Box(low, box.high, "new"), {"n": None, "sum": rest["a"][0] + rest["b"]}

    def make_batch(rng):
        box = Box(Point(draw(rng, 2), 1.0), Point(draw(rng, 2), 2), "old")
        return box, Point(draw(rng, 2), 0.5), {"a": [draw(rng, 3), None], "b": True}

    return Setup(run, make_batch)


@program()
def python_scalars_and_weak_types() -> Setup:
    def run(x, n, flag):
        return x * n, n / 2, jnp.where(flag, 1, n), x.astype(jnp.bfloat16) * n, flag & True

    def make_batch(rng):
        return draw(rng, 3), int(rng.integers(9)), bool(rng.integers(2))

    return Setup(run, make_batch)


@program()
def closed_over_arrays() -> Setup:
    table, plain = jnp.arange(12.0).reshape(4, 3), np.arange(3)

    def run(index, x):
        return table[index] * x + plain, table.sum()

    return Setup(run, lambda rng: (rng.integers(0, 4, 2), draw(rng, 2, 3)))


@program()
def closed_over_weights() -> Setup:
    w, v = jnp.asarray(normal(8, 16)), jnp.asarray(normal(16))

    def run(x):
        y = jnp.tanh(x @ w) * v
        return (y - y.mean()) / jnp.sqrt(y.var() + 1e-5)

    return Setup(run, lambda rng: (draw(rng, 4, 8),))


@program()
def eval_shape_and_named_scopes() -> Setup:
    def run(x):
        with jax.named_scope("outer"):
            shape = jax.eval_shape(jnp.dot, x, x.T).shape
            return jax.ops.segment_sum(x.ravel(), jnp.arange(x.size) % 3, 3), jnp.zeros(shape) + 1

    return Setup(run, lambda rng: (draw(rng, 2, 3),))


@program()
def shard_map_on_one_device() -> Setup:
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = PartitionSpec("d")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def double(x):
        return x * 2

    return Setup(double, lambda rng: (draw(rng, 4),))


@program()
def captured_function_in_a_function() -> Setup:
    inner = tg.capture(lambda x: jnp.sin(x) * 2)

    def run(x):
        return inner(x) + 1

    def reference(function, **options):
        return jax.jit(lambda x: jnp.sin(x) * 2 + 1, **options)

    return Setup(run, lambda rng: (draw(rng, 4),), reference=reference)


@program()
def gradient_of_a_captured_function() -> Setup:
    inner = tg.capture(lambda x: (jnp.sin(x) * 2).sum())

    def reference(function, **options):
        return jax.jit(jax.grad(lambda x: (jnp.sin(x) * 2).sum()), **options)

    return Setup(jax.grad(inner), lambda rng: (draw(rng, 4),), reference=reference)


@program()
def functions_as_arguments() -> Setup:
    def run(layer, x):
        return layer["activation"](x @ layer["w"])

    def reference(function, **options):
        return jax.jit(lambda layer, x: jnp.tanh(x @ layer["w"]), **options)

    def call(function, **options):
        jitted = reference(function, **options)
        return lambda layer, x: jitted({"w": layer["w"]}, x)

    def make_batch(rng):
        return {"w": draw(rng, 3, 2), "activation": jnp.tanh}, draw(rng, 4, 3)

    return Setup(run, make_batch, reference=call)


@program()
def float64_under_a_setting() -> Setup:
    def run(x):
        return jnp.cumsum(x) / 3, x.astype(jnp.float32)

    def adapt(function):
        def call(x):
            with jax.enable_x64(True):
                return function(x)

        return call

    return Setup(run, lambda rng: (rng.standard_normal(4),), adapt=adapt)


@program(*BOTH)
def array_refs() -> Setup:
    def run(x):
        ref = jax.new_ref(x)
        ref[0] = 7.0
        ref[...] += 1
        return ref[...] * 2

    return Setup(run, lambda rng: (draw(rng, 4),))


@program()
def matmul_precision_setting() -> Setup:
    def run(x):
        with jax.default_matmul_precision("highest"):
            y = x @ x.T
        return y, jnp.dot(x, x.T, precision="default")

    return Setup(run, lambda rng: (draw(rng, 3, 5),))


@program()
def donated_arguments_in_a_dict() -> Setup:
    def run(state, x):
        momentum = 0.9 * state["m"] + x
        return {"p": state["p"] - momentum, "m": momentum, "n": state["n"] + 1}, momentum.sum()

    state = {"p": jnp.ones(5), "m": jnp.zeros(5), "n": jnp.zeros((), jnp.int32)}
    return Setup(run, lambda rng: (draw(rng, 5),), state)


@program()
def warnings_while_tracing() -> Setup:
    def run(x):
        warnings.warn("once", stacklevel=2)
        return x + 1

    return Setup(run, lambda rng: (draw(rng, 2),))
