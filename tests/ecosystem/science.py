"""Numerical programs of plain JAX: simulation, statistics, optimisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.optimize
import numpy as np
from jax import lax

from tests.ecosystem.program import Setup, draw, draw_key, normal, program


@program()
def gaussian_process() -> Setup:
    def run(x, y, query):
        def kernel(a, b):
            return jnp.exp(-0.5 * (a[:, None] - b[None]) ** 2)

        factor = jax.scipy.linalg.cho_factor(kernel(x, x) + 0.1 * jnp.eye(5))
        cross = kernel(query, x)
        mean = cross @ jax.scipy.linalg.cho_solve(factor, y)
        return mean, 1 - jnp.sum(cross * jax.scipy.linalg.cho_solve(factor, cross.T).T, axis=1)

    return Setup(run, lambda rng: (draw(rng, 5), draw(rng, 5), draw(rng, 3)))


@program()
def hamiltonian_monte_carlo() -> Setup:
    def energy(q):
        return 0.5 * jnp.sum(q**2) + jnp.sum(jnp.cos(q))

    def step(q, key):
        momentum_key, accept_key = jax.random.split(key)
        p = jax.random.normal(momentum_key, q.shape)

        def leap(_, pair):
            x, v = pair
            v = v - 0.05 * jax.grad(energy)(x)
            x = x + 0.1 * v
            return x, v - 0.05 * jax.grad(energy)(x)

        x, v = lax.fori_loop(0, 5, leap, (q, p))
        change = energy(q) + 0.5 * p @ p - energy(x) - 0.5 * v @ v
        accepted = jnp.log(jax.random.uniform(accept_key)) < change
        return jnp.where(accepted, x, q), accepted

    return Setup(step, lambda rng: (draw_key(rng),), jnp.ones(3))


@program()
def clusters() -> Setup:
    def step(centres, points):
        nearest = jnp.argmin(jnp.sum((points[:, None] - centres[None]) ** 2, -1), axis=1)
        sums = jax.ops.segment_sum(points, nearest, 3)
        counts = jnp.bincount(nearest, length=3)
        return jnp.where(
            counts[:, None] > 0, sums / jnp.maximum(counts, 1)[:, None], centres
        ), counts

    return Setup(step, lambda rng: (draw(rng, 9, 2),), jnp.asarray(normal(3, 2)))


@program()
def bodies_under_gravity() -> Setup:
    def accelerate(x):
        gap = x[:, None] - x[None]
        cubed = (jnp.sum(gap**2, -1) + 0.1) ** 1.5
        return -jnp.sum(gap / cubed[..., None], axis=1)

    def step(state, dt):
        x, v = state
        v = v + 0.5 * dt * accelerate(x)
        x = x + dt * v
        v = v + 0.5 * dt * accelerate(x)
        return (x, v), 0.5 * jnp.sum(v**2)

    state = (jnp.asarray(normal(4, 3)), jnp.zeros((4, 3)))
    return Setup(step, lambda rng: (np.float32(0.01 * rng.uniform()),), state)


@program()
def game_of_life() -> Setup:
    def step(cells, flips):
        shifts = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
        near = jnp.stack([jnp.roll(cells, shift, (0, 1)) for shift in shifts]).sum(0)
        alive = (near == 3) | ((near == 2) & (cells == 1))
        return jnp.where(flips, 1 - alive.astype(jnp.int32), alive.astype(jnp.int32)), near.max()

    state = jnp.asarray(normal(6, 6) > 0, jnp.int32)
    return Setup(step, lambda rng: (rng.uniform(size=(6, 6)) < 0.1,), state)


@program()
def heat_equation() -> Setup:
    def step(u, source):
        def advance(u, _):
            padded = jnp.pad(u, 1, mode="edge")
            flux = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
            return u + 0.1 * (flux - 4 * u) + 0.01 * source, u.max()

        return lax.scan(advance, u, None, length=4)

    return Setup(step, lambda rng: (draw(rng, 5, 5),), jnp.zeros((5, 5)))


@program()
def runge_kutta_integration() -> Setup:
    def slope(y):
        return jnp.array([y[1], -jnp.sin(y[0]) - 0.1 * y[1]])

    def run(y, dt):
        def advance(y, _):
            a = slope(y)
            b = slope(y + dt / 2 * a)
            c = slope(y + dt / 2 * b)
            d = slope(y + dt * c)
            return y + dt / 6 * (a + 2 * b + 2 * c + d), y

        return lax.scan(advance, y, None, length=6)

    return Setup(run, lambda rng: (draw(rng, 2), 0.1))


@program("whole", "partial")
def adaptive_integration() -> Setup:
    def run(y):
        def go(state):
            t, y, h = state
            coarse = y + h * jnp.sin(y)
            middle = y + h / 2 * jnp.sin(y)
            fine = middle + h / 2 * jnp.sin(middle)
            good = jnp.abs(fine - coarse).max() < 1e-2
            return (
                jnp.where(good, t + h, t),
                jnp.where(good, fine, y),
                jnp.where(good, 1.2, 0.5) * h,
            )

        return lax.while_loop(lambda s: s[0] < 1, go, (0.0, y, 0.3))[1]

    return Setup(run, lambda rng: (draw(rng, 3),))


@program("whole", "partial")
def conjugate_gradients() -> Setup:
    def run(a, b):
        matrix = a @ a.T + 4 * jnp.eye(4)
        return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, b, maxiter=6)[0]

    return Setup(run, lambda rng: (draw(rng, 4, 4), draw(rng, 4)))


@program("whole", "partial")
def minimise_by_bfgs() -> Setup:
    def run(x):
        from_scipy = jax.scipy.optimize.minimize(
            lambda v: jnp.sum((v - 1) ** 4), x, method="BFGS", options={"maxiter": 3}
        )
        return from_scipy.x

    return Setup(run, lambda rng: (draw(rng, 2),))


@program()
def particle_filter() -> Setup:
    def step(particles, z, key):
        move, choose = jax.random.split(key)
        moved = particles + 0.1 * jax.random.normal(move, particles.shape)
        weights = jax.nn.softmax(-0.5 * (moved - z) ** 2)
        points = (jnp.arange(8) + jax.random.uniform(choose)) / 8
        chosen = jnp.clip(jnp.searchsorted(jnp.cumsum(weights), points), 0, 7)
        return moved[chosen], weights @ moved

    return Setup(step, lambda rng: (float(rng.normal()), draw_key(rng)), jnp.zeros(8))


@program()
def power_spectrum_of_a_window() -> Setup:
    def run(x):
        frames = x[np.arange(4)[:, None] * 4 + np.arange(8)[None]] * jnp.hanning(8)
        basis = np.exp(-2j * np.pi * np.outer(np.arange(8), np.arange(5)) / 8).astype(np.complex64)
        return jnp.log1p(jnp.abs(frames @ basis) ** 2)

    return Setup(run, lambda rng: (draw(rng, 20),))


@program()
def matrix_exponential() -> Setup:
    def run(a):
        return jax.scipy.linalg.expm(a), jnp.linalg.matrix_power(a, 3), jnp.kron(a, a)

    return Setup(run, lambda rng: (0.3 * draw(rng, 3, 3),))
