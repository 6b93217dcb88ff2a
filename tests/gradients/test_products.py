"""Effects that a model multiplies by scales: which powers gradients tell, and that coordinates stay exact."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_repulsion.gradients import CenteredTarget, Centering, ModelTarget, ravel_cloud
from numpyro_repulsion.gradients.location_scale import multiplied
from numpyro_repulsion.gradients.posterior import likelihood_gradients

X = random.normal(random.key(1), (50, 5))
Y = X.sum(1)


def standard(name):
    return numpyro.sample(name, dist.Normal(0.0, 1.0).expand([5]).to_event(1))


def model(x, y):
    """Scales in all forms: products of them, variances, precisions, logarithms, with an upper bound."""
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    local = numpyro.sample("local", dist.HalfCauchy(1.0).expand([5]).to_event(1))
    variance = numpyro.sample("variance", dist.Gamma(2.0, 2.0))
    precision = numpyro.sample("precision", dist.InverseGamma(2.0, 2.0))
    log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 1.0))
    bounded = numpyro.sample("bounded", dist.Uniform(0.0, 10.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    effects = standard("a") * tau * local + standard("b") * jnp.sqrt(variance) + bounded * standard("d")
    mean = x @ effects + (x @ (jnp.exp(log_scale) * standard("c"))) / jnp.sqrt(precision)
    numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


POWERS = {("a", "tau"): 1.0, ("a", "local"): 1.0, ("b", "variance"): 0.5, ("c", "precision"): -0.5,
          ("c", "log_scale"): 1.0, ("d", "bounded"): 1.0}  # fmt: skip


def particles(target):
    return jax.vmap(lambda key: target.draw(key, init_to_uniform))(random.split(random.key(2), 12))


def powers(target):
    at = particles(target)
    return target.products.powers(at, likelihood_gradients(target, at, [target.products.sites])[0])


@pytest.fixture(scope="module")
def target():
    return ModelTarget(model, (X, Y))


def test_gradients_tell_powers(target):
    assert set(target.products.pairs) == set(POWERS) and target.num_products == 6
    found = powers(target)
    np.testing.assert_array_equal(found, [POWERS[pair] for pair in target.products.pairs])


def test_a_scale_that_the_likelihood_also_uses_otherwise_has_none():
    def mixed(x, y):
        tau, z = numpyro.sample("tau", dist.HalfNormal(1.0)), standard("z")
        numpyro.sample("y", dist.Normal(x @ (tau * z), 1.0 + tau), obs=y)

    def twice(x, y):
        tau, z = numpyro.sample("tau", dist.HalfNormal(1.0)), standard("z")
        numpyro.sample("y", dist.Normal(x @ (tau * z) + z.sum(), 1.0), obs=y)

    for one in (mixed, twice):
        target = ModelTarget(one, (X, Y))
        assert target.products.pairs == [("z", "tau")]
        assert powers(target).tolist() == [0.0]


def test_models_without_products_have_no_pairs():
    def regression(x, y):
        sigma, w = numpyro.sample("sigma", dist.HalfNormal(1.0)), standard("w")
        numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    def network(x, y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([5, 3]).to_event(2))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        c = numpyro.sample("c", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(jnp.tanh(x @ a + b) @ c, numpyro.sample("s", dist.HalfNormal(1.0))), obs=y)

    def weighted(x, y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        with numpyro.handlers.scale(scale=0.5):
            z = standard("z")
        numpyro.sample("y", dist.Normal(x @ (tau * z), 1.0), obs=y)

    def centered(x, y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        w = numpyro.sample("w", dist.Normal(0.0, tau).expand([5]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    def enumerated(x, y):
        tau, z = numpyro.sample("tau", dist.HalfNormal(1.0)), standard("z")
        with numpyro.plate("rows", 50):
            k = numpyro.sample("k", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(x @ (tau * z) + k, 1.0), obs=y)

    for one in (regression, network, weighted, centered, enumerated):
        assert ModelTarget(one, (X, Y)).num_products == 0, one.__name__


def test_products_within_loops_and_calls_are_read():
    def series(x, y):
        sigma, e = numpyro.sample("sigma", dist.HalfNormal(1.0)), standard("e")

        def step(level, e):
            level = 0.9 * level + jax.jit(jnp.multiply)(sigma, e)
            return level, level

        numpyro.sample("y", dist.Normal(jax.lax.scan(step, 0.0, e)[1], 1.0), obs=y[:5])

    target = ModelTarget(series, (X, Y))
    assert target.products.pairs == [("e", "sigma")]
    assert powers(target).tolist() == [1.0]

    def latent(x, y):
        def step(before, _):
            return before + numpyro.sample("step", dist.Normal(0.0, 1.0)), None

        end, _ = scan(step, 0.0, jnp.arange(3))
        numpyro.sample("y", dist.Normal(end * numpyro.sample("tau", dist.HalfNormal(1.0)), 1.0), obs=y)

    assert ModelTarget(latent, (X, Y)).latent  # such a model is not refused


def test_only_what_is_linear_is_an_effect():
    z = {name: jnp.ones(2) for name in ("e", "f", "s")}
    assert multiplied(lambda z: jnp.reshape(-z["e"], (1, 2)) * z["s"], z) == {("e", "s"), ("s", "e")}
    assert multiplied(lambda z: (z["e"] + z["f"]) / z["s"], z) == set()
    assert multiplied(lambda z: (z["e"] + 1.0) * jnp.exp(z["s"]), z) == set()
    assert multiplied(lambda z: (3.0 * z["e"]) @ jnp.exp(z["s"]), z) == {("e", "s")}
    assert multiplied(lambda z: z["e"] * jnp.exp(z["e"] * z["s"]), z) == {("e", "s"), ("s", "e")}


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_it_is_a_change_of_variables(target, share):
    at = particles(target)
    z, unravel = ravel_cloud(at)
    z = z[0]
    found_powers = jnp.array([POWERS[pair] for pair in target.products.pairs])
    effects = {effect for effect, _ in POWERS}
    flat, plain_share = (
        jnp.concatenate([jnp.full(x[0].size, c if name in effects else 1.0) for name, x in sorted(at.items())])
        for c in (share, 0.0)
    )
    plain = Centering.none(target, len(flat), flat.dtype)
    np.testing.assert_array_equal(CenteredTarget(target, plain, unravel).recover(z).z, z)
    # Without any share, the coordinates of products are the effects of the model.
    found = CenteredTarget(target, Centering(plain_share, found_powers, plain.bases), unravel).recover(z)
    centered = CenteredTarget(target, Centering(flat, found_powers, plain.bases), unravel)
    y = centered.to_coordinates(found)
    np.testing.assert_allclose(centered.recover(y).z, z, rtol=1e-5, atol=1e-5)
    volume = centered.log_volume(found)
    jacobian = jax.jacobian(lambda y: centered.recover(y).z)(y)
    np.testing.assert_allclose(jnp.linalg.slogdet(jacobian)[1], volume, rtol=1e-4, atol=1e-5)
    energies = [one.potential_energy(unravel(x), {}, random.key(0)) for one, x in ((centered, y), (target, z))]
    np.testing.assert_allclose(energies[0], energies[1] - volume, rtol=1e-5)
    if share:
        assert abs(energies[0] - energies[1]) > 0.1  # without the volume
        values, scales = unravel(y), unravel(z)
        product = scales["a"] * (jnp.exp(scales["tau"] + scales["local"])) ** share
        np.testing.assert_allclose(values["a"], product, rtol=1e-4)
    else:
        np.testing.assert_allclose(y, z, rtol=1e-6)
