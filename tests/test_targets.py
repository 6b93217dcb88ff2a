"""Densities of the models that studies, tests and figures share, against SciPy's."""

from jax import random
import numpy as np
import pytest
from scipy import stats

from benchmarks.problems.targets import (
    bayesian_neural_network,
    exponential_mixture,
    gaussian,
    gaussian_mixture,
    logistic_regression,
)
from numpyro_repulsion.gradients import ModelTarget


def log_density(model, z, *args, **kwargs):
    target = ModelTarget(model, args, kwargs)
    return -target.potential_energy(z, target.all_rows, random.key(0))


MEAN, Z = np.array([1.0, -2.0, 0.5]), np.array([0.3, -1.0, 2.0])
COVARIANCE = np.array([[2.0, 0.3, 0.0], [0.3, 1.0, -0.4], [0.0, -0.4, 0.5]])
CENTERS = [(a, b) for a in (-2, 0, 2) for b in (-2, 0, 2)]
DENSITIES = [
    (gaussian, (MEAN, COVARIANCE), Z, stats.multivariate_normal(MEAN, COVARIANCE).logpdf(Z)),
    (gaussian, (MEAN,), Z, stats.norm.logpdf(Z, MEAN).sum()),
]
for z in (0.01, 0.7, 12.0):
    density = z * (np.exp(-1.5 * z) / 2 + np.exp(-0.5 * z) / 3)  # of log z
    DENSITIES.append((exponential_mixture, (), np.log(z), np.log(density)))
for z in ([0.1, -0.2], [2.0, 1.0], [-1.0, -1.0]):
    density = np.mean([stats.multivariate_normal(c, 0.1 * np.eye(2)).pdf(z) for c in CENTERS])
    DENSITIES.append((gaussian_mixture, (), np.array(z), np.log(density)))


def test_densities(x64):
    for model, args, z, expected in DENSITIES:
        assert log_density(model, {"z": z}, *args) == pytest.approx(expected, rel=1e-12)


def test_logistic_regression_density(x64):
    X, y = np.random.default_rng(0).normal(size=(7, 3)), np.array([0, 1, 1, 0, 1, 0, 0])
    beta = np.array([1.0, -0.5, 2.0])
    p = 1 / (1 + np.exp(-X @ beta))
    expected = stats.norm.logpdf(beta, 0, 2.0).sum() + np.log(np.where(y, p, 1 - p)).sum()
    for size in (None, 2):
        given = log_density(logistic_regression, {"beta": beta}, X, y, size, scale=2.0)
        assert given == pytest.approx(expected, rel=1e-12)


def test_bayesian_neural_network_density(x64):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(7, 3)), rng.normal(size=7)
    w = {name: rng.normal(size=shape) for name, shape in {"w1": (3, 4), "b1": 4, "w2": 4, "b2": ()}.items()}
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
