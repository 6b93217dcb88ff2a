"""Other packages that take an ``MCMC`` of NumPyro, with kernels of this one: no adapter is needed."""

from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, diagnose

TRUTH = np.array([1.0, -1.0, 0.5])


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    with numpyro.plate("rows", X.shape[0], subsample_size=min(100, X.shape[0])) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, sd), obs=None if y is None else y[i])


@pytest.mark.slow
def test_an_impact_model_of_aimz_fits_and_predicts():
    aimz = pytest.importorskip("aimz", reason="`make test-full` installs it")
    X = np.asarray(random.normal(random.key(0), (1000, 3)))
    y = X @ TRUTH + 0.5 * np.asarray(random.normal(random.key(1), (1000,)))
    mcmc = vectorized(SGLD(model), 300, 100, 8)
    fitted = aimz.ImpactModel(model, rng_key=random.key(2), inference=mcmc)
    fitted.fit_on_batch(X, y)
    # The standard error of a coefficient is 0.5 / sqrt(1000) = 0.016.
    np.testing.assert_allclose(fitted.posterior["w"].mean(0), TRUTH, atol=5 * 0.016)
    assert not diagnose(mcmc)
    # As many rows as a minibatch has, so that the plate takes all of them in order.
    found = fitted.predict_on_batch(X[:50])["posterior_predictive"]["y"]
    errors = jnp.asarray(found.values).mean((0, 1)) - X[:50] @ TRUTH
    assert jnp.abs(errors).max() < 5 * 0.5 / 800**0.5 + 5 * 0.016 * np.linalg.norm(X[:50], axis=1).max()
