"""Groups of effects and their scales, named from draws."""

import numpy as np
import pytest

from numpyro_repulsion.report.diagnosis import group_findings

xarray = pytest.importorskip("xarray")


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


@pytest.mark.parametrize("seed", [0, 1])
def test_a_product_is_named(seed):
    (found,) = group_findings(posterior(**draws(seed, 10, True)), SLOW)
    assert found.name == "noncentered" and found.figure < -0.99
    assert "effects (with s)" in found.message and "numpyro.sample('effects', dist.Normal(0, s))" in found.remedy


@pytest.mark.parametrize("seed", [0, 1])
def test_a_group_of_few_levels_is_named(seed):
    (found,) = group_findings(posterior(**draws(seed, 3, False)), SLOW)
    assert found.name == "few_levels" and found.figure == 3 and "3 levels" in found.message
    # With many levels, the effects determine their scale, and constant scales suit.
    assert not group_findings(posterior(**draws(seed, 50, False)), SLOW)


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


def test_the_scale_is_the_one_that_the_effects_depend_on():
    rng = np.random.default_rng(1)
    found = group_findings(posterior(other=np.exp(rng.standard_normal(4000)), **draws(0, 10, True)), SLOW)
    assert "with s)" in found[0].message and "other" not in found[0].message


def test_odd_draws_are_passed_over():
    zero, one = np.zeros((4000, 3)), np.ones(4000)
    assert not group_findings(posterior(s=one, effects=zero), SLOW)
    assert not group_findings(posterior(s=-one, effects=zero + np.nan), SLOW)
    assert not group_findings(posterior(s=one), SLOW)
