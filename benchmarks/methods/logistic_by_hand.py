"""SG-MCMC of many chains on the logistic regression, as one writes it by hand: with BlackJAX's kernels, and without.

BlackJAX has kernels and gradient estimators; the scan, the chains, the minibatches and the thinning are its user's. A
``Step`` here is ``(key, state, minibatch) -> state`` of one chain, and a state is a position or leads with one.
"""

from functools import partial

import blackjax
import jax
from jax import lax, random
import jax.numpy as jnp

from benchmarks.problems.logistic_100k import BATCH, DIMENSION, PARTICLES, ROWS

#: How many gradients a step of SGHMC takes, all of them on one minibatch and with momenta drawn anew before.
INNER = 10


def log_prior(beta):
    return -0.5 * jnp.sum(beta**2)


def log_likelihood(beta, row):
    x, y = row
    logit = x @ beta
    return y * logit - jax.nn.softplus(logit)


gradient = blackjax.sgmcmc.gradients.grad_estimator(log_prior, log_likelihood, ROWS)


def control_variates(center, X, y):
    """The gradient estimator about a point, with its gradient over all rows."""
    return blackjax.sgmcmc.gradients.control_variates(gradient, center, (X, y))


def no_library(estimate, step_size):
    """SGLD in a line."""

    def step(key, beta, batch):
        noise = random.normal(key, beta.shape)
        return beta + step_size * estimate(beta, batch) + (2 * step_size) ** 0.5 * noise

    return step


def sgld(estimate, step_size):
    kernel = blackjax.sgld(estimate)
    return lambda key, beta, batch: kernel.step(key, beta, batch, step_size)


def sghmc(estimate, step_size):
    kernel = blackjax.sghmc(estimate, num_integration_steps=INNER)
    return lambda key, beta, batch: kernel.step(key, beta, batch, step_size)


def sgnht(estimate, step_size):
    kernel = blackjax.sgnht(estimate)

    def step(key, state, batch):
        return kernel.step(key, state, batch, step_size)

    # The thermostat starts at the friction.
    step.init = lambda key, beta: blackjax.sgmcmc.sgnht.init(beta, key, jnp.float32(0.01))
    return step


def starts(step, key, beta):
    """The chains' states at positions ``(chains, d)``."""
    init = getattr(step, "init", lambda key, beta: beta)
    return jax.vmap(init)(random.split(key, len(beta)), beta)


def sample(make_step, key, X, y, beta, *, num_draws, thinning, shared):
    """Positions of all chains after every ``thinning`` steps, ``(num_draws, chains, d)``.

    :param make_step: ``(X, y)`` to a step.
    :param beta: where chains start.
    :param shared: whether all chains look at one minibatch.
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
    return lax.scan(draw, starts(step, start_key, beta), keys)[1]


def compiled(make_step, **settings):
    """:func:`sample` as a program ``(key, X, y, beta) -> draws``."""
    return jax.jit(partial(sample, make_step, **settings))


def at_zero():
    return jnp.zeros((PARTICLES, DIMENSION))
