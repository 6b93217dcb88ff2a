"""Coordinates of hierarchical sites: which have them, what gradients tell, and that the posterior stays the same."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_repulsion.gradients import CenteredTarget, Centering, ModelTarget, Units, ravel_cloud
from numpyro_repulsion.gradients.location_scale import multiplied
from numpyro_repulsion.gradients.posterior import likelihood_gradients

KEY = random.key(0)


def draws(target, seed, number):
    return jax.jit(jax.vmap(lambda key: target.draw(key, init_to_uniform)))(random.split(random.key(seed), number))


def particle(target):
    """A flat particle, and the function that makes one of it."""
    sites = enumerate(target.prototype.items())
    z, unravel = ravel_cloud({name: random.normal(random.key(i), (1, *site.shape)) for i, (name, site) in sites})
    return z[0], unravel


def centered_by(target, share, unravel):
    return CenteredTarget(target, Centering.none(target, len(share), share.dtype)._replace(share=share), unravel)


def share_of(target, value):
    """The flat share of a value for sites that have one; a number, or "random"."""
    shares = {}
    for i, (name, site) in enumerate(target.prototype.items()):
        own = random.uniform(random.key(i), site.shape) if value == "random" else jnp.full(site.shape, value)
        shares[name] = own if name in target.location_scale else jnp.ones(site.shape)
    return ravel_cloud(jax.tree.map(lambda x: x[None], shares))[0][0]


def check_energy(target, centered, unravel, y, rows):
    """That U differs by the volume alone."""
    found = centered.recover(y)
    volume = centered.log_volume(found)
    energy = jax.jit(lambda y: centered.potential_energy(unravel(y), rows, KEY))(y)
    expected = jax.jit(lambda z: target.potential_energy(unravel(z), rows, KEY))(found.z)
    np.testing.assert_allclose(energy, expected - volume, rtol=1e-5)
    return volume


def check_change_of_variables(target, centered, unravel, found, rtol=1e-5):
    """That particles come back, that the volume is that of the Jacobian, and that U differs by it; return y."""
    y = centered.to_coordinates(found)
    np.testing.assert_allclose(centered.recover(y).z, found.z, rtol=rtol, atol=1e-5)
    volume = check_energy(target, centered, unravel, y, {})
    np.testing.assert_allclose(centered.log_volume(found), volume, rtol=1e-4, atol=1e-5)
    jacobian = jax.jit(jax.jacobian(lambda y: centered.recover(y).z))(y)
    np.testing.assert_allclose(jnp.linalg.slogdet(jacobian)[1], volume, rtol=1e-4, atol=1e-5)
    return y, volume


# --- Sites with a location, and a scale that depends on other sites. ---

GROUPS = jnp.linspace(-1.0, 2.0, 8)


def hierarchy(y):
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
    return ModelTarget(hierarchy, (GROUPS,))


def test_sites_with_a_scale_that_depends_on_others_have_it(target):
    assert list(target.location_scale) == ["nested", "t", "theta"]

    def flat(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu, numpyro.sample("sigma", dist.HalfNormal(1.0))), obs=y)

    def enumerated(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        theta = numpyro.sample("theta", dist.Normal(0.0, tau))
        with numpyro.plate("rows", 8):
            k = numpyro.sample("k", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(theta * k, 1.0), obs=y)

    assert ModelTarget(flat, (GROUPS,)).location_scale == ModelTarget(enumerated, (GROUPS,)).location_scale == {}


@pytest.mark.parametrize("value", [0.0, "random"])
def test_it_is_a_change_of_variables(target, value):
    z, unravel = particle(target)
    share = share_of(target, value)
    found = centered_by(target, jnp.ones_like(share), unravel).recover(z)
    y, volume = check_change_of_variables(target, centered_by(target, share, unravel), unravel, found)
    assert abs(volume) > 0.1
    values, y = unravel(found.z), unravel(y)
    if value == 0.0:  # An entry that is not centered is standardized.
        np.testing.assert_allclose(y["theta"], (values["theta"] - values["mu"]) / jnp.exp(values["tau"]), rtol=1e-4)
        assert (y["shifted"] == values["shifted"]).all() and (y["walk"] == values["walk"]).all()


def schools(y):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 8), numpyro.handlers.scope(prefix="inner"):
        theta = numpyro.sample("theta", dist.Normal(0.0, tau))
    with numpyro.plate("rows", 8, subsample_size=4) as i:
        numpyro.sample("y", dist.Normal(theta[i], 1.0), obs=y[i])


def by_sample_shape(y):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(numpyro.sample("theta", dist.Normal(0.0, tau), sample_shape=(8,)), 1.0), obs=y)


HANDLED = {
    "scope": lambda: numpyro.handlers.scope(schools, prefix="a"),
    "what is exposed": lambda: numpyro.handlers.block(schools, expose=["tau", "inner/theta", "groups", "rows", "y"]),
    "sample shape": lambda: by_sample_shape,
}


@pytest.mark.parametrize("handled", HANDLED.values(), ids=HANDLED)
def test_minibatches_are_those_of_the_model_under_handlers(handled):
    target = ModelTarget(handled(), (GROUPS,))
    (name,) = target.location_scale
    y, unravel = particle(target)
    centered = centered_by(target, share_of(target, 0.3), unravel)
    assert centered.plates == target.plates and centered.crossed_plates() == target.crossed_plates()
    for indices in (jnp.arange(4), jnp.array([6, 1, 7, 3]), jnp.arange(8)):
        rows = dict.fromkeys(target.plates, indices)
        check_energy(target, centered, unravel, y, rows)
    # Every effect matters.
    gradient = jax.jit(jax.grad(lambda z: centered.potential_energy(z, rows, KEY)))(unravel(y))
    assert (jnp.abs(gradient[name]) > 1e-3).all()


# --- Effects that a model multiplies by scales. ---

X = random.normal(random.key(1), (50, 5))
SUMS = X.sum(1)


def standard(name):
    return numpyro.sample(name, dist.Normal(0.0, 1.0).expand([5]).to_event(1))


def multiplies(x, y):
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


@pytest.fixture(scope="module")
def products():
    return ModelTarget(multiplies, (X, SUMS))


def powers(target):
    at = draws(target, 2, 12)
    return target.products.powers(at, likelihood_gradients(target, at, [target.products.sites])[0])


def test_gradients_tell_powers(products):
    assert set(products.products.pairs) == set(POWERS) and products.num_products == 6
    np.testing.assert_array_equal(powers(products), [POWERS[pair] for pair in products.products.pairs])


def test_a_scale_that_the_likelihood_also_uses_otherwise_has_none():
    def mixed(x, y):
        tau, z = numpyro.sample("tau", dist.HalfNormal(1.0)), standard("z")
        numpyro.sample("y", dist.Normal(x @ (tau * z), 1.0 + tau), obs=y)

    def twice(x, y):
        tau, z = numpyro.sample("tau", dist.HalfNormal(1.0)), standard("z")
        numpyro.sample("y", dist.Normal(x @ (tau * z) + z.sum(), 1.0), obs=y)

    for one in (mixed, twice):
        target = ModelTarget(one, (X, SUMS))
        assert target.products.pairs == [("z", "tau")]
        assert powers(target).tolist() == [0.0]


def test_models_without_products_have_no_pairs():
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

    for one in (network, weighted, centered, enumerated):
        assert ModelTarget(one, (X, SUMS)).num_products == 0, one.__name__


def test_products_within_loops_and_calls_are_read():
    def series(x, y):
        sigma, e = numpyro.sample("sigma", dist.HalfNormal(1.0)), standard("e")

        def step(level, e):
            level = 0.9 * level + jax.jit(jnp.multiply)(sigma, e)
            return level, level

        numpyro.sample("y", dist.Normal(jax.lax.scan(step, 0.0, e)[1], 1.0), obs=y[:5])

    target = ModelTarget(series, (X, SUMS))
    assert target.products.pairs == [("e", "sigma")]
    assert powers(target).tolist() == [1.0]

    def latent(x, y):
        def step(before, _):
            return before + numpyro.sample("step", dist.Normal(0.0, 1.0)), None

        end, _ = scan(step, 0.0, jnp.arange(3))
        numpyro.sample("y", dist.Normal(end * numpyro.sample("tau", dist.HalfNormal(1.0)), 1.0), obs=y)

    assert ModelTarget(latent, (X, SUMS)).latent  # such a model is not refused


def test_only_what_is_linear_is_an_effect():
    z = {name: jnp.ones(2) for name in ("e", "f", "s")}
    assert multiplied(lambda z: jnp.reshape(-z["e"], (1, 2)) * z["s"], z) == {("e", "s"), ("s", "e")}
    assert multiplied(lambda z: (z["e"] + z["f"]) / z["s"], z) == set()
    assert multiplied(lambda z: (z["e"] + 1.0) * jnp.exp(z["s"]), z) == set()
    assert multiplied(lambda z: (3.0 * z["e"]) @ jnp.exp(z["s"]), z) == {("e", "s")}
    assert multiplied(lambda z: z["e"] * jnp.exp(z["e"] * z["s"]), z) == {("e", "s"), ("s", "e")}


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_powers_are_a_change_of_variables(products, share):
    at = draws(products, 2, 12)
    z, unravel = ravel_cloud(at)
    effects = {effect for effect, _ in POWERS}
    parts = [jnp.full(x[0].size, share if name in effects else 1.0) for name, x in sorted(at.items())]
    plain = Centering.none(products, z.shape[1], z.dtype)
    np.testing.assert_array_equal(CenteredTarget(products, plain, unravel).recover(z[0]).z, z[0])
    centering = plain._replace(powers=jnp.array([POWERS[pair] for pair in products.products.pairs]))
    # Without any share, the coordinates of products are the effects of the model.
    without = centering._replace(share=jnp.where(jnp.concatenate(parts) == 1.0, 1.0, 0.0))
    found = CenteredTarget(products, without, unravel).recover(z[0])
    centered = CenteredTarget(products, centering._replace(share=jnp.concatenate(parts)), unravel)
    y, volume = check_change_of_variables(products, centered, unravel, found)
    if share:
        assert abs(volume) > 0.1
        values, model = unravel(y), unravel(z[0])
        product = model["a"] * (jnp.exp(model["tau"] + model["local"])) ** share
        np.testing.assert_allclose(values["a"], product, rtol=1e-4)
    else:
        np.testing.assert_allclose(y, z[0], rtol=1e-6)


# --- Effects whose mean another coefficient can take over. ---

ROWS = 60
GROUP, OTHER = jnp.arange(ROWS) % 3, (jnp.arange(ROWS) // 3) % 5
COVARIATES = random.normal(random.key(1), (ROWS, 2))
Y = random.normal(random.key(2), (ROWS,))


def levels(name, size, scale):
    return numpyro.sample(name, dist.Normal(0.0, scale).expand([size]).to_event(1))


def adds(y, prior=5.0, batch=None):
    """An intercept and a slope, each with effects of groups, written centered and non-centered."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, prior))
    beta = numpyro.sample("beta", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
    tau, sigma, speed = (numpyro.sample(name, dist.HalfNormal(1.0)) for name in ("tau", "sigma", "speed"))
    group, other, slope = levels("group", 3, tau), sigma * levels("other", 5, 1.0), levels("slope", 3, speed)
    alone = levels("alone", 3, tau)
    with numpyro.plate("rows", ROWS, subsample_size=batch) as i:
        x = COVARIATES[i]
        mean = intercept + x @ beta + group[GROUP[i]] + other[OTHER[i]]
        mean += slope[GROUP[i]] * x[:, 1] + alone[GROUP[i]] * x[:, 0] ** 2
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y[i])


def learned(target, smallest_sd=0.3, units=None):
    z, unravel = ravel_cloud(draws(target, 3, 20))
    plain = CenteredTarget(target, Centering.none(target, z.shape[1], z.dtype), unravel)
    return *jax.jit(lambda z: plain.structure_at(jax.vmap(plain.recover)(z), smallest_sd, units))(z), unravel


@pytest.fixture(scope="module")
def sums():
    target = ModelTarget(adds, (Y,))
    return target, *learned(target)


def names_of(target, centering, found, unravel):
    labels = unravel(jnp.arange(len(centering.share), dtype=float))
    names = {int(k): f"{name}[{j}]" for name, x in labels.items() for j, k in enumerate(np.ravel(x))}
    return dict(zip(target.translations.groups, [names.get(int(k)) for k in centering.bases], strict=True))


def test_gradients_tell_bases(sums):
    minibatches = ModelTarget(adds, (Y,), {"batch": 20})
    for case in (sums, (minibatches, *learned(minibatches))):
        expected = {"alone": None, "group": "intercept[0]", "other": "intercept[0]", "slope": "beta[1]"}
        assert names_of(*case) == expected


def test_a_scale_that_is_known_and_a_narrow_base_have_none(sums):
    assert (learned(sums[0], smallest_sd=10.0)[0].bases == -1).all()
    target = ModelTarget(adds, (Y, 0.01))
    found = names_of(target, *learned(target))
    assert found["group"] is found["other"] is None and found["slope"] == "beta[1]"


def test_units_of_an_arrow_have_none(sums):
    # In coordinates of their mean each of them would depend on all.
    target, centering, *_, unravel = sums
    places = unravel(jnp.arange(len(centering.share)))["group"]
    units = Units(len(centering.share), ((int(places[0]), (3,), 0),))
    found = names_of(target, *learned(target, units=units))
    assert found["group"] is None and found["other"] == "intercept[0]" and found["slope"] == "beta[1]"


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
def test_bases_are_a_change_of_variables(sums, value):
    target, centering, found, unravel = sums
    share = jnp.where(found.scale[0] == 1.0, 1.0, random.uniform(random.key(9), centering.share.shape))
    centering = centering._replace(share=share if value == "random" else jnp.where(share == 1.0, 1.0, value))
    found = jax.tree.map(lambda x: x[0], found)
    centered = CenteredTarget(target, centering, unravel)
    _, volume = check_change_of_variables(target, centered, unravel, found, rtol=1e-4)
    without = CenteredTarget(target, centering._replace(bases=jnp.full_like(centering.bases, -1)), unravel)
    assert abs(without.log_volume(found) - volume) > 0.1 or value == 0.0


def test_the_base_takes_the_means_and_the_likelihood_does_not_see_them(sums):
    target, centering, found, unravel = sums
    centered = CenteredTarget(target, centering, unravel)
    found = jax.tree.map(lambda x: x[0], found)
    y, x = unravel(centered.to_coordinates(found)), unravel(found.centered)
    means = x["group"].mean() + x["other"].mean()
    np.testing.assert_allclose(y["intercept"], x["intercept"] + means, rtol=1e-5)
    np.testing.assert_allclose(y["beta"], x["beta"] + jnp.array([0.0, x["slope"].mean()]), rtol=1e-5)

    def likelihood(y):
        z = unravel(centered.recover(ravel_cloud(jax.tree.map(lambda x: x[None], y))[0][0]).z)
        return target.sites(target.constrain(z))["y"]["fn"].log_prob(Y).sum()

    np.testing.assert_allclose(likelihood(y), likelihood(dict(y, group=y["group"] + 1.0)), rtol=1e-5)
    assert abs(likelihood(y) - likelihood(dict(y, intercept=y["intercept"] + 1.0))) > 1.0
