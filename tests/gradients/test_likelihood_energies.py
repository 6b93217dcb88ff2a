"""Energies of the likelihood alone, on rows that are the same for all particles."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion.gradients import ModelTarget, likelihood_energies, rows_to_compare

N, BATCH = 200, 20
X = random.normal(random.key(0), (N, 3)) * jnp.array([1.0, 5.0, 0.2])
Y = X @ jnp.array([1.0, -0.2, 3.0]) + 0.1 * random.normal(random.key(1), (N,))


def regression(X, y, subsample_size):
    w = numpyro.sample("w", dist.Normal(0, 10).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 0.3), obs=y[i])


def test_rows_to_compare_are_spread_over_the_plate():
    target = ModelTarget(regression, (X, Y), {"subsample_size": 30})
    rows = np.asarray(rows_to_compare(target)["rows"])
    assert rows.shape == (6, 30) and len(np.unique(rows)) == 180 and rows.max() > 190


def test_energies_to_compare_are_of_the_likelihood_alone():
    target = ModelTarget(regression, (X, Y), {"subsample_size": BATCH})
    w = random.normal(random.key(4), (5, 3))
    rows = rows_to_compare(target)
    found = likelihood_energies(target, {"w": w}, rows)
    chosen = np.ravel(rows["rows"])
    expected = -N * jax.vmap(lambda w: dist.Normal(X[chosen] @ w, 0.3).log_prob(Y[chosen]).mean())(w)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    prior = -jax.vmap(lambda w: dist.Normal(0, 10).log_prob(w).sum())(w)
    assert not np.allclose(found, expected + prior, rtol=1e-4)
