"""What the last part of warmup sees of funnels, heavy tails, several basins and slow directions."""

from functools import cache
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
from models import quadratic, vectorized
import numpy as np
import pytest

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD
from numpyro_repulsion.warmup import Preconditioner
from numpyro_repulsion.warmup.symptoms import SYMPTOMS, Symptoms

PARTICLES, ITERATIONS, WINDOW = 20, 200, 50


@jax.jit
def watched(symptoms, draws, gradients, change):
    """The symptoms after the iterations of a window."""

    def iteration(symptoms, one):
        return symptoms.add(*one, change), None

    return lax.scan(iteration, symptoms, (draws, gradients))[0]


@cache
def gradient_of(energy):
    return jax.jit(jax.vmap(jax.vmap(jax.grad(energy))))


def seen(energy, draws, change=None, noise=0.0):
    """The symptoms after iterations with these draws, ``(iterations, particles, d)``, and noise in gradients."""
    change = change or Preconditioner(jnp.ones(draws.shape[-1]))
    draws = jnp.asarray(draws, jnp.float32)
    gradients = gradient_of(energy)(change.to_positions(draws))
    gradients = change.whiten_gradient(gradients) + noise * random.normal(random.key(0), draws.shape)
    symptoms = jax.device_get(Symptoms.empty(draws.shape[1], draws.shape[2], draws.dtype))
    for start in range(0, len(draws), WINDOW):
        window = slice(start, start + WINDOW)
        symptoms = jax.device_get(watched(symptoms, draws[window], gradients[window], change)).next_window()
    return symptoms


def normal(seed, dimension):
    return np.random.default_rng(seed).standard_normal((ITERATIONS, PARTICLES, dimension))


def funnel_energy(z):
    return z[0] ** 2 / 18 + jnp.sum(z[1:] ** 2) / 2 * jnp.exp(-z[0]) + (len(z) - 1) * z[0] / 2


def funnel_draws(dimension):
    """Particles reach a part of it only."""
    v = 1.5 * normal(0, 1)
    return np.concatenate((v, normal(100, dimension - 1) * np.exp(v / 2)), -1)


@pytest.mark.parametrize("dimension", [3, 100, 500])
def test_a_funnel_is_seen_in_any_dimension(dimension):
    found = seen(funnel_energy, funnel_draws(dimension))
    assert found.dependence > SYMPTOMS.dependence and found.has_funnel


def test_basins_of_different_widths_are_not_a_funnel():
    # Gradients depend on where a particle is, but not on where it goes.
    side = np.where(np.arange(PARTICLES) < 8, -20.0, 20.0)[:, None]
    width = np.where(side > 0, 1.0, 0.02)
    z = np.concatenate((side + normal(0, 1), width * normal(100, 9)), -1)

    def energy(z):
        widths = jnp.where(z[0] > 0, 1.0, 0.02)
        return (jnp.abs(z[0]) - 20.0) ** 2 / 2 + jnp.sum((z[1:] / widths) ** 2) / 2

    found = seen(energy, z)
    assert found.widest.has_basins and found.dependence > SYMPTOMS.dependence and not found.has_funnel


def test_a_funnel_is_seen_through_dense_scales():
    z = funnel_draws(10)
    root = jnp.asarray(np.linalg.cholesky(np.cov(z.reshape(-1, 10).T) + 0.1), jnp.float32)
    change = Preconditioner(root, jnp.zeros(10))
    found = seen(funnel_energy, change.whiten(jnp.asarray(z, jnp.float32)), change)
    assert found.dependence > SYMPTOMS.dependence


@pytest.mark.parametrize("dimension", [1, 10, 500])
def test_a_normal_has_no_symptoms(dimension):
    found = seen(quadratic, normal(0, dimension))
    assert (
        found.dependence < SYMPTOMS.dependence / 2
        and found.tail_gradient.min() > 2 * SYMPTOMS.tail_gradient
        and not found.has_heavy_tails
    )
    assert not found.widest.has_basins and abs(found.widest.explored - 1.0) < 0.5


def test_a_small_group_in_a_large_model_may_be_a_funnel():
    # Eight of its coordinates fill a block wherever blocks begin.
    draws = np.concatenate((funnel_draws(9), normal(200, 400)), -1)

    def energy(z):
        return funnel_energy(z[:9]) + jnp.sum(z[9:] ** 2) / 2

    assert seen(energy, draws).dependence > SYMPTOMS.dependence


@pytest.mark.parametrize("location", [0.0, 300.0])
def test_heavy_tails_are_told_from_light_ones(location):
    rng = np.random.default_rng(0)
    shape = (ITERATIONS, PARTICLES, 3)

    def are_heavy(degrees):
        def energy(z):
            return (degrees + 1) / 2 * jnp.log1p((z - location) ** 2 / degrees).sum()

        return seen(energy, location + np.clip(rng.standard_t(degrees, shape), -99, 99)).has_heavy_tails

    assert are_heavy(1.0) and not are_heavy(3.0)
    cauchy = seen(lambda z: jnp.log1p((z - location) ** 2).sum(), location + normal(0, 3))
    assert cauchy.dependence < SYMPTOMS.dependence
    laplace = seen(lambda z: jnp.abs(z - location).sum(), location + rng.laplace(size=shape))
    assert not laplace.has_heavy_tails
    # A few particles in a mode far away have fourth moments as large, and a gradient as large as elsewhere.
    side = np.where(np.arange(PARTICLES) < 1, 99.0, 0.0)[:, None]

    def energy(z):
        return -jax.nn.logsumexp(-((z[..., None] - location - jnp.array([0.0, 99.0])) ** 2) / 2, axis=-1).sum()

    modes = seen(energy, location + side + normal(0, 3))
    assert modes.kurtosis.max() > 8.0 and not modes.has_heavy_tails


@pytest.mark.parametrize("location", [0.0, 1e4])
def test_what_is_seen_does_not_depend_on_where_the_posterior_lies(location):
    found = seen(lambda z: jnp.sum((z - location) ** 2) / 2, location + normal(0, 10))
    assert abs(found.widest.explored - 1.0) < 0.5 and not found.widest.has_basins
    assert np.all(abs(found.kurtosis - 3.0) < 0.5) and np.all(abs(found.tail_gradient - 3.0) < 0.5)


def test_the_widest_direction_is_found_and_its_basins():
    # Two basins along a direction that is no coordinate's, in 50 dimensions.
    direction = np.random.default_rng(0).standard_normal(50)
    direction = jnp.asarray(direction / np.linalg.norm(direction), jnp.float32)
    side = np.where(np.arange(PARTICLES) < 8, -4.0, 4.0)[:, None]
    z = normal(10, 50) + side * np.asarray(direction)

    def energy(z):
        along = z @ direction
        rest = jnp.sum(z**2) - along**2
        return rest / 2 - jax.nn.logsumexp(-((along - jnp.array([-4.0, 4.0])) ** 2) / 2)

    found = seen(energy, z)
    assert abs(found.direction @ direction) > 0.9
    assert found.widest.has_basins
    # Particles that change sides are in one basin.
    mixed = np.random.default_rng(0).permuted(z, axis=1)
    assert not seen(energy, mixed).widest.has_basins and not seen(energy, mixed).widest.may_have_basins
    # Noise hides that each has explored its basin, but nothing pulls them together.
    noisy = seen(energy, z, noise=60.0).widest
    assert noisy.may_have_basins and not noisy.has_basins


def test_slow_particles_are_not_in_several_basins():
    # A direction a hundred times as wide as the others, in which particles have hardly moved.
    rng = np.random.default_rng(0)
    place = 10 * rng.standard_normal(PARTICLES) + 0.1 * rng.standard_normal((ITERATIONS, PARTICLES)).cumsum(0)
    z = normal(0, 20)
    z[..., 0] = place
    found = seen(lambda z: (z[0] / 10) ** 2 / 2 + jnp.sum(z[1:] ** 2) / 2, z)
    assert found.widest.variance > 20.0 and not found.widest.has_basins
    # They are pulled together.
    assert not found.widest.may_have_basins


def test_particles_that_do_not_move_have_no_symptoms_and_no_nan():
    found = seen(quadratic, np.ones((ITERATIONS, PARTICLES, 3)))
    assert jax.tree.all(jax.tree.map(lambda x: np.isfinite(x).all(), found))
    with np.errstate(all="ignore"):  # as at the end of warmup
        assert not found.widest.has_basins and found.dependence == 0.0


# Whole warmups


def warmed_up(model, *args, seeds, **kwargs):
    """What warmup finds wrong, for some seeds, by one compiled program."""
    mcmc = vectorized(SGLD(model, **kwargs), 1000, 1, 20)
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mcmc.run(random.key(seed), *args)
        yield " ".join(map(str, mcmc.sampler.findings(mcmc.last_state)))


def funnel(dimension):
    v = numpyro.sample("v", dist.Normal(0, 3))
    numpyro.sample("x", dist.Normal(0, jnp.exp(v / 2)).expand([dimension - 1]).to_event(1))


@cache
def found_in_funnels(dimension):
    return list(warmed_up(funnel, dimension, seeds=range(20), reparam=None))


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [10, 100, 500])
def test_centered_funnels_are_flagged(dimension):
    found = found_in_funnels(dimension)
    assert all("Curvature varies strongly" in words and "Reparameterize" in words for words in found)


#: One run of twenty has a dependence of 0.47, as another posterior has that `SGHMC` samples well.
MISSED = pytest.param(500, marks=pytest.mark.xfail(reason="one run of twenty is named varying_curvature"))


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [10, 100, MISSED])
def test_centered_funnels_are_named(dimension):
    assert not [words for words in found_in_funnels(dimension) if "as in a funnel" not in words]


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [10, 100, 500])
def test_funnels_that_warmup_straightens_are_not_flagged(dimension):
    assert not any("funnel" in words for words in warmed_up(funnel, dimension, seeds=range(5)))


@pytest.mark.slow
def test_heavy_tails_are_flagged():
    def model():
        numpyro.sample("z", dist.Cauchy(0, 1).expand([3]).to_event(1))

    assert all("heavy tails" in words for words in warmed_up(model, seeds=range(20)))


def autoregression(dimension, correlation=0.98):
    index = np.arange(dimension)
    covariance = correlation ** np.abs(index[:, None] - index)
    precision = jnp.asarray(np.linalg.inv(covariance))
    numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(dimension), precision_matrix=precision))


@pytest.mark.slow
def test_slow_directions_are_named_and_dense_scales_have_none():
    for words in warmed_up(autoregression, 200, seeds=range(5), preconditioner="diagonal"):
        assert 'preconditioner="dense"' in words
    assert all(words == "" for words in warmed_up(autoregression, 200, seeds=range(5)))


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ beta).to_event(1), obs=y)


def regression(dimension, rows):
    rng = np.random.default_rng(dimension)
    common, own = rng.standard_normal((rows, 5)), rng.standard_normal((rows, dimension))
    x = common @ rng.standard_normal((5, dimension)) + 0.3 * own
    x /= x.std(0)
    probability = 1 / (1 + np.exp(-x @ (0.3 * rng.standard_normal(dimension))))
    return jnp.asarray(x), jnp.asarray(rng.random(rows) < probability, int)


def groups(y):
    mean, scale = numpyro.sample("mean", dist.Normal(0, 2)), numpyro.sample("scale", dist.HalfNormal(1))
    noise = numpyro.sample("noise", dist.HalfNormal(2))
    offset = numpyro.sample("offset", dist.Normal(0, 1).expand([y.shape[0]]).to_event(1))
    numpyro.sample("y", dist.Normal(mean + scale * offset[:, None], noise).to_event(2), obs=y)


def walk(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    steps = numpyro.sample("steps", dist.Normal(0, 1).expand([len(y)]).to_event(1))
    rate = jnp.exp(1 + scale * jnp.cumsum(steps) / len(y) ** 0.5)
    numpyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)


def simplex(counts):
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(len(counts))))
    numpyro.sample("y", dist.Multinomial(int(np.sum(counts)), probs=p), obs=counts)


rng = np.random.default_rng(1)
WELL_BEHAVED = {
    "logistic regression of 100": (logistic, *regression(100, 2000)),
    "autoregression of 200": (autoregression, 200),
    "400 groups": (groups, jnp.asarray(rng.standard_normal((400, 1)) + rng.standard_normal((400, 10)))),
    "Poisson walk": (walk, jnp.asarray(rng.poisson(np.exp(1 + np.sin(np.linspace(0, 6, 200)))))),
    "simplex": (simplex, rng.integers(5, 50, 150)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WELL_BEHAVED)
def test_well_behaved_posteriors_are_not_flagged(name):
    assert list(warmed_up(*WELL_BEHAVED[name], seeds=range(3))) == [""] * 3
