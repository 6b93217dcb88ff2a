"""Groups of effects and their scales, named from draws."""

import json

from jax import random
import jax.numpy as jnp
from models import vectorized
import numpy as np
import pytest
import xarray

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, ControlVariates, diagnose
from numpyro_repulsion.report import group_findings


def posterior(**draws):
    """A dataset of 4 chains."""
    variables = {}
    for name, x in draws.items():
        x = x.reshape(4, -1, *x.shape[1:])
        dims = ("chain", "draw", *(f"{name}_dim_{i}" for i in range(x.ndim - 2)))
        variables[name] = (dims, x)
    return xarray.Dataset(variables)


def draws(seed, levels, product):
    """A scale and its effects: centered, or with a product that the data determine."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.standard_normal(4000))
    standard = rng.standard_normal((4000, levels))
    fixed = np.linspace(-1, 1, levels) + 0.01 * standard
    return {"s": scale, "effects": fixed / scale[:, None] if product else standard * scale[:, None]}


SLOW = {"s", "effects"}


def test_a_product_is_named():
    (found,) = group_findings(posterior(**draws(0, 10, True)), SLOW)
    assert found.name == "noncentered" and found.figure < -0.99
    assert "effects (with s)" in found.message and "numpyro.sample('effects', dist.Normal(0, s))" in found.remedy
    # The scale is the one that the effects depend on.
    other = np.exp(np.random.default_rng(1).standard_normal(4000))
    found = group_findings(posterior(other=other, **draws(0, 10, True)), SLOW)
    assert "with s)" in found[0].message and "other" not in found[0].message


def test_a_group_of_few_levels_is_named():
    (found,) = group_findings(posterior(**draws(0, 3, False)), SLOW)
    assert found.name == "few_levels" and found.figure == 3 and "3 levels" in found.message
    # With many levels, the effects determine their scale, and constant scales suit.
    assert not group_findings(posterior(**draws(0, 50, False)), SLOW)


def test_what_mixes_is_not_named():
    assert not group_findings(posterior(**draws(0, 10, True)), set())
    rng = np.random.default_rng(0)
    apart = posterior(s=np.exp(rng.standard_normal(4000)), effects=rng.standard_normal((4000, 3)))
    assert not group_findings(apart, SLOW)


@pytest.mark.parametrize("sign", [-1, 1])
def test_what_is_correlated_but_no_scale_is_not_named(sign):
    """As the weight of a mixture and the places of its parts: neither their product nor their ratio is determined."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal(4000)
    weight = np.exp(0.4 * common)
    places = np.array([-1.0, -0.5]) * np.exp(sign * 0.1 * common)[:, None] + 0.01 * rng.standard_normal((4000, 2))
    log_size = np.log(np.sqrt(np.mean(places**2, 1)))
    assert abs(np.corrcoef(log_size, common)[0, 1]) > 0.9
    assert not group_findings(posterior(s=weight, effects=places), SLOW)


def test_odd_draws_are_passed_over():
    zero, one = np.zeros((4000, 3)), np.ones(4000)
    assert not group_findings(posterior(s=one, effects=zero), SLOW)
    assert not group_findings(posterior(s=-one, effects=zero + np.nan), SLOW)
    assert not group_findings(posterior(s=one), SLOW)


def effects_of(levels, share, inflation, centered=1.0):
    """A scale of 1 that the effects determine, and effects of which the data determine a share."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.standard_normal(4000) / (2 * levels * share**2) ** 0.5)
    place = share**0.5 * rng.standard_normal(levels)
    found = posterior(
        s=scale, effects=scale[:, None] * (place + (1 - share) ** 0.5 * rng.standard_normal((4000, levels)))
    )
    found.attrs |= {"step_size_mean_bias": inflation, "centering_means": json.dumps({"effects": centered})}
    return found


def test_a_scale_that_many_effects_shift_is_named():
    (found,) = group_findings(effects_of(2000, 0.3, 0.04), set())
    assert found.name == "many_effects" and "s (of 2,000 effects)" in found.message
    assert found.figure == pytest.approx(0.04 * 2000 * 0.7 / (2 * 2000 * 0.3**2) ** 0.5, rel=0.05)
    assert "BiasBudget(0.0" in found.remedy
    for levels, share, inflation in ((20, 0.3, 0.03), (2000, 0.9, 0.02), (2000, 0.3, 0.001), (2000, 0.3, np.nan)):
        assert not group_findings(effects_of(levels, share, inflation), set())
    # Centered by their share they shift nothing, and standardized they do.
    assert not group_findings(effects_of(2000, 0.3, 0.04, centered=0.32), set())
    assert group_findings(effects_of(2000, 0.3, 0.04, centered=0.0), set())


def users(user, y, number):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("users", number):
        u = numpyro.sample("u", dist.Normal(0.0, s))
    with numpyro.plate("rows", len(y), subsample_size=100) as i:
        numpyro.sample("y", dist.Normal(u[user[i]], 1.0), obs=y[i])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "rows", "order", "reparam"),
    [(1000, 10, 1, None), (1000, 10, 1, "auto"), (1000, 10, None, "auto"), (20, 500, None, "auto")],
)
def test_the_shift_is_that_of_a_run(number, rows, order, reparam):
    rng = np.random.default_rng(0)
    y = (0.3 * rng.standard_normal((number, 1)) + rng.standard_normal((number, rows))).astype(np.float32)
    # By quadrature: means of users are N(0, s² + 1 / rows).
    t = np.linspace(-4.0, 1.0, 4001)
    variance = np.exp(2 * t)[:, None] + 1 / rows
    log_density = t - np.exp(2 * t) / 2 - (np.log(variance) + y.mean(1) ** 2 / variance).sum(1) / 2
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = weight @ t
    sd = (weight @ (t - mean) ** 2) ** 0.5
    mcmc = vectorized(SGLD(users, gradient=ControlVariates(order=order), reparam=reparam), 500, 500, 20)
    mcmc.run(random.key(0), jnp.repeat(jnp.arange(number), rows), jnp.asarray(y.ravel()), number)
    shift = (np.log(np.asarray(mcmc.get_samples()["s"], float)).mean() - mean) / sd
    found = [finding for finding in diagnose(mcmc) if finding.name == "many_effects"]
    if reparam is None:
        assert shift > 0.5 and found and found[0].figure == pytest.approx(shift, rel=0.4)
    else:
        # Centering by the share, as control variates of second order, leaves nothing to name.
        assert abs(shift) < 0.2 and not found
