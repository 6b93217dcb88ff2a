"""Latent variables of rows: their integrals, the posterior of the other sites, their own draws, and what is refused."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np
import pytest
from results import run
from scipy.special import digamma, polygamma

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion import SGLD, diagnose, ensemble_mcse, predict, to_inference_data
from numpyro_repulsion.gradients import ModelTarget
from numpyro_repulsion.gradients.local import NUM_POINTS, START, draw_rows, find_modes, log_integrals
from numpyro_repulsion.predictions import row_latents

KEYS = random.split(random.key(0), 4)
NUM_ROWS, BATCH = 40, 8


def normal(u, scale):
    return dist.Normal(0.3, scale).log_prob(u)


@pytest.mark.parametrize("dimension", [1, 3])
def test_integrals_of_gaussian_rows_are_exact(dimension):
    with jax.enable_x64(True):
        root = random.normal(KEYS[0], (dimension, dimension))
        mean, covariance = jnp.arange(dimension) - 1.0, root @ root.T + jnp.eye(dimension)
        x, y = random.normal(KEYS[1], (4, 6, dimension)), 3.0 * random.normal(KEYS[2], (4, 6))

        def log_density(u, sd):
            likelihood = dist.Normal(jnp.einsum("bvk,bk->bv", x, u), sd).log_prob(y).sum(-1)
            return dist.MultivariateNormal(mean, covariance).log_prob(u) + likelihood

        def found(sd):
            fixed = jax.lax.stop_gradient(sd)
            start = jnp.full((4, dimension), START)
            return log_integrals(lambda u: log_density(u, sd), lambda u: log_density(u, fixed), start)

        def exact(sd):
            noise = sd**2 * jnp.eye(6)
            return jax.vmap(lambda x, y: dist.MultivariateNormal(x @ mean, x @ covariance @ x.T + noise).log_prob(y))(
                x, y
            )

        both = [jax.jit(lambda sd, f=f: (f(sd), jax.jacobian(f)(sd), jax.hessian(f)(sd)))(0.7) for f in (found, exact)]
        # The sum over one dimension ends at six sds, beyond which two derivatives leave 1e-6.
        np.testing.assert_allclose(*both, rtol=1e-5 if dimension == 1 else 1e-9)


def log_density_of_others(u, scale):
    """Of rows of counts, of Binomial outcomes, and of counts whose prior has a long tail on one side."""
    counts, trials, skewed = jnp.split(u[:, 0], [4, 9])
    parts = (
        normal(counts, scale) + dist.Poisson(jnp.exp(counts)).log_prob(jnp.array([0, 1, 50, 1000])),
        normal(trials, scale)
        + dist.Binomial(jnp.array([1, 1, 20, 20, 20]), logits=trials).log_prob(jnp.array([0, 1, 0, 10, 20])),
        # The logarithm of a gamma variable.
        dist.Gamma(0.2 * scale, 1.0).log_prob(jnp.exp(skewed)) + skewed
        + dist.Poisson(jnp.exp(skewed)).log_prob(jnp.array([0, 9])),
    )  # fmt: skip
    return jnp.concatenate(parts)


def test_integrals_of_other_rows_are_nearly_exact():
    def slopes(function):
        return np.asarray(jax.jit(jax.jacobian(function))(1.0))

    def exact(scale):
        grid = jnp.linspace(-150.0, 50.0, 100_001)
        return logsumexp(jax.vmap(lambda u: log_density_of_others(jnp.full((11, 1), u), scale))(grid), 0)

    with jax.enable_x64(True):
        known = slopes(exact)
        for num_points in (NUM_POINTS[1], 1):

            def found(scale, num_points=num_points):
                of, fixed = (partial(log_density_of_others, scale=x) for x in (scale, jax.lax.stop_gradient(scale)))
                return log_integrals(of, fixed, jnp.full((11, 1), START), {1: num_points})

            # Per row, so of a million rows the mean of a parameter is off by less than 0.1 of its sds.
            off = np.split(np.abs(slopes(found) - known), [4, 6, 9])
            assert [kind.max() < 1e-4 for kind in off] == 4 * [num_points > 1]


@pytest.mark.parametrize(
    ("likelihood", "y", "width"),
    [
        (lambda u: dist.Normal(u, 1e-3), [-200.0, 0.0, 5.0], [1e-3] * 3),
        (lambda u: dist.Poisson(jnp.exp(u)), [10, 10_000, 1_000_000], [0.3, 1e-2, 1e-3]),
    ],
)
def test_modes_are_found_thousands_of_widths_away(likelihood, y, width):
    with jax.enable_x64(True):
        y = jnp.array(y)

        def log_density(u):
            return dist.Normal(0, 20).log_prob(u[:, 0]) + likelihood(u[:, 0]).log_prob(y)

        mode = jax.jit(partial(find_modes, log_density))(jnp.full((len(y), 1), START))
        slope = jax.grad(lambda u: log_density(u).sum())(mode.position)
        np.testing.assert_allclose(mode.root[:, 0, 0], width, rtol=0.1)
        # The slope, in widths, is the distance from the mode.
        assert np.abs(slope * mode.root[:, 0]).max() < 0.05


def gamma_poisson(y):
    shape, rate = numpyro.sample("shape", dist.LogNormal(0, 1)), numpyro.sample("rate", dist.LogNormal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=BATCH) as i:
        mean = numpyro.sample("mean", dist.Gamma(shape, rate))
        numpyro.sample("y", dist.Poisson(mean), obs=y[i])


def negative_binomial(y):
    shape, rate = numpyro.sample("shape", dist.LogNormal(0, 1)), numpyro.sample("rate", dist.LogNormal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=BATCH) as i:
        numpyro.sample("y", dist.GammaPoisson(shape, rate), obs=y[i])


def visits(y):
    """Two latent sites for each row, of which the data are a plate of their own."""
    mean, scale = numpyro.sample("mean", dist.Normal(0, 2)), numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("rows", len(y), subsample_size=BATCH, dim=-2) as i:
        level = numpyro.sample("level", dist.Normal(mean, scale))
        slope = numpyro.sample("slope", dist.Normal(0, 0.5))
        with numpyro.plate("visits", 3, dim=-1):
            numpyro.sample("y", dist.Normal(level + slope * jnp.arange(3), 0.7), obs=y[i[:, 0] if i.ndim > 1 else i])


def visits_by_hand(y):
    mean, scale = numpyro.sample("mean", dist.Normal(0, 2)), numpyro.sample("scale", dist.HalfNormal(1))
    at = jnp.arange(3.0)
    covariance = scale**2 + 0.25 * at[:, None] * at + 0.49 * jnp.eye(3)
    with numpyro.plate("rows", len(y), subsample_size=BATCH) as i:
        numpyro.sample("y", dist.MultivariateNormal(jnp.full(3, mean), covariance), obs=y[i])


def imputed(x, y):
    mean, slope = numpyro.sample("mean", dist.Normal(0, 1)), numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=BATCH) as i:
        seen = ~jnp.isnan(x[i])
        z = numpyro.sample("x", dist.Normal(mean, 0.8), obs=jnp.where(seen, x[i], 0.0), obs_mask=seen)
        numpyro.sample("y", dist.Normal(slope * z, 0.5), obs=y[i])


def imputed_by_hand(x, y):
    mean, slope = numpyro.sample("mean", dist.Normal(0, 1)), numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=BATCH) as i:
        seen, z = ~jnp.isnan(x[i]), jnp.nan_to_num(x[i])
        with numpyro.handlers.mask(mask=seen):
            numpyro.sample("x", dist.Normal(mean, 0.8), obs=z)
        sd = jnp.where(seen, 0.5, jnp.sqrt(0.25 + 0.64 * slope**2))
        numpyro.sample("y", dist.Normal(slope * jnp.where(seen, z, mean), sd), obs=y[i])


COUNTS = random.poisson(KEYS[0], 3.0 * random.gamma(KEYS[1], 2.0, (NUM_ROWS,)))
SERIES = random.normal(KEYS[0], (NUM_ROWS, 3)) + random.normal(KEYS[1], (NUM_ROWS, 1))
HOLES = np.where(np.arange(NUM_ROWS) % 3 == 0, np.nan, np.asarray(random.normal(KEYS[0], (NUM_ROWS,))))


@pytest.mark.parametrize(
    ("model", "by_hand", "data", "latent"),
    [
        (gamma_poisson, negative_binomial, (COUNTS,), ["mean"]),
        (visits, visits_by_hand, (SERIES,), ["level", "slope"]),
        (imputed, imputed_by_hand, (HOLES, random.normal(KEYS[1], (NUM_ROWS,))), ["x_unobserved"]),
    ],
)
def test_energies_are_those_of_the_marginal_model(model, by_hand, data, latent):
    target, other = ModelTarget(model, data), ModelTarget(by_hand, data)
    assert target.integrated == latent and target.latent == other.latent and target.plates == other.plates
    # The two densities may differ by a constant for each row.
    rows = {"rows": jnp.array([0, 3, 4, 5, 7, 12, 30, 39])}
    of = [
        jax.jit(jax.value_and_grad(lambda z, at=at: at.potential_energy(z, rows, random.key(0))))
        for at in (target, other)
    ]
    points = [{name: jnp.asarray(x) for name in target.latent} for x in (-0.5, 0.3, 0.8)]
    found = [[at(z) for z in points] for at in of]
    gradients = [[[float(g[name]) for name in target.latent] for _, g in each] for each in found]
    np.testing.assert_allclose(*gradients, rtol=2e-3, atol=1e-2)
    energies = np.array([[float(value) for value, _ in each] for each in found])
    np.testing.assert_allclose(*np.diff(energies, axis=1), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("dimension", [1, 2])
def test_rows_are_drawn_from_their_distribution(dimension):
    y, number = jnp.repeat(jnp.array([0, 4]), 2000), 2000

    def log_density(u):
        found = dist.Gamma(2.0, 1.5).log_prob(jnp.exp(u[:, 0])) + u[:, 0] + dist.Poisson(jnp.exp(u[:, 0])).log_prob(y)
        return found - (u[:, 1:] ** 2).sum(-1) / 2

    start = jnp.full((len(y), dimension), START)
    draw = jax.jit(lambda key: draw_rows(key, log_density, start))
    draws = np.exp(np.asarray(draw(random.key(1)), float))[:, :1]
    for found, shape in zip(draws.reshape(2, number), (2.0, 6.0), strict=True):
        mean, sd = shape / 2.5, shape**0.5 / 2.5
        error = 4.5 * sd / number**0.5
        assert abs(found.mean() - mean) < error
        # The fourth moment of a gamma distribution gives the error of a variance.
        assert abs(found.var() - sd**2) < error * sd * (2.0 + 6.0 / shape) ** 0.5
        assert abs(found.mean() - 2.0 / 1.5) > error  # the prior's


def test_draws_of_skewed_rows_reach_the_long_tail():
    number = 4000

    def log_density(u):
        return dist.Gamma(0.2, 2.0).log_prob(jnp.exp(u[:, 0])) + u[:, 0]

    draw = jax.jit(lambda key: draw_rows(key, log_density, jnp.full((number, 1), START)))
    u = np.asarray(draw(random.key(1)), float)
    mean, sd = digamma(0.2) - np.log(2.0), polygamma(1, 0.2) ** 0.5
    assert abs(u.mean() - mean) < 4.5 * sd / number**0.5
    # The logarithm has an excess kurtosis near that of an exponential variable, 6.
    assert abs(u.std() / sd - 1.0) < 4.5 * (2.0 / number) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("num_points", [NUM_POINTS[1], 1])
def test_a_poisson_lognormal_of_many_rows(num_points, monkeypatch):
    monkeypatch.setitem(NUM_POINTS, 1, num_points)
    size, truth = 50_000, {"mean": 0.5, "scale": 0.8}
    y = random.poisson(KEYS[0], jnp.exp(truth["mean"] + truth["scale"] * random.normal(KEYS[1], (size,))))

    def model(y):
        mean, scale = numpyro.sample("mean", dist.Normal(0, 1)), numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y), subsample_size=500) as i:
            u = numpyro.sample("u", dist.Normal(mean, scale))
            numpyro.sample("y", dist.Poisson(jnp.exp(u)), obs=y[i])

    mcmc = run(SGLD(model), y, key=2, num_warmup=300, num_samples=300, num_chains=20)
    # Quadrature over all values of y, and Laplace's approximation to the posterior, which so many rows make exact.
    with jax.enable_x64(True):
        values, counts = np.unique(np.asarray(y), return_counts=True)
        grid = jnp.linspace(-8.0, 8.0, 8001)

        def energy(z):
            prior = dist.Normal(z[0], jnp.exp(z[1])).log_prob(grid)
            terms = logsumexp(prior + dist.Poisson(jnp.exp(grid)).log_prob(jnp.asarray(values)[:, None]), -1)
            own = dist.Normal(0, 1).log_prob(z[0]) + dist.HalfNormal(1).log_prob(jnp.exp(z[1])) + z[1]
            return -(terms * counts).sum() - own

        z = jnp.array([0.5, np.log(0.8)])
        for _ in range(10):
            z = z - jnp.linalg.solve(jax.hessian(energy)(z), jax.grad(energy)(z))
        sds = np.sqrt(np.diag(np.linalg.inv(jax.hessian(energy)(z))))
    samples = mcmc.get_samples(group_by_chain=True)
    # With one point the scale may become 0.
    log_scale = np.log(np.maximum(np.asarray(samples["scale"], float), 1e-30))
    draws = np.stack([np.asarray(samples["mean"], float), log_scale], -1)
    off = np.abs(draws.mean((0, 1)) - np.asarray(z)) / sds
    error = 4.5 * np.asarray(ensemble_mcse(draws)) / sds
    assert (off < error + 0.05).all() == (num_points > 1)
    if num_points > 1:
        assert (np.abs(draws.std((0, 1)) / sds - 1.0) < 0.03).all()
        assert not diagnose(mcmc)


def test_a_row_with_two_modes_is_named():
    y = (1.0 + 1.5 * random.normal(KEYS[0], (400,))) ** 2

    def model(y, is_square):
        mean = numpyro.sample("mean", dist.Normal(0, 3))
        with numpyro.plate("rows", len(y), subsample_size=20) as i:
            u = numpyro.sample("u", dist.Normal(mean, 1.5))
            numpyro.sample("y", dist.Normal(u**2 if is_square else u, 0.5), obs=y[i])

    for is_square in (True, False):
        mcmc = run(SGLD(model, step_size=0.001), y, is_square, num_samples=5, num_chains=4)
        assert ("row_integrals" in diagnose(mcmc)) == is_square


def test_draws_of_rows_and_what_needs_them(pretended):
    mcmc = pretended(gamma_poisson, COUNTS, num_samples=20)
    assert set(mcmc.get_samples()) == {"shape", "rate"}
    found = row_latents(mcmc, [0, 5, 5], num_draws=60)
    assert found["mean"].shape == (60, 3) and (found["mean"] > 0).all()
    assert row_latents(mcmc, num_draws=10)["mean"].shape == (10, NUM_ROWS)
    for rows in ([NUM_ROWS], [-1], [0.5], []):
        with pytest.raises(ValueError, match="integers from 0 to 39, rows of the plate 'rows'"):
            row_latents(mcmc, rows)
    with pytest.raises(ValueError, match="no latent sites inside of a subsampled plate"):
        row_latents(pretended(negative_binomial, COUNTS))


def test_replicates_of_rows_have_their_distribution_and_new_rows_that_of_the_population():
    start = {name: jnp.full(20, jnp.log(x)) for name, x in (("shape", 2.0), ("rate", 0.5))}
    mcmc = run(SGLD(gamma_poisson, step_size=1e-9), COUNTS, num_samples=50, num_chains=20, init_params=start)
    data = to_inference_data(mcmc, log_likelihood=["rows_integrated"], posterior_predictive=random.key(1))
    assert data["log_likelihood"]["rows_integrated"].dims == ("chain", "draw", "rows")
    np.testing.assert_array_equal(data["observed_data"]["y"].values, COUNTS)
    found = data["posterior_predictive"]["y"]
    assert found.dims == ("chain", "draw", "rows")
    # Gamma(2 + y, 0.5 + 1) given y, and Gamma(2, 0.5) without.
    y = np.asarray(COUNTS)
    new = predict(mcmc, COUNTS)
    assert new.log_likelihood is None and (new.observed == y).all()
    for draws, shape, rate in ((found.values.reshape(-1, NUM_ROWS), 2.0 + y, 1.5), (new.replicates, 2.0, 0.5)):
        mean, sd = shape / rate, np.sqrt(shape / rate + shape / rate**2)
        assert (np.abs(draws.mean(0) - mean) < 4.5 * sd / len(draws) ** 0.5).all()
    prior = to_inference_data(mcmc, prior=random.key(2))
    assert prior["prior"]["mean"].dims == prior["prior_predictive"]["y"].dims == ("chain", "draw", "rows")


def rows(mean):
    """A model with a latent variable of each row, and perhaps other sites in the mean of its datum."""

    def model(y):
        theta = numpyro.sample("theta", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y), subsample_size=BATCH) as i:
            u = numpyro.sample("u", dist.Normal(theta, 1))
            numpyro.sample("y", dist.Normal(mean(u), 1), obs=y[i])

    return model


def used_outside(y):
    theta = numpyro.sample("theta", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=BATCH):
        u = numpyro.sample("u", dist.Normal(theta, 1))
    numpyro.sample("total", dist.Normal(u.sum(), 1), obs=0.0)


def crossed(y):
    theta = numpyro.sample("theta", dist.Normal(0, 1))
    with numpyro.plate("columns", 6, subsample_size=2, dim=-1), numpyro.plate("rows", NUM_ROWS, subsample_size=BATCH):
        numpyro.sample("u", dist.Normal(theta, 1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            rows(lambda u: u + numpyro.sample("v", dist.Normal(0, 1).expand([4]).to_event(1)).sum(-1)),
            r"\['u', 'v'\] inside of the subsampled plate 'rows' have 5 latent variables for each row.*1 to 3",
        ),
        (rows(lambda u: u + numpyro.sample("c", dist.Bernoulli(0.5))), "discrete latent site 'c'.*beside continuous"),
        (rows(lambda u: u + numpyro.sample("d", dist.Delta(0.5))), "'d' has a delta distribution"),
        (used_outside, r"'total' depends on the latent sites \['u'\].*Put it into the plate"),
        (crossed, "'u' lies inside of the subsampled plates '(rows|columns)' and '(rows|columns)'"),
        (rows(lambda u: u - u.mean()), "the density of a row depends on the other rows"),
    ],
)
def test_what_cannot_be_integrated_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        ModelTarget(model, (SERIES[:, 0],))


@pytest.mark.parametrize("is_random", [True, False])
def test_a_random_likelihood_stays_random(is_random):
    model = rows(lambda u: u + random.normal(numpyro.prng_key()) if is_random else u)
    target = ModelTarget(model, (SERIES[:, 0],))
    assert target.integrated == ["u"] and target.is_random == is_random
    energies = [target.potential_energy({"theta": 0.3}, target.first_rows, random.key(seed)) for seed in (0, 0, 1)]
    assert energies[0] == energies[1] and (energies[0] != energies[2]) == is_random


def test_modes_of_skewed_rows_are_found():
    y = jnp.array([0, 0, 1000, 5])
    mean = jnp.array([-30.0, 10.0, -3.0, 3.0])

    def log_density(u):
        return dist.Normal(mean, 2.0).log_prob(u[:, 0]) + dist.Poisson(jnp.exp(u[:, 0])).log_prob(y)

    mode = jax.jit(partial(find_modes, log_density))(jnp.full((4, 1), START))
    slope = jax.grad(lambda u: log_density(u).sum())(mode.position)
    assert (np.abs(slope * mode.root[:, 0]) < 0.05).all()
