"""Warmup where rows are many and minibatches small, against posteriors known exactly."""

from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGHMC, SGLD, SGNHT, Subsampled, diagnose
from numpyro_repulsion.dynamics import Thermostat

ROWS, DIMENSION, SIGMA = 50_000, 40, 0.5


def regression(X, y, subsample_size=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ beta, SIGMA), obs=y[i])


def correlated_rows():
    """Rows whose covariates have a condition of 10,000, and the exact posterior."""
    rng = np.random.default_rng(0)
    mixing = np.linalg.qr(rng.standard_normal((DIMENSION, DIMENSION)))[0] * np.geomspace(1, 0.01, DIMENSION)
    X = rng.standard_normal((ROWS, DIMENSION)) @ mixing.T
    y = X @ rng.standard_normal(DIMENSION) + SIGMA * rng.standard_normal(ROWS)
    covariance = np.linalg.inv(X.T @ X / SIGMA**2 + np.eye(DIMENSION))
    return X, y, covariance @ X.T @ y / SIGMA**2, covariance


def run(kernel, num=400, seed=0, subsample_size=50):
    X, y, mean, covariance = correlated_rows()
    mcmc = vectorized(kernel, num, num, 20)
    mcmc.run(random.key(seed), jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32), subsample_size=subsample_size)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["beta"], float)
    # In the coordinates in which the posterior is standard normal.
    return mcmc, (draws - mean) @ np.linalg.inv(np.linalg.cholesky(covariance)).T


def test_nothing_set_is_exact_for_many_correlated_rows():
    mcmc, standard = run(SGLD(regression), num=200)
    means = standard.mean((0, 1))
    assert np.sqrt(np.mean(means**2)) < 0.1
    # The budget of the step is 5 % of a variance.
    assert np.abs(standard.var((0, 1)).mean() - 1) < 0.1
    assert not {"not_mixed", "funnel", "several_basins"} & {finding.name for finding in diagnose(mcmc)}


@pytest.mark.slow
def test_diagonal_scales_are_too_slow_for_them():
    _, standard = run(SGLD(regression, preconditioner="diagonal"))
    assert np.abs(standard.var((0, 1)).mean() - 1) > 0.5


class Unsettled(Thermostat):
    """A control: a friction that the long steps of early windows have raised stays so, and falls by T / μ at most."""

    def settled(self, cloud, step_size, noise):
        return cloud


@pytest.mark.slow
@pytest.mark.parametrize("dynamics, holds", [(Thermostat(), True), (Unsettled(), False)])
def test_a_thermostat_takes_up_the_noise_of_many_rows(dynamics, holds):
    # A short run, in which a friction has no time to fall.
    mcmc, standard = run(SGNHT(regression, dynamics=dynamics, gradient=Subsampled()), num=150, subsample_size=500)
    # The budget of the step, and four standard errors of the mean over all parameters.
    assert (np.abs(standard.var((0, 1)).mean() - 1) < 0.05 + 4 * 0.013) == holds
    assert ("cold_momenta" in diagnose(mcmc)) == (not holds)


DIRECTIONS, CURVATURE = 300, np.array([1e-3, 1e-2, 30.0, 300.0, 3000.0])


def gaussian(kernel, **settings):
    """Draws from a Gaussian with five directions of unusual curvature, along these, in units of their spread."""
    rng = np.random.default_rng(1)
    vectors = np.linalg.qr(rng.standard_normal((DIRECTIONS, 5)))[0]
    excess, along = jnp.asarray(CURVATURE - 1, jnp.float32), jnp.asarray(vectors, jnp.float32)

    def energy(z):
        return jnp.sum(z**2) / 2 + jnp.sum(excess * (z @ along) ** 2) / 2

    mcmc = vectorized(kernel(potential_fn=energy, **settings), 400, 400, 20)
    mcmc.run(random.key(0), init_params=random.normal(random.key(1), (20, DIRECTIONS)))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True), float)
    return draws @ vectors * np.sqrt(CURVATURE)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SGLD, SGHMC])
def test_low_rank_scales_suit_few_stiff_directions(kernel):
    variances = gaussian(kernel, preconditioner="low_rank").var((0, 1))
    # Of 8,000 draws, at least 800 count.
    assert (np.abs(variances - 1) < 4.5 * (2 / 800) ** 0.5).all()


@pytest.mark.slow
def test_diagonal_scales_do_not():
    variances = gaussian(SGLD, preconditioner="diagonal").var((0, 1))
    assert (np.abs(variances - 1) > 4.5 * (2 / 800) ** 0.5).any()
