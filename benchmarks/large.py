"""The logistic regression with many rows of ``peers.py`` and ``minibatches.py``, and how runs on it are scored.

100,000 rows, 50 coefficients, minibatches of 500, 20 particles.
"""

import jax.numpy as jnp
import numpy as np

ROWS, DIMENSION, BATCH, PARTICLES = 100_000, 50, 500, 20


def data():
    """Standard normal covariates and coefficients of size 1/2."""
    rng = np.random.default_rng(2021)
    X = rng.standard_normal((ROWS, DIMENSION))
    beta = rng.standard_normal(DIMENSION) / 2
    y = rng.random(ROWS) < 1 / (1 + np.exp(-X @ beta))
    return X, y.astype(float)


def newton(X, y, iterations):
    """The posterior's mode from zero, the probabilities there and the Hessian of one iteration before."""
    beta = np.zeros(DIMENSION)
    for _ in range(iterations):
        p = 1 / (1 + np.exp(-X @ beta))
        hessian = (X * (p * (1 - p))[:, None]).T @ X + np.eye(DIMENSION)
        beta = beta - np.linalg.solve(hessian, X.T @ (p - y) + beta)
    return beta, p, hessian


def reference(X, y):
    """Posterior means and standard deviations: the Laplace approximation, its means corrected for the third derivative.

    What is left out is of relative order d / N. Importance sampling from it agrees to within its own error, which is
    several times larger than that of the samplers here.
    """
    beta, p, hessian = newton(X, y, 30)
    covariance = np.linalg.inv(hessian)
    third = p * (1 - p) * (1 - 2 * p)
    shift = -covariance @ (X.T @ (third * ((X @ covariance) * X).sum(1))) / 2
    return beta + shift, np.sqrt(np.diag(covariance))


def as_jax(X, y):
    """The data in single precision."""
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


def scores(means, deviations):
    """Errors of one run at the root mean square over runs, with standard errors, of the worst coefficient and of all.

    The worst of 50 coefficients is the worse the fewer runs there are: two of them make it twice as bad as ten do. The
    average over coefficients is not, so that samplers with other numbers of runs can be compared by it.

    :param means: errors of the means in posterior standard deviations, one run a row.
    :param deviations: relative errors of the standard deviations.
    """
    found = {}
    for name, errors in (("mean", np.asarray(means)), ("sd", np.asarray(deviations))):
        square, runs = errors**2, len(errors)
        worst = square.mean(0).argmax()
        found |= {
            f"{name}_error": np.sqrt(square.mean(0)[worst]),
            f"{name}_error_se": _root_se(square[:, worst], runs),
            f"{name}_error_at_worst": np.abs(errors).max(),
            f"{name}_rms": np.sqrt(square.mean()),
            f"{name}_rms_se": _root_se(square.mean(1), runs),
        }
    return {name: float(value) for name, value in found.items()}


def rates(found, seconds, error):
    """Effective draws a second by the worst mean and by all, with standard errors: the inverse squared error over time.

    :param found: of :func:`scores`.
    :param seconds: of a run, and its standard ``error``.
    """
    row = {}
    for name, kind in (("a_second", "error"), ("average_a_second", "rms")):
        value = 1 / found[f"mean_{kind}"] ** 2 / seconds
        relative = np.hypot(2 * found[f"mean_{kind}_se"] / found[f"mean_{kind}"], error / seconds)
        row |= {name: value, f"{name}_se": float(value * relative)}
    return row


def _root_se(squares, runs):
    """The standard error of the root of a mean over runs."""
    return squares.std(ddof=1) / runs**0.5 / (2 * np.sqrt(squares.mean()))
