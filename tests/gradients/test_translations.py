"""Effects whose mean another coefficient can take over: which gradients tell, and that coordinates stay exact."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_repulsion.gradients import CenteredTarget, Centering, ModelTarget, ravel_cloud

ROWS = 60
GROUP, OTHER = jnp.arange(ROWS) % 3, (jnp.arange(ROWS) // 3) % 5
X = random.normal(random.key(1), (ROWS, 2))
Y = random.normal(random.key(2), (ROWS,))


def levels(name, size, scale):
    return numpyro.sample(name, dist.Normal(0.0, scale).expand([size]).to_event(1))


def model(y, prior=5.0, batch=None):
    """An intercept and a slope, each with effects of groups, written centered and non-centered."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, prior))
    beta = numpyro.sample("beta", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
    tau, sigma, speed = (numpyro.sample(name, dist.HalfNormal(1.0)) for name in ("tau", "sigma", "speed"))
    group, other, slope = levels("group", 3, tau), sigma * levels("other", 5, 1.0), levels("slope", 3, speed)
    alone = levels("alone", 3, tau)
    with numpyro.plate("rows", ROWS, subsample_size=batch) as i:
        x = X[i]
        mean = intercept + x @ beta + group[GROUP[i]] + other[OTHER[i]]
        mean += slope[GROUP[i]] * x[:, 1] + alone[GROUP[i]] * x[:, 0] ** 2
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y[i])


def learned(target, min_spread=0.3):
    keys = random.split(random.key(3), 20)
    z, unravel = ravel_cloud(jax.vmap(lambda key: target.draw(key, init_to_uniform))(keys))
    plain = CenteredTarget(target, Centering.none(target, z.shape[1], z.dtype), unravel)
    return *plain.structure_at(jax.vmap(plain.recover)(z), min_spread), unravel


def names_of(target, centering, unravel):
    labels = unravel(jnp.arange(len(centering.share), dtype=float))
    names = {int(k): f"{name}[{j}]" for name, x in labels.items() for j, k in enumerate(np.ravel(x))}
    return dict(zip(target.translations.groups, [names.get(int(k)) for k in centering.bases], strict=True))


@pytest.mark.parametrize("batch", [None, 20])
def test_gradients_tell_bases(batch):
    target = ModelTarget(model, (Y,), {"batch": batch})
    centering, _, unravel = learned(target)
    assert names_of(target, centering, unravel) == {
        "alone": None,
        "group": "intercept[0]",
        "other": "intercept[0]",
        "slope": "beta[1]",
    }


def test_a_scale_that_is_known_and_a_narrow_base_have_none():
    target = ModelTarget(model, (Y,))
    assert (learned(target, min_spread=10.0)[0].bases == -1).all()
    target = ModelTarget(model, (Y, 0.01))
    found = names_of(target, *learned(target)[::2])
    assert found["group"] is found["other"] is None and found["slope"] == "beta[1]"


def test_models_without_bases_have_no_groups():
    def without(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(levels("group", 3, tau)[GROUP], 1.0), obs=y)

    def on_the_scale(y):
        log_tau = numpyro.sample("log_tau", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(levels("group", 3, jnp.exp(log_tau))[GROUP], 1.0), obs=y)

    def as_location(y):
        mu, tau = numpyro.sample("mu", dist.Normal(0.0, 5.0)), numpyro.sample("tau", dist.HalfNormal(1.0))
        effects = numpyro.sample("group", dist.Normal(mu, tau).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(effects[GROUP], 1.0), obs=y)

    def single(y):
        mu, tau = numpyro.sample("mu", dist.Normal(0.0, 5.0)), numpyro.sample("tau", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(mu + levels("group", 1, tau), 1.0), obs=y)

    for one in (without, on_the_scale, as_location, single):
        assert ModelTarget(one, (Y,)).num_groups == 0, one.__name__


@pytest.mark.parametrize("value", [0.0, "random"])
def test_it_is_a_change_of_variables(value):
    target = ModelTarget(model, (Y,))
    centering, found, unravel = learned(target)
    share = jnp.where(found.scale[0] == 1.0, 1.0, random.uniform(random.key(9), centering.share.shape))
    centering = centering._replace(share=share if value == "random" else jnp.where(share == 1.0, 1.0, value))
    found = jax.tree.map(lambda x: x[0], found)
    centered = CenteredTarget(target, centering, unravel)
    y = centered.to_coordinates(found)
    np.testing.assert_allclose(centered.recover(y).z, found.z, rtol=1e-4, atol=1e-5)
    volume = centered.log_volume(found)
    jacobian = jax.jacobian(lambda y: centered.recover(y).z)(y)
    np.testing.assert_allclose(jnp.linalg.slogdet(jacobian)[1], volume, rtol=1e-4, atol=1e-5)
    energies = [one.potential_energy(unravel(x), {}, random.key(0)) for one, x in ((centered, y), (target, found.z))]
    np.testing.assert_allclose(energies[0], energies[1] - volume, rtol=1e-5)
    without = CenteredTarget(target, centering._replace(bases=jnp.full_like(centering.bases, -1)), unravel)
    assert abs(without.log_volume(found) - volume) > 0.1 or value == 0.0


def test_the_base_takes_the_means_and_the_likelihood_does_not_see_them():
    target = ModelTarget(model, (Y,))
    centering, found, unravel = learned(target)
    centered = CenteredTarget(target, centering, unravel)
    found = jax.tree.map(lambda x: x[0], found)
    y, x = unravel(centered.to_coordinates(found)), unravel(found.centered)
    means = x["group"].mean() + x["other"].mean()
    np.testing.assert_allclose(y["intercept"], x["intercept"] + means, rtol=1e-5)
    np.testing.assert_allclose(y["beta"], x["beta"] + jnp.array([0.0, x["slope"].mean()]), rtol=1e-5)

    def likelihood(z):
        sites = target.sites(target.constrain(z))
        return sites["y"]["fn"].log_prob(Y).sum()

    def at(y):
        return likelihood(unravel(centered.recover(ravel_cloud(jax.tree.map(lambda x: x[None], y))[0][0]).z))

    moved = dict(y, group=y["group"] + 1.0, tau=y["tau"])
    np.testing.assert_allclose(at(y), at(moved), rtol=1e-5)
    assert abs(at(y) - at(dict(y, intercept=y["intercept"] + 1.0))) > 1.0
