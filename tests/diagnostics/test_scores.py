"""Scores of a run's draws: the gradient of NumPyro's own potential, where the draws were."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from results import run as ran

import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import potential_energy

from numpyro_repulsion import SGLD, SGLDR, SVGD, Subsampled, ksd, scores
from numpyro_repulsion.dynamics import Overdamped

Y = 1.0 + random.normal(random.key(2), (60,))


def model(y, size=20):
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    numpyro.deterministic("total", scale + weights.sum())
    with numpyro.plate("rows", 60, subsample_size=size) as i:
        numpyro.sample("y", dist.Normal(weights[0], scale), obs=y[i])


run = partial(ran, num_samples=50, num_chains=8)


@pytest.fixture(scope="module")
def mcmc():
    return run(SGLDR(model, step_size=2e-3), Y)


def test_scores_are_gradients_of_the_full_potential(mcmc):
    z, found = scores(mcmc, num_draws=100)
    assert z.shape == found.shape == (100, 3)

    def energy(flat):
        particle = {"scale": flat[0], "weights": flat[1:]}
        return potential_energy(lambda: model(Y, None), (), {}, particle)

    np.testing.assert_allclose(found, -jax.vmap(jax.grad(energy))(z), rtol=2e-3, atol=2e-3)
    # The last draw is the last particle's last.
    last = np.concatenate([np.ravel(mcmc.last_state.z[name][-1]) for name in ("scale", "weights")])
    np.testing.assert_allclose(z[-1], last, rtol=1e-4, atol=1e-5)


def test_minibatch_scores_scatter_about_them(mcmc):
    _, full = scores(mcmc, num_draws=400)
    _, noisy = scores(mcmc, num_draws=400, gradient=Subsampled(), rng_key=random.key(3))
    difference = np.asarray(noisy - full, np.float64)
    # The data do not look at the last coordinate of the simplex.
    assert (difference[:, 2] == 0).all() and difference.std(0)[:2].min() > 0
    z = difference[:, :2].mean(0) / difference[:, :2].std(0) * 20
    assert np.abs(z).max() < 4.5, z


def test_stein_discrepancy_of_a_run_tells_a_long_step():
    starts = random.normal(random.key(1), (8, 2))
    good, bad = (
        run(
            SGLD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=step_size, dynamics=Overdamped("euler")),
            num_samples=100,
            init_params=starts,
        )
        for step_size in (0.1, 1.2)
    )
    assert ksd(*scores(good)) < 0.1 < ksd(*scores(bad))


def test_scores_of_an_optimizer_are_of_its_last_cloud():
    starts = random.normal(random.key(1), (8, 2))
    mcmc = run(SVGD(potential_fn=lambda z: jnp.sum(z**2) / 2, step_size=0.1), num_samples=5, init_params=starts)
    z, found = scores(mcmc)
    np.testing.assert_allclose(z, mcmc.last_state.z, rtol=1e-6)
    np.testing.assert_allclose(found, -z, rtol=1e-6)


def test_misuse_is_refused(mcmc):
    with pytest.raises(ValueError, match="`num_draws` must be an integer, 1 or more; got 0"):
        scores(mcmc, num_draws=0)
    with pytest.raises(TypeError, match="such as FullData.. or Subsampled..; got 'full'"):
        scores(mcmc, gradient="full")
    short = run(SGLD(model, step_size=1e-3), Y, num_samples=2, extra_fields=("~z.scale",))
    with pytest.raises(ValueError, match="all latent sites, and .'scale'. are missing"):
        scores(short)
