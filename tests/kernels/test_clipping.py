"""Bounds on gradients: which are clipped, and that of rare rows little is cut off."""

from dataclasses import replace

import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, ControlVariates, diagnose
from numpyro_repulsion.findings import MAX_MEAN_SHIFT
from numpyro_repulsion.gradients import Units
from numpyro_repulsion.kernels import iteration
from numpyro_repulsion.kernels.iteration import clip, clip_coordinates, coordinate_limit, length_limit
from numpyro_repulsion.kernels.runs import of_updates


def test_lengths():
    gradient = jnp.array([[[3.0, 4.0], [300.0, 400.0]]])
    limit = 20.0 * 2**0.5
    assert float(length_limit(jnp.array([1.0, 1.0]))) == pytest.approx(limit)
    np.testing.assert_allclose(clip(gradient, limit), [[[3.0, 4.0], [0.6 * limit, 0.8 * limit]]], rtol=1e-6)


@pytest.mark.parametrize(("limit", "expected"), [(coordinate_limit(5.0), 15.0), (coordinate_limit(0.5), 10.0)])
def test_noisy_coordinates_may_be_longer(limit, expected):
    gradient = jnp.zeros((1, 3, 5)).at[0, :, 0].set(-expected * jnp.array([0.99, 1.01, jnp.inf]))
    clipped = clip_coordinates(gradient, limit)
    # An infinite one is rejected.
    np.testing.assert_allclose(clipped[0, :, 0], [-0.99 * expected, -expected, jnp.nan], rtol=1e-6)
    assert (clipped[..., 1:] == 0).all()


def test_what_is_cut_off_bounds_the_shift_of_means():
    """Of the logarithm of an exponential variable, whose gradient has a long tail on one side."""
    mcmc = vectorized(SGLD(potential_fn=lambda z: jnp.sum(jnp.exp(z) - z)), 300, 2000, 20)
    mcmc.warmup(random.key(0), init_params=0.1 * random.normal(random.key(1), (20, 1)))
    warmed = mcmc.last_state

    def run(limit, seed):
        learned = warmed.learned._replace(gradient_limit=jnp.asarray(limit, jnp.float32))
        mcmc.post_warmup_state = warmed._replace(learned=learned)
        mcmc.run(random.key(seed))
        z = np.asarray(mcmc.get_samples(group_by_chain=True), float)
        sd = np.pi / 6**0.5
        names = [finding.name for finding in diagnose(mcmc)]
        return (z.mean() + np.euler_gamma) / sd, z.mean((1, 2)).std(ddof=1) / 20**0.5 / sd, of_updates(mcmc)[1], names

    for seed in (2, 3):
        shift, error, cut_off, names = run(2.0, seed)
        assert 5 * error < shift < cut_off < 1 and "clipped_gradients" in names
        shift, error, cut_off, names = run(20.0, seed)
        assert abs(shift) < 4 * error and cut_off == 0 and "clipped_gradients" not in names


def test_units_of_an_arrow_may_have_longer_gradients_than_globals():
    limit = coordinate_limit(jnp.float32(5.0), Units(6, ((1, (4,), 0),)))
    assert limit.tolist() == [15.0, 50.0, 50.0, 50.0, 50.0, 15.0]
    assert (coordinate_limit(jnp.float32(0.0), Units(6, ((1, (4,), 0),))) == 10.0).all()


GROUPS, ROWS = 1000, 40_000


def rare(group, late):
    """Random intercepts of 1000 groups, most of which no row of a minibatch of 50 belongs to."""
    mean, scale = numpyro.sample("mean", dist.Normal(0, 1)), numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
    with numpyro.plate("rows", ROWS, subsample_size=50) as i:
        numpyro.sample("late", dist.Bernoulli(logits=effect[group[i]]), obs=late[i])


def run_rare(num_warmup, num_chains, seed, order=1):
    keys = random.split(random.key(0), 3)
    group = random.randint(keys[0], (ROWS,), 0, GROUPS)
    effects = 0.5 + 0.7 * random.normal(keys[1], (GROUPS,))
    late = random.bernoulli(keys[2], jax.nn.sigmoid(effects[group])).astype(float)
    mcmc = vectorized(SGLD(rare, gradient=ControlVariates(order=order)), num_warmup, 100, num_chains)
    mcmc.run(random.key(seed), group, late)
    return mcmc


@pytest.mark.slow
def test_of_rare_rows_little_is_cut_off(monkeypatch):
    def cut_off(seed, order):
        return of_updates(run_rare(500, 20, seed, order))[1]

    for seed, order in ((1, 1), (4, 1), (1, 2)):
        assert cut_off(seed, order) < MAX_MEAN_SHIFT / 5
    # The control: tails of the noise of second order are longer than those of other parameters.
    monkeypatch.setattr(iteration, "CLIPPING", replace(iteration.CLIPPING, extremes_of_units=3.0))
    assert cut_off(1, 2) > MAX_MEAN_SHIFT / 5


@pytest.mark.slow
def test_warmup_does_not_cut_off_rare_rows(monkeypatch):
    def error(seed):
        # Long runs with second order have -0.315, and sd 0.03.
        return abs(jnp.log(run_rare(300, 10, seed).get_samples()["scale"]).mean() + 0.315)

    for seed in (1, 6):
        assert error(seed) < 0.1
    # The control: effects without the gradients of their rows spread, and their scale follows.
    monkeypatch.setattr(iteration, "CLIPPING", replace(iteration.CLIPPING, extremes=0.0, coordinate=2.0))
    assert error(1) > 0.3
