"""Runs under ``jax_debug_nans``: it stops at NaN of the model's own, and at nothing that the package makes."""

import warnings

import jax
from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import (
    RBF,
    SGHMC,
    SGLD,
    SGLDR,
    SGNHT,
    SVGD,
    SVRG,
    Archive,
    Balanced,
    FullData,
    Subsampled,
    step_bias,
    summary,
    to_inference_data,
)
from numpyro_repulsion.interactions import RandomFeatures

Y = random.normal(random.key(0), (40,))


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.Gamma(3, 1))
    with numpyro.plate("rows", 40, subsample_size=8) as i:
        numpyro.sample("y", dist.Normal(mu[0] + mu[1], sigma), obs=y[i])


def make(kernel, num_warmup=50, **kwargs):
    return vectorized(kernel, num_warmup, 10, **kwargs)


@pytest.fixture(autouse=True)
def debug_nans():
    with jax.debug_nans(True), warnings.catch_warnings():
        yield


def check(mcmc):
    """Results under the same flag, with NaN where there is nothing to say."""
    summary(mcmc)
    data = to_inference_data(mcmc)
    has_bandwidth = np.isfinite(data["sample_stats"]["bandwidth"].values).all()
    given = mcmc.sampler.interaction
    assert has_bandwidth == (getattr(given, "bandwidth", None) is not None or given.learns_bandwidth)
    for leaf in jax.tree.leaves(mcmc.last_state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert not np.isnan(leaf).any()


def test_a_run_with_control_variates():
    mcmc = make(SGLD(model, num_steps=2))
    mcmc.run(random.key(0), Y)
    assert not any(np.isnan(x).any() for x in jax.tree.leaves((mcmc.last_state.learned, mcmc.last_state.z)))
    assert mcmc.last_state.learned.reference.posterior_id.all()
    assert float(mcmc.last_state.learned.figures.bias) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "settings"),
    [
        (lambda: SGLDR(model, num_ensembles=2, interaction=Balanced(RBF())), {}),
        (lambda: SGLDR(model, gradient=SVRG()), {"progress_bar": True}),
        (lambda: SGLD(model, gradient=Subsampled(), step_size=0.01), {"num_warmup": 0}),
        (lambda: SGLD(model, gradient=FullData(), moves=Archive()), {"num_warmup": 100}),
        (lambda: SGHMC(model, gradient=FullData()), {}),
        (lambda: SGNHT(model), {}),
        (lambda: SVGD(model), {}),
        (lambda: SGLDR(model, interaction=RandomFeatures()), {}),
        (lambda: SGLD(model), {"num_chains": 1}),
    ],
)
def test_runs_of_every_kind(kernel, settings):
    mcmc = make(kernel(), **settings)
    mcmc.run(random.key(0), Y)
    check(mcmc)
    if not isinstance(mcmc.sampler, SVGD):
        step_bias(mcmc)


@pytest.mark.parametrize(
    ("kernel", "starts"),
    [
        (SGLD(potential_fn=lambda z: jnp.sum(jnp.log(z - 100.0)), step_size=0.1), jnp.arange(12.0).reshape(6, 2)),
        (SGLD(potential_fn=lambda z: jnp.sum(z**2) + jnp.nan * 0.0, step_size=0.1), jnp.arange(6.0)),
    ],
)
def test_nan_of_a_model_is_caught(kernel, starts):
    with pytest.raises(FloatingPointError, match="nan"):
        make(kernel, num_warmup=0).run(random.key(0), init_params=starts)
