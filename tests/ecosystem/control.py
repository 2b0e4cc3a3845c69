"""Loops and branches, which are captured, and what talks to the host, which is refused."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.ecosystem.program import BOTH, PARTIAL, Setup, draw, program


@program(*BOTH)
def scan_over_time() -> Setup:
    def run(carry, xs):
        return lax.scan(lambda c, x: (jnp.tanh(c + x), c * x), carry, xs)

    return Setup(run, lambda rng: (draw(rng, 3), draw(rng, 5, 3)))


@program()
def unrolled_scan() -> Setup:
    def run(xs):
        return lax.scan(lambda c, x: (c * 0.9 + x, c), jnp.zeros(3), xs, unroll=2, reverse=True)

    return Setup(run, lambda rng: (draw(rng, 5, 3),))


@program()
def loop_of_fixed_length() -> Setup:
    def run(x):
        return lax.fori_loop(0, 6, lambda i, a: a * 0.5 + jnp.sin(a) * i, x)

    return Setup(run, lambda rng: (draw(rng, 4),))


@program(*BOTH)
def loop_of_traced_length() -> Setup:
    def run(n, x):
        return lax.fori_loop(0, n, lambda i, a: a * 1.5, x) + 1

    return Setup(run, lambda rng: (int(rng.integers(1, 5)), draw(rng, 4)))


@program(*BOTH)
def newton_until_converged() -> Setup:
    def run(x):
        y = jnp.abs(x) + 1

        def is_far(r):
            return jnp.max(jnp.abs(r * r - y)) > 1e-3

        return lax.while_loop(is_far, lambda r: 0.5 * (r + y / r), y) * 2

    return Setup(run, lambda rng: (draw(rng, 3),))


@program(*BOTH)
def branch_on_data() -> Setup:
    def run(x):
        y = jnp.sin(x)
        return lax.cond(x.sum() > 0, lambda v: v * 2, lambda v: v - 1, y) + 1

    return Setup(run, lambda rng: (draw(rng, 4),))


@program(*BOTH)
def switch_on_data() -> Setup:
    def run(index, x):
        return lax.switch(index, [jnp.sin, jnp.cos, lambda v: v * 3], x)

    return Setup(run, lambda rng: (int(rng.integers(3)), draw(rng, 4)))


@program()
def branches_of_a_batch() -> Setup:
    def run(x):
        return jax.vmap(lambda v: lax.cond(v > 0, jnp.sin, jnp.cos, v))(x)

    return Setup(run, lambda rng: (draw(rng, 5),))


@program(*BOTH)
def branch_in_a_scan() -> Setup:
    def step(c, x):
        return lax.cond(x > 0, lambda c: c + x, lambda c: c * 0.5, c), c

    return Setup(lambda xs: lax.scan(step, 0.0, xs), lambda rng: (draw(rng, 6),))


@program(*BOTH)
def pure_callback() -> Setup:
    def run(x):
        y = jax.pure_callback(np.sinh, jax.ShapeDtypeStruct((3,), jnp.float32), x * 2)
        return y + 1

    return Setup(run, lambda rng: (draw(rng, 3),))


@program("whole")
def debug_print() -> Setup:
    def run(x):
        jax.debug.print("{}", x.sum())
        return x * 2

    def reference(function, **options):
        return jax.jit(lambda x: x * 2)

    return Setup(run, lambda rng: (draw(rng, 3),), reference=reference)


@program(*BOTH)
def debug_callback() -> Setup:
    def run(x):
        jax.debug.callback(lambda _: None, x.sum())
        return x * 2

    return Setup(run, lambda rng: (draw(rng, 3),))


@program(*BOTH)
def boolean_mask() -> Setup:
    def run(x):
        return x[x > 0].sum()

    def reference(function, **options):
        return jax.jit(lambda x: jnp.where(x > 0, x, 0).sum(), **options)

    return Setup(run, lambda rng: (draw(rng, 4),), reference=reference)


@program()
def value_read_on_the_host() -> Setup:
    def run(x):
        return x * float(x.sum())

    return Setup(run, lambda rng: (draw(rng, 4),), reference=_run_eagerly)


@program()
def python_branch() -> Setup:
    def run(x):
        return x * 2 if x.sum() > 0 else x

    return Setup(run, lambda rng: (draw(rng, 4),), reference=_run_eagerly)


@program()
def clock_while_tracing() -> Setup:
    def run(x):
        return x + time.perf_counter_ns() % 1000003

    return Setup(run, lambda rng: (draw(rng, 4),), reference=_run_eagerly)


@program()
def random_numbers_of_numpy() -> Setup:
    def run(x):
        return x + np.random.default_rng().standard_normal(4)

    return Setup(run, lambda rng: (draw(rng, 4),), reference=_run_eagerly)


def _run_eagerly(function, **options):
    return function


@program(*PARTIAL)
def two_branches_between_graphs() -> Setup:
    def run(x):
        y = lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
        z = jnp.tanh(y) @ jnp.ones((4, 4))
        w = lax.while_loop(lambda v: v.sum() < 50, lambda v: v * 2 + 1, jnp.abs(z))
        return w - z

    return Setup(run, lambda rng: (draw(rng, 4),))
