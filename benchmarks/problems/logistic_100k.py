"""Logistic regression: 100,000 rows, 50 coefficients, minibatches of 500, 20 particles."""

import numpy as np

ROWS, DIMENSION, BATCH, PARTICLES = 100_000, 50, 500, 20


def data(num_rows=ROWS, dimension=DIMENSION, dtype=float):
    """Standard normal covariates and coefficients of size 1/2."""
    rng = np.random.default_rng(2021)
    X = rng.standard_normal((num_rows, dimension), dtype)
    beta = rng.standard_normal(dimension) / 2
    return X, (rng.random(num_rows) < 1 / (1 + np.exp(-X @ beta))).astype(dtype)


def newton(X, y, iterations):
    """The posterior's mode from zero, the probabilities there and the Hessian of one iteration before."""
    beta = np.zeros(X.shape[1])
    for _ in range(iterations):
        p = 1 / (1 + np.exp(-X @ beta))
        hessian = (X * (p * (1 - p))[:, None]).T @ X + np.eye(len(beta))
        beta = beta - np.linalg.solve(hessian, X.T @ (p - y) + beta)
    return beta, p, hessian


def reference(X, y):
    """Posterior means and standard deviations: the Laplace approximation, its means corrected for the third derivative.

    What is left out is of relative order d / N, and importance sampling agrees.
    """
    beta, p, hessian = newton(X, y, 30)
    covariance = np.linalg.inv(hessian)
    third = p * (1 - p) * (1 - 2 * p)
    shift = -covariance @ (X.T @ (third * ((X @ covariance) * X).sum(1))) / 2
    return beta + shift, np.sqrt(np.diag(covariance))
