"""Differential equations with diffrax: its loops end when the solution does."""

from __future__ import annotations

from typing import Any

import diffrax
import jax.numpy as jnp
import numpy as np

from tests.ecosystem.program import BOTH, Setup, draw, program

TERM = diffrax.ODETerm(lambda t, y, args: -args * y)


@program(*BOTH)
def diffrax_fixed_steps() -> Setup:
    def run(y, rate):
        solution = diffrax.diffeqsolve(TERM, diffrax.Euler(), 0, 1, 0.25, y, args=rate)
        return solution.ys

    return Setup(run, lambda rng: (draw(rng, 2), 0.5))


@program("whole")
def diffrax_adaptive_steps() -> Setup:
    def run(y):
        controller = diffrax.PIDController(rtol=1e-2, atol=1e-3)
        solution = diffrax.diffeqsolve(
            TERM, diffrax.Heun(), 0, 1, 0.3, y, args=0.7, stepsize_controller=controller
        )
        return solution.ys

    return Setup(run, lambda rng: (draw(rng, 2),))


@program()
def diffrax_adaptive_steps_without_errors() -> Setup:
    """With errors as values: what raises them calls back into Python."""

    def run(y):
        controller = diffrax.PIDController(rtol=1e-2, atol=1e-3)
        solution = diffrax.diffeqsolve(
            TERM,
            diffrax.Heun(),
            0,
            1,
            0.3,
            y,
            args=0.7,
            stepsize_controller=controller,
            throw=False,
        )
        return solution.ys, solution.stats["num_steps"]

    return Setup(run, lambda rng: (draw(rng, 2),))


@program()
def diffrax_one_step() -> Setup:
    solver: Any = diffrax.Heun()

    def run(y):
        after, error, *_ = solver.step(TERM, 0.0, 0.1, y, 0.7, (), made_jump=False)
        return after, error

    return Setup(run, lambda rng: (draw(rng, 3),))


@program()
def diffrax_brownian_path() -> Setup:
    def run(key):
        path = diffrax.UnsafeBrownianPath((2,), key)
        return path.evaluate(0.1, 0.4), jnp.zeros(2)

    return Setup(run, lambda rng: (rng.integers(0, 1 << 32, 2, np.uint32),))
