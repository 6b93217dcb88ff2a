"""Samplers of ours and of others on the logistic regression: a whole run of each, from nothing to pooled draws.

BlackJAX has kernels and gradient estimators; the scan, the chains, the minibatches and the thinning are its user's, as
here. A step is ``(key, state, minibatch) -> state`` of one chain, and a state is a position or leads with one.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import blackjax
import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.contrib.einstein import RBFKernel, SteinVI
from numpyro.infer import HMCECS, MCMC, NUTS
from numpyro.infer.autoguide import AutoDelta
from numpyro.optim import Adagrad

from benchmarks.harness.runs import vectorized
from benchmarks.problems.logistic_100k import BATCH, DIMENSION, PARTICLES, ROWS, newton
from benchmarks.problems.targets import logistic_regression
from numpyro_repulsion import SGHMC, SGLD, SGLDR, ControlVariates

NEWTON_STEPS = 8
#: How many gradients a step of SGHMC takes, all of them on one minibatch and with momenta drawn anew before.
INNER = 10
AT_ZERO = jnp.zeros((PARTICLES, DIMENSION))


def log_prior(beta):
    return -0.5 * jnp.sum(beta**2)


def log_likelihood(beta, row):
    x, y = row
    logit = x @ beta
    return y * logit - jax.nn.softplus(logit)


gradient = blackjax.sgmcmc.gradients.grad_estimator(log_prior, log_likelihood, ROWS)


def no_library(estimate, step_size):
    """SGLD in a line."""

    def step(key, beta, batch):
        noise = random.normal(key, beta.shape)
        return beta + step_size * estimate(beta, batch) + (2 * step_size) ** 0.5 * noise

    return step


def of_kernel(kernel):
    return lambda estimate, step_size: lambda key, beta, batch: kernel(estimate).step(key, beta, batch, step_size)


sgld, sghmc = of_kernel(blackjax.sgld), of_kernel(partial(blackjax.sghmc, num_integration_steps=INNER))


def sgnht(estimate, step_size):
    step = of_kernel(blackjax.sgnht)(estimate, step_size)
    # The thermostat starts at the friction.
    step.init = lambda key, beta: blackjax.sgmcmc.sgnht.init(beta, key, jnp.float32(0.01))
    return step


def sample(make_step, key, X, y, beta, *, num_draws, thinning, shared):
    """Positions of all chains after every ``thinning`` steps from ``beta``, ``(num_draws, chains, d)``.

    ``make_step`` makes a step of ``(X, y)``; chains may have ``shared`` minibatches.
    """
    step = make_step(X, y)

    def update(states, key):
        rows_key, step_key = random.split(key)
        rows = random.randint(rows_key, (BATCH,) if shared else (PARTICLES, BATCH), 0, ROWS)
        axes = (0, 0, None if shared else 0)
        return jax.vmap(step, axes)(random.split(step_key, PARTICLES), states, (X[rows], y[rows])), None

    def draw(states, keys):
        states, _ = lax.scan(update, states, keys)
        return states, jax.tree.leaves(states)[0]

    start_key, key = random.split(key)
    keys = random.split(key, num_draws * thinning).reshape(num_draws, thinning)
    states = jax.vmap(getattr(step, "init", lambda key, beta: beta))(random.split(start_key, PARTICLES), beta)
    return lax.scan(draw, states, keys)[1]


class Sampler(NamedTuple):
    """A sampler with its setting; ``sampled`` is ``(length, key, X, y) -> draws (n, d)``, ``run`` what it makes."""

    name: str
    setting: str
    sampled: Callable
    run: str
    length: int
    repeats: int = 3


def ours(kernel, **settings):
    def sampled(length, key, X, y):
        mcmc = vectorized(kernel(logistic_regression, **settings), length, length, PARTICLES)
        mcmc.run(key, X, y, subsample_size=BATCH)
        return mcmc.get_samples()["beta"]

    return sampled


def chains(kernel, step_size, shared=True, corrected=False):
    """A third of the updates is dropped. With control variates chains start at the mode, else at zero."""
    inner = INNER if kernel is sghmc else 1

    def sampled(length, key, X, y):
        start, mode = AT_ZERO, None
        if corrected:
            mode = mode_of(X, y)
            start = start + mode

        def step(X, y):
            about = blackjax.sgmcmc.gradients.control_variates
            return kernel(about(gradient, mode, (X, y)) if corrected else gradient, step_size)

        program = jax.jit(partial(sample, step, num_draws=length // 10, thinning=10 // inner, shared=shared))
        return program(key, X, y, start)[length // 30 :].reshape(-1, DIMENSION)

    return sampled


def mode_of(X, y):
    return jnp.asarray(newton(np.asarray(X, float), np.asarray(y, float), NEWTON_STEPS)[0], X.dtype)


def nuts(length, key, X, y):
    mcmc = vectorized(NUTS(logistic_regression), 2 * length // 3, length, 4)
    mcmc.run(key, X, y)
    return mcmc.get_samples()["beta"]


def hmcecs(length, key, X, y):
    kernel = HMCECS(NUTS(logistic_regression), num_blocks=100, proxy=HMCECS.taylor_proxy({"beta": mode_of(X, y)}))
    mcmc = MCMC(kernel, num_warmup=3 * length // 7, num_samples=length, progress_bar=False)
    mcmc.run(key, X, y, subsample_size=BATCH)
    return mcmc.get_samples()["beta"]


def steinvi(length, key, X, y):
    parts = AutoDelta(logistic_regression), Adagrad(0.1), RBFKernel()
    stein = SteinVI(logistic_regression, *parts, num_stein_particles=PARTICLES)
    found = stein.run(key, length, X, y, subsample_size=BATCH, progress_bar=False)
    return stein.get_params(found.state)["beta_auto_loc"]


SETTINGS = {"run": "300 + 300 iterations of 10", "length": 300, "repeats": 6}
SHARED = ours(SGLD, gradient=ControlVariates(shared=True))


def of_blackjax(name, kernel, steps, length=30_000, repeats=3, **settings):
    run = f"{length:,} updates"
    name = f"BlackJAX {name}"
    return [Sampler(name, f"step {s:g}", chains(kernel, s, **settings), run, length, repeats) for s in steps]


CORRECTED, OWN = ", control variates", ", own minibatches"
SAMPLERS = [
    Sampler("`SGLD`", "", ours(SGLD), **SETTINGS),
    Sampler("`SGLD`", "`ControlVariates(shared=True)`", SHARED, **SETTINGS),
    Sampler("`SGHMC`", "", ours(SGHMC), **SETTINGS),
    Sampler("`SGLDR`", "", ours(SGLDR), **SETTINGS),
    *of_blackjax("SGLD", sgld, (1e-7, 1e-6), repeats=6),
    *of_blackjax(f"SGLD{OWN}", sgld, (1e-7, 1e-6), 6000, shared=False),
    *of_blackjax(f"SGLD{CORRECTED}", sgld, (1e-6, 1e-5), repeats=6, corrected=True),
    *of_blackjax(f"SGLD{CORRECTED}{OWN}", sgld, (1e-6, 1e-5), 6000, shared=False, corrected=True),
    *of_blackjax("SGHMC", sghmc, (1e-5, 1e-4, 1e-3)),
    *of_blackjax(f"SGHMC{CORRECTED}", sghmc, (1e-4, 3e-4, 1e-3), corrected=True),
    *of_blackjax("SGNHT", sgnht, (1e-5, 1e-4, 1e-3)),
    *of_blackjax(f"SGNHT{CORRECTED}", sgnht, (3e-5, 1e-4, 3e-4), corrected=True),
    Sampler("NumPyro NUTS", "all rows", nuts, "4 chains, 300 kept", 300),
    Sampler("NumPyro HMCECS", "at the mode's proxy", hmcecs, "1 chain, 700 kept", 700),
    Sampler("NumPyro SteinVI", "", steinvi, "200 iterations", 200, 2),
]
