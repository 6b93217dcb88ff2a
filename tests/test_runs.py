"""Functions of a run say what they need, all in the same words."""

import warnings

from jax import random
import jax.numpy as jnp
import pytest
from results import made, run

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_repulsion import (
    SGLD,
    SVGD,
    diagnose,
    extrapolate,
    predict,
    stein_control_variates,
    step_bias,
    summary,
    to_inference_data,
)
from numpyro_repulsion.contrib import llc
from numpyro_repulsion.diagnostics import scores
from numpyro_repulsion.plots import plot_particles

OF_DRAWS = (scores, step_bias, to_inference_data)
OF_RUNS = (summary, diagnose, predict, stein_control_variates, extrapolate, llc)


def model():
    numpyro.sample("x", dist.Normal(0, 1))


@pytest.mark.parametrize("function", [*OF_DRAWS, *OF_RUNS])
def test_anything_but_a_run_of_this_package_is_refused(function):
    with pytest.raises(TypeError, match=f"{function.__name__}`? takes an? .*; got int"):
        function(3)
    words = f"{function.__name__} takes a numpyro.infer.MCMC with a kernel of this package.*got MCMC with NUTS"
    with pytest.raises(TypeError, match=words):
        function(MCMC(NUTS(model), num_warmup=1, num_samples=1))


@pytest.fixture(scope="module")
def warmed():
    """Warmups without draws, and with them."""
    found = made(SGLD(model, step_size=0.1), 4, 4, 4), made(SGLD(model, step_size=0.1), 4, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mcmc, collects in zip(found, (False, True), strict=True):
            mcmc.warmup(random.key(0), collect_warmup=collects)
    return found


@pytest.mark.parametrize("function", [*OF_DRAWS, *OF_RUNS, plot_particles])
def test_a_run_is_needed(function, warmed):
    with pytest.raises(ValueError, match="no draws yet; call mcmc.run"):
        function(made(SGLD(model)))
    # NumPyro leaves zeros in the place of draws.
    with pytest.raises(ValueError, match="only warmed up and kept no draws.*collect_warmup=True"):
        function(warmed[0])
    if function in OF_RUNS:
        with pytest.raises(ValueError, match=f"These are draws of warmup; call {function.__name__} after mcmc.run"):
            function(warmed[1])


def test_an_optimizer_has_no_draws_of_the_posterior():
    mcmc = run(SVGD(potential_fn=lambda z: jnp.sum(z**2), step_size=0.1), num_samples=2, init_params=jnp.arange(6.0))
    for function in (stein_control_variates, extrapolate, llc, step_bias):
        with pytest.raises(ValueError, match="SVGD is an optimizer, so.*Use SGLDR for draws"):
            function(mcmc)
