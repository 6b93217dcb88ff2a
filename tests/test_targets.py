"""The answers that the models claim to have."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

import numpyro
import numpyro.distributions as dist

from numpyro_repulsion.gradients import ModelTarget
from numpyro_repulsion.targets import (
    bayesian_neural_network,
    draw,
    exponential_mixture,
    gaussian,
    gaussian_mixture,
    logistic_regression,
    moments,
    relu_network,
)

#: Beyond so many standard errors a deviation is none of chance: 6 in 10 million for one normal number.
SIGMAS = 5.0


def log_density(model, z, *args, **kwargs):
    target = ModelTarget(model, args, kwargs)
    return -target.potential_energy(z, target.all_rows, random.key(0))


def assert_mean_is(expected, draws):
    error = jnp.std(draws, 0) / len(draws) ** 0.5
    assert jnp.all(jnp.abs(draws.mean(0) - expected) < SIGMAS * error)


def test_gaussian_density(x64):
    mean, covariance = np.array([1.0, -2.0, 0.5]), np.array([[2.0, 0.3, 0.0], [0.3, 1.0, -0.4], [0.0, -0.4, 0.5]])
    z = np.array([0.3, -1.0, 2.0])
    expected = stats.multivariate_normal(mean, covariance).logpdf(z)
    assert log_density(gaussian, {"z": z}, mean, covariance) == pytest.approx(expected, rel=1e-12)
    assert log_density(gaussian, {"z": z}, mean) == pytest.approx(stats.norm.logpdf(z, mean).sum(), rel=1e-12)


def test_gaussian_moments():
    covariance = jnp.array([[2.0, 0.5], [0.5, 1.0]])
    mean, variance = moments(gaussian, (3, 4), covariance)["z"]
    np.testing.assert_allclose(mean, [3, 4])
    np.testing.assert_allclose(variance, [2, 1], rtol=1e-6)
    draws = draw(random.key(0), gaussian, 20_000, (3, 4), covariance)["z"] - mean
    assert_mean_is(covariance, draws[:, :, None] * draws[:, None, :])


def exponential_mixture_pdf(z):
    return 1 / 3 * 1.5 * np.exp(-1.5 * z) + 2 / 3 * 0.5 * np.exp(-0.5 * z)


def test_exponential_mixture_density_in_log_z(x64):
    for z in (0.01, 0.7, 12.0):
        expected = np.log(exponential_mixture_pdf(z) * z)
        assert log_density(exponential_mixture, {"z": np.log(z)}) == pytest.approx(expected, rel=1e-12)


def test_exponential_mixture_moments(x64):
    mean, variance = map(float, moments(exponential_mixture)["z"])
    assert mean == pytest.approx(14 / 9, rel=1e-12)
    assert variance + mean**2 == pytest.approx(152 / 27, rel=1e-12)
    for power, expected in ((0, 1.0), (1, 14 / 9), (2, 152 / 27)):
        integral, _ = integrate.quad(lambda z, power=power: z**power * exponential_mixture_pdf(z), 0, np.inf)
        assert integral == pytest.approx(expected, rel=1e-7)


def test_exponential_mixture_draws():
    draws = np.asarray(draw(random.key(0), exponential_mixture, 20_000)["z"])
    assert (draws > 0).all()

    def cdf(z):
        return 1 - np.exp(-1.5 * z) / 3 - 2 / 3 * np.exp(-0.5 * z)

    assert stats.kstest(draws, cdf).pvalue > 6e-7


def test_gaussian_mixture_density(x64):
    for z in ([0.1, -0.2], [2.0, 1.0], [-1.0, -1.0]):
        centers = [(a, b) for a in (-2, 0, 2) for b in (-2, 0, 2)]
        expected = np.log(np.mean([stats.multivariate_normal(c, 0.1 * np.eye(2)).pdf(z) for c in centers]))
        assert log_density(gaussian_mixture, {"z": np.array(z)}) == pytest.approx(expected, rel=1e-12)


def test_gaussian_mixture_moments():
    mean, variance = moments(gaussian_mixture)["z"]
    np.testing.assert_allclose(mean, 0.0, atol=1e-6)
    np.testing.assert_allclose(variance, 8 / 3 + 0.1, rtol=1e-6)
    draws = draw(random.key(0), gaussian_mixture, 20_000)["z"]
    assert_mean_is(variance, draws**2)
    nearest = 2 * jnp.clip(jnp.round(draws / 2), -1, 1)
    assert_mean_is(jnp.full(9, 1 / 9), ((nearest / 2 + 1) @ jnp.array([3.0, 1.0]))[:, None] == jnp.arange(9))
    assert_mean_is(jnp.full(2, 0.1), (draws - nearest) ** 2)


def test_moments_refuses_dependent_sites():
    with pytest.raises(ValueError, match="no site depends on another"):
        moments(logistic_regression, jnp.ones((3, 2)))


def test_logistic_regression_density(x64):
    X, y, beta = (
        np.random.default_rng(0).normal(size=(7, 3)),
        np.array([0, 1, 1, 0, 1, 0, 0]),
        np.array([1.0, -0.5, 2.0]),
    )
    p = 1 / (1 + np.exp(-X @ beta))
    expected = stats.norm.logpdf(beta, 0, 2.0).sum() + np.log(np.where(y, p, 1 - p)).sum()
    for size in (None, 2):
        given = log_density(logistic_regression, {"beta": beta}, X, y, size, scale=2.0)
        assert given == pytest.approx(expected, rel=1e-12)


def test_bayesian_neural_network_density(x64):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(7, 3)), rng.normal(size=7)
    w = {
        "w1": rng.normal(size=(3, 4)),
        "b1": rng.normal(size=4),
        "w2": rng.normal(size=4),
        "b2": np.array(rng.normal()),
    }
    precision, noise = 2.0, 0.7
    f = [sum(max(x @ w["w1"][:, k] + w["b1"][k], 0.0) * w["w2"][k] for k in range(4)) + w["b2"] for x in X]
    expected = stats.norm.logpdf(y, f, noise**-0.5).sum()
    expected += sum(stats.norm.logpdf(value, 0.0, precision**-0.5).sum() for value in w.values())
    # The Jacobian of exp is the precision itself.
    expected += sum(stats.gamma.logpdf(value, 1.0, scale=10.0) + np.log(value) for value in (precision, noise))
    z = w | {"weight_precision": np.log(precision), "noise_precision": np.log(noise)}
    for size in (None, 2):
        given = log_density(bayesian_neural_network, z, X, y, size, hidden=4)
        assert given == pytest.approx(expected, rel=1e-12)


def test_network_has_50_units_and_takes_many_draws():
    X = random.normal(random.key(0), (6, 3))
    assert ModelTarget(bayesian_neural_network, (X, X[:, 0])).prototype["w1"].shape == (3, 50)
    draws = draw(random.key(1), bayesian_neural_network, 4, X, hidden=5)
    one_by_one = [relu_network({name: value[i] for name, value in draws.items()}, X) for i in range(4)]
    np.testing.assert_allclose(relu_network(draws, X), jnp.stack(one_by_one), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", [logistic_regression, bayesian_neural_network])
def test_minibatches_are_those_of_one_plate(model):
    X, y = jnp.ones((7, 3)), jnp.zeros(7)
    assert ModelTarget(model, (X, y)).plates == {}
    assert ModelTarget(model, (X, y, 2)).plates == {"rows": (7, 2)}


@pytest.mark.parametrize(
    ("model", "sites", "wrong"),
    [
        (logistic_regression, ["beta"], lambda joint, X: 0.0 * joint["y"]),
        # Those sites whose score has a finite variance: E[1 / weight_precision] is infinite.
        (partial(bayesian_neural_network, hidden=5), ["weight_precision", "noise_precision", "b2"], relu_network),
    ],
)
def test_drawn_parameters_are_posterior_draws_given_drawn_data(model, sites, wrong):
    # Then the score ∇U has mean zero over joint draws of parameters and data.
    X = random.normal(random.key(0), (8, 3))
    joint = draw(random.key(1), model, 20_000, X)

    @jax.jit
    @jax.vmap
    def score(parameters, y):
        z = {name: jnp.log(value) if "precision" in name else value for name, value in parameters.items()}
        del z["y"]
        return jax.grad(ModelTarget(model, (X, y)).potential_energy)(z, {}, random.key(0))

    right, control = score(joint, joint["y"]), score(joint, wrong(joint, X))
    for site in sites:
        assert_mean_is(0.0, right[site])
    with pytest.raises(AssertionError):
        for site in sites:
            assert_mean_is(0.0, control[site])


def test_draw_leaves_observations_and_plates_out():
    def model():
        with numpyro.plate("i", 3):
            x = numpyro.sample("x", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(x, 1), obs=jnp.zeros(3))

    assert {name: value.shape for name, value in draw(random.key(0), model, 5).items()} == {"x": (5, 3)}
