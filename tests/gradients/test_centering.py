"""Partial centering: which sites have it, and that it is a change of variables of the same posterior."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist

from numpyro_repulsion.gradients import CenteredTarget, Centering, ModelTarget, ravel_cloud

Y = jnp.linspace(-1.0, 2.0, 8)


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("groups", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    numpyro.sample("t", dist.StudentT(4.0, 0.0, tau * jnp.arange(1.0, 3.0)).to_event(1))
    with numpyro.plate("outer", 2, dim=-2), numpyro.plate("inner", 3):
        numpyro.sample("nested", dist.Laplace(theta[0], tau))
    # None of these has a scale that depends on another site, or is of such a family.
    numpyro.sample("wide", dist.Normal(jnp.zeros(3), 2 * jnp.ones(3)).to_event(1))
    numpyro.sample("shifted", dist.Normal(mu, 1.0))
    numpyro.sample("positive", dist.LogNormal(0.0, tau))
    with numpyro.handlers.scale(scale=0.25):
        numpyro.sample("weighted", dist.Normal(0.0, tau))
    numpyro.sample("masked", dist.Normal(0.0, tau).mask(jnp.array(True)))

    def step(before, _):
        return numpyro.sample("walk", dist.Normal(before, tau)), None

    scan(step, 0.0, jnp.arange(3))
    numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


@pytest.fixture(scope="module")
def target():
    return ModelTarget(model, (Y,))


def particle(target):
    return {name: random.normal(random.key(i), site.shape) for i, (name, site) in enumerate(target.prototype.items())}


def centered_by(target, share, unravel):
    return CenteredTarget(target, Centering.none(target, len(share), share.dtype)._replace(share=share), unravel)


def share_of(target, value):
    """The flat share of a value for sites that have one; a number, or a key for random ones."""
    shares = {}
    for i, (name, site) in enumerate(target.prototype.items()):
        has = name in target.location_scale
        own = random.uniform(random.key(i), site.shape) if value == "random" else jnp.full(site.shape, value)
        shares[name] = own if has else jnp.ones(site.shape)
    return ravel_cloud(jax.tree.map(lambda x: x[None], shares))[0][0]


def test_sites_with_a_scale_that_depends_on_others_have_it(target):
    assert list(target.location_scale) == ["nested", "t", "theta"]


def test_models_without_such_sites():
    def flat(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)

    def enumerated(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        theta = numpyro.sample("theta", dist.Normal(0.0, tau))
        with numpyro.plate("rows", 8):
            k = numpyro.sample("k", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(theta * k, 1.0), obs=y)

    assert ModelTarget(flat, (Y,)).location_scale == ModelTarget(enumerated, (Y,)).location_scale == {}


@pytest.mark.parametrize("value", [0.0, "random"])
def test_it_is_a_change_of_variables(target, value):
    z, unravel = ravel_cloud(jax.tree.map(lambda x: x[None], particle(target)))
    z, share = z[0], share_of(target, value)
    centered = centered_by(target, share, unravel)
    y = centered.to_coordinates(centered_by(target, jnp.ones_like(share), unravel).recover(z))
    found = centered.recover(y)
    np.testing.assert_allclose(found.z, z, rtol=1e-5, atol=1e-5)
    volume = centered.log_volume(found)
    jacobian = jax.jacobian(lambda y: centered.recover(y).z)(y)
    np.testing.assert_allclose(jnp.linalg.slogdet(jacobian)[1], volume, rtol=1e-4, atol=1e-5)
    energies = [one.potential_energy(unravel(x), {}, random.key(0)) for one, x in ((centered, y), (target, z))]
    np.testing.assert_allclose(energies[0], energies[1] - volume, rtol=1e-5)
    assert abs(energies[0] - energies[1]) > 0.1  # without the volume


def test_an_entry_that_is_not_centered_is_standardized(target):
    z, unravel = ravel_cloud(jax.tree.map(lambda x: x[None], particle(target)))
    share = share_of(target, 0.0)
    found = centered_by(target, jnp.ones_like(share), unravel).recover(z[0])
    values, y = unravel(found.z), unravel(centered_by(target, share, unravel).to_coordinates(found))
    np.testing.assert_allclose(y["theta"], (values["theta"] - values["mu"]) / jnp.exp(values["tau"]), rtol=1e-4)
    assert (y["shifted"] == values["shifted"]).all() and (y["walk"] == values["walk"]).all()


def test_minibatches_are_those_of_the_model():
    def rows(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        theta = numpyro.sample("theta", dist.Normal(0.0, tau).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=2) as i:
            numpyro.sample("y", dist.Normal(theta[i % 2], 1.0), obs=y[i])

    target = ModelTarget(rows, (Y,))
    z, unravel = ravel_cloud(jax.tree.map(lambda x: x[None], particle(target)))
    share = share_of(target, 0.5)
    centered = centered_by(target, share, unravel)
    assert centered.plates == target.plates and centered.crossed_plates() == target.crossed_plates()
    y = centered.to_coordinates(centered_by(target, jnp.ones_like(share), unravel).recover(z[0]))
    volume = centered.log_volume(centered.recover(y))
    for indices in (jnp.array([0, 3]), jnp.array([6, 1]), jnp.arange(8)):
        found = centered.potential_energy(unravel(y), {"rows": indices}, random.key(0))
        expected = target.potential_energy(unravel(z[0]), {"rows": indices}, random.key(0))
        np.testing.assert_allclose(found, expected - volume, rtol=1e-5)


def schools(y):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 8), numpyro.handlers.scope(prefix="inner"):
        theta = numpyro.sample("theta", dist.Normal(0.0, tau))
    with numpyro.plate("rows", 8, subsample_size=4) as i:
        numpyro.sample("y", dist.Normal(theta[i], 1.0), obs=y[i])


HANDLED = {
    "scope": lambda: numpyro.handlers.scope(schools, prefix="a"),
    "what is exposed": lambda: numpyro.handlers.block(schools, expose=["tau", "inner/theta", "groups", "rows", "y"]),
    "names hidden": lambda: numpyro.handlers.block(schools, hide_fn=lambda site: "_" in str(site.get("name"))),
}


@pytest.mark.parametrize("handled", HANDLED.values(), ids=HANDLED)
def test_it_is_a_change_of_variables_under_handlers(handled):
    target = ModelTarget(handled(), (Y,))
    (name,) = target.location_scale
    z, unravel = ravel_cloud(jax.tree.map(lambda x: x[None], particle(target)))
    centered = centered_by(target, share_of(target, 0.3), unravel)
    rows = {plate: jnp.arange(4) for plate in target.plates}
    found = centered.recover(z[0])
    energy = centered.potential_energy(unravel(z[0]), rows, random.key(0))
    volume = centered.log_volume(found)
    expected = target.potential_energy(unravel(found.z), rows, random.key(0)) - volume
    np.testing.assert_allclose(energy, expected, rtol=1e-5)
    # Every effect matters.
    gradient = jax.grad(lambda z: centered.potential_energy(z, rows, random.key(1)))(unravel(z[0]))
    assert (jnp.abs(gradient[name]) > 1e-3).all()


def test_effects_by_sample_shape_have_it():
    def effects(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        theta = numpyro.sample("theta", dist.Normal(0.0, tau), sample_shape=(8,))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    target = ModelTarget(effects, (Y,))
    assert list(target.location_scale) == ["theta"]
    z, unravel = ravel_cloud(jax.tree.map(lambda x: x[None], particle(target)))
    centered = centered_by(target, share_of(target, 0.3), unravel)
    found = centered.recover(z[0])
    expected = target.potential_energy(unravel(found.z), {}, random.key(0)) - centered.log_volume(found)
    np.testing.assert_allclose(centered.potential_energy(unravel(z[0]), {}, random.key(0)), expected, rtol=1e-5)
