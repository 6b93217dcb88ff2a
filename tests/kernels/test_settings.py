"""What settings mean: "auto" is automatic, None is off, and SGLD as published is one call."""

from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGHMC, SGLD, SGLDR, BiasBudget, FullData, Independent, Subsampled
from numpyro_repulsion.dynamics import Overdamped

Y = jnp.linspace(-1.0, 1.0, 40)


def rows(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=4) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def mean(y):
    numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0, 1)), 1), obs=y)


@pytest.mark.parametrize(
    ("name", "words"), [("gradient", "now."), ("dynamics", "now."), ("moves", "now, or moves=False for no jumps.")]
)
def test_none_that_meant_automatic_says_what_to_write(name, words):
    with pytest.raises(ValueError, match=f'{name}=None meant the automatic choice, which is {name}="auto" {words}'):
        SGLD(rows, **{name: None})


@pytest.mark.parametrize("kernel", [SGLDR, SGHMC])
def test_auto_is_the_default(kernel):
    auto = dict.fromkeys(("step_size", "interaction", "gradient", "dynamics", "moves"), "auto")
    for given in ({}, auto, {"step_size": None, "interaction": None}):
        made = kernel(rows, **given)
        assert made.step_size == BiasBudget()
        assert made.interaction == kernel(rows).interaction and made.dynamics == kernel(rows).dynamics
        assert made.looks_for_basins == kernel(rows).looks_for_basins and made.moves is None


def test_plain_is_sgld_as_published():
    """Euler's recursion with independent noise, whose variance for a Gaussian posterior is known."""
    made = SGLD.plain(rows, 0.01, num_steps=5)
    assert (made.interaction, made.dynamics, made.num_steps) == (Independent(), Overdamped("euler"), 5)
    assert made.bind((Y,)).gradient == Subsampled() and SGLD.plain(mean, 0.01).bind((Y,)).gradient == FullData()
    assert not made.looks_for_basins and made.reparam is None and made.preconditioner is None
    precision, step = 41.0, 0.02
    mcmc = vectorized(SGLD.plain(mean, step), 0, 100, 100)
    mcmc.run(random.key(0), Y)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])[:, 5:]
    # After ten updates 3e-8 of a deviation is left, so draws are independent.
    expected = 1 / precision / (1 - step * precision / 2)
    z = (draws.var() / expected - 1) * (draws.size / 2) ** 0.5
    assert abs(z) < 4.5
    # The control: the posterior's variance.
    assert (draws.var() * precision - 1) * (draws.size / 2) ** 0.5 > 9.0


@pytest.mark.parametrize(
    ("kernel", "step_size", "smaller"),
    [(SGLD, "auto", 0.002), (SGHMC, "auto", 0.002), (SGLDR, "auto", 0.01), (SGLD, BiasBudget(0.1), 0.02)],
)
def test_the_remedy_is_a_budget_below_the_one_in_use(kernel, step_size, smaller):
    assert f"BiasBudget({smaller}, " in kernel(rows, step_size=step_size).remedy
