"""Sampling and variational inference with numpyro and blackjax."""

from __future__ import annotations

import blackjax
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO, util
from numpyro.infer.autoguide import AutoNormal

from tests.ecosystem.program import Setup, draw, draw_key, fill, program


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


def log_density(q):
    return -0.5 * jnp.sum(q**2) - jnp.sum(jnp.cos(q))


def make_kernel_step(algorithm):
    """Returns one step of a sampling algorithm of blackjax, with its state."""

    def step(state, key):
        return algorithm.step(key, state)

    return Setup(step, lambda rng: (draw_key(rng),), algorithm.init(jnp.ones(2)))


@program()
def numpyro_log_density() -> Setup:
    def run(w, scale, x, y):
        params = {"w": w, "scale": jnp.exp(scale)}
        return util.log_density(regression, (x, y), {}, params)[0]

    return Setup(run, lambda rng: (draw(rng, 2), draw(rng), draw(rng, 5, 2), draw(rng, 5)))


@program()
def numpyro_variational_step() -> Setup:
    svi = SVI(regression, AutoNormal(regression), numpyro.optim.Adam(0.01), Trace_ELBO())
    inputs = jnp.ones((5, 2)), jnp.ones(5)
    state = fill(jax.eval_shape(svi.init, jax.random.PRNGKey(0), *inputs))
    return Setup(svi.update, lambda rng: (draw(rng, 5, 2), draw(rng, 5)), state)


@program()
def blackjax_hamiltonian_step() -> Setup:
    return make_kernel_step(blackjax.hmc(log_density, 0.1, jnp.ones(2), 3))


@program("whole")
def blackjax_nuts_step() -> Setup:
    return make_kernel_step(blackjax.nuts(log_density, 0.1, jnp.ones(2)))


@program()
def blackjax_langevin_step() -> Setup:
    return make_kernel_step(blackjax.mala(log_density, 0.1))
