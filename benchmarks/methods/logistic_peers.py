"""Samplers of ours and of others on the logistic regression: a whole run of each, from nothing to pooled draws."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro.contrib.einstein import RBFKernel, SteinVI
from numpyro.infer import HMCECS, MCMC, NUTS
from numpyro.infer.autoguide import AutoDelta
from numpyro.optim import Adagrad

from benchmarks.harness.runs import vectorized
from benchmarks.methods import logistic_by_hand as by_hand
from benchmarks.methods.logistic_by_hand import INNER, at_zero, control_variates, gradient
from benchmarks.problems.logistic_100k import BATCH, DIMENSION, PARTICLES, newton
from benchmarks.problems.targets import logistic_regression
from numpyro_repulsion import SGHMC, SGLD, SGLDR, ControlVariates

NEWTON_STEPS = 8


class Sampler(NamedTuple):
    """A sampler with its setting; ``make(length)`` is ``(key, X, y) -> draws (n, d)``, ``run`` the length in words."""

    name: str
    setting: str
    make: Callable
    run: str
    length: int
    repeats: int = 3


def ours(kernel, **settings):
    def make(length):
        def go(key, X, y):
            mcmc = vectorized(kernel(logistic_regression, **settings), length, length, PARTICLES)
            mcmc.run(key, X, y, subsample_size=BATCH)
            return mcmc.get_samples()["beta"]

        return go

    return make


def blackjax(kernel, step_size, shared=True, corrected=False):
    """A third of the updates is dropped. With control variates chains start at the mode, else at zero."""
    inner = INNER if kernel is by_hand.sghmc else 1

    def make(length):
        def go(key, X, y):
            start, mode = at_zero(), None
            if corrected:
                mode = jnp.asarray(newton(np.asarray(X, float), np.asarray(y, float), NEWTON_STEPS)[0], X.dtype)
                start = start + mode

            def step(X, y):
                return kernel(control_variates(mode, X, y) if corrected else gradient, step_size)

            program = by_hand.compiled(step, num_draws=length // 10, thinning=10 // inner, shared=shared)
            return program(key, X, y, start)[length // 30 :].reshape(-1, DIMENSION)

        return go

    return make


def nuts(length):
    def go(key, X, y):
        mcmc = vectorized(NUTS(logistic_regression), 2 * length // 3, length, 4)
        mcmc.run(key, X, y)
        return mcmc.get_samples()["beta"]

    return go


def hmcecs(length):
    def go(key, X, y):
        mode = newton(np.asarray(X, float), np.asarray(y, float), NEWTON_STEPS)[0]
        proxy = HMCECS.taylor_proxy({"beta": jnp.asarray(mode, X.dtype)})
        kernel = HMCECS(NUTS(logistic_regression), num_blocks=100, proxy=proxy)
        mcmc = MCMC(kernel, num_warmup=3 * length // 7, num_samples=length, progress_bar=False)
        mcmc.run(key, X, y, subsample_size=BATCH)
        return mcmc.get_samples()["beta"]

    return go


def steinvi(length):
    def go(key, X, y):
        stein = SteinVI(
            logistic_regression,
            AutoDelta(logistic_regression),
            Adagrad(0.1),
            RBFKernel(),
            num_stein_particles=PARTICLES,
        )
        found = stein.run(key, length, X, y, subsample_size=BATCH, progress_bar=False)
        return stein.get_params(found.state)["beta_auto_loc"]

    return go


SETTINGS = {"run": "300 + 300 iterations of 10", "length": 300, "repeats": 6}
SHARED = ours(SGLD, gradient=ControlVariates(shared=True))


def of_blackjax(name, kernel, steps, length=30_000, repeats=3, **settings):
    """One sampler for each step of a grid."""
    run = f"{length:,} updates"
    return [
        Sampler(f"BlackJAX {name}", f"step {step:g}", blackjax(kernel, step, **settings), run, length, repeats)
        for step in steps
    ]


CORRECTED, OWN = ", control variates", ", own minibatches"
SAMPLERS = [
    Sampler("`SGLD`", "", ours(SGLD), **SETTINGS),
    Sampler("`SGLD`", "`ControlVariates(shared=True)`", SHARED, **SETTINGS),
    Sampler("`SGHMC`", "", ours(SGHMC), **SETTINGS),
    Sampler("`SGLDR`", "", ours(SGLDR), **SETTINGS),
    *of_blackjax("SGLD", by_hand.sgld, (1e-7, 1e-6), repeats=6),
    *of_blackjax(f"SGLD{OWN}", by_hand.sgld, (1e-7, 1e-6), 6000, shared=False),
    *of_blackjax(f"SGLD{CORRECTED}", by_hand.sgld, (1e-6, 1e-5), repeats=6, corrected=True),
    *of_blackjax(f"SGLD{CORRECTED}{OWN}", by_hand.sgld, (1e-6, 1e-5), 6000, shared=False, corrected=True),
    *of_blackjax("SGHMC", by_hand.sghmc, (1e-5, 1e-4, 1e-3)),
    *of_blackjax(f"SGHMC{CORRECTED}", by_hand.sghmc, (1e-4, 3e-4, 1e-3), corrected=True),
    *of_blackjax("SGNHT", by_hand.sgnht, (1e-5, 1e-4, 1e-3)),
    *of_blackjax(f"SGNHT{CORRECTED}", by_hand.sgnht, (3e-5, 1e-4, 3e-4), corrected=True),
    Sampler("NumPyro NUTS", "all rows", nuts, "4 chains, 300 kept", 300),
    Sampler("NumPyro HMCECS", "at the mode's proxy", hmcecs, "1 chain, 700 kept", 700),
    Sampler("NumPyro SteinVI", "", steinvi, "200 iterations", 200, 2),
]
