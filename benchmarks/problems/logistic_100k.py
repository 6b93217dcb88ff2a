"""Logistic regression with many rows, and how runs on it are scored.

100,000 rows, 50 coefficients, minibatches of 500, 20 particles.
"""

import time

import jax
from jax import random
import numpy as np

from benchmarks.harness.runs import middle
from benchmarks.harness.store import pm, table

ROWS, DIMENSION, BATCH, PARTICLES = 100_000, 50, 500, 20
#: The largest errors of a mean and of a standard deviation that are aimed at.
MEAN, SD = 0.05, 0.05


def data(num_rows=ROWS, dimension=DIMENSION, dtype=float):
    """Standard normal covariates and coefficients of size 1/2."""
    rng = np.random.default_rng(2021)
    X = rng.standard_normal((num_rows, dimension), dtype)
    beta = rng.standard_normal(dimension) / 2
    return X, (rng.random(num_rows) < 1 / (1 + np.exp(-X @ beta))).astype(float)


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


def scores(means, deviations):
    """Errors of one run at the root mean square over runs, with standard errors, of the worst coefficient and of all.

    The worst of 50 coefficients is the worse the fewer runs there are: two of them make it twice as bad as ten do. The
    average over coefficients is not, so that samplers with other numbers of runs can be compared by it. Errors have one
    run a row; those of means are in posterior standard deviations, those of standard deviations relative.
    """
    runs = len(means)

    def root_se(squares):
        return squares.std(ddof=1) / runs**0.5 / (2 * np.sqrt(squares.mean()))

    found = {}
    for name, errors in (("mean", np.asarray(means)), ("sd", np.asarray(deviations))):
        square = errors**2
        worst = square.mean(0).argmax()
        found |= {
            f"{name}_error": np.sqrt(square.mean(0)[worst]),
            f"{name}_error_se": root_se(square[:, worst]),
            f"{name}_error_at_worst": np.abs(errors).max(),
            f"{name}_rms": np.sqrt(square.mean()),
            f"{name}_rms_se": root_se(square.mean(1)),
        }
    return {name: float(value) for name, value in found.items()}


def rates(found, seconds, error):
    """Effective draws a second by the worst mean and by all, with errors: the inverse squared error over time."""
    row = {}
    for name, kind in (("a_second", "error"), ("average_a_second", "rms")):
        value = 1 / found[f"mean_{kind}"] ** 2 / seconds
        relative = np.hypot(2 * found[f"mean_{kind}_se"] / found[f"mean_{kind}"], error / seconds)
        row |= {name: value, f"{name}_se": float(value * relative)}
    return row


def accuracy(sampler, X, y, exact):
    """Errors and seconds of repeated whole runs, each of which compiles."""
    mean, sd = exact
    means, deviations, seconds = [], [], []
    for seed in range(sampler.repeats):
        jax.clear_caches()
        began = time.perf_counter()
        draws = np.asarray(sampler.make(sampler.length)(random.key(seed), X, y), float)
        seconds.append(time.perf_counter() - began)
        means.append((draws.mean(0) - mean) / sd)
        deviations.append(draws.std(0) / sd - 1)
    found = scores(means, deviations)
    middle_seconds, error = middle(seconds)
    row = {"part": "accuracy", "sampler": sampler.name, "setting": sampler.setting, "run": sampler.run}
    row |= {"repeats": sampler.repeats, "seconds": middle_seconds, "seconds_se": error}
    row |= found | rates(found, middle_seconds, error)
    return row


def accuracy_table(record):
    lines = []
    for row in record.select(part="accuracy"):
        errors = []
        for kind, limit, unit, sign in (("mean", MEAN, 1, ""), ("sd", SD, 100, " %")):
            value, error, worst = (unit * row[f"{kind}_error{end}"] for end in ("", "_se", "_at_worst"))
            digits = 3 if unit == 1 else 1
            cell = f"{pm(value, error, digits)}{sign} ({worst:,.{digits}f}{sign})"
            errors.append(f"**{cell}**" if worst > unit * limit else cell)
        name = f"{row['sampler']}{', ' if row['setting'] else ''}{row['setting']}"
        cells = [row["run"], str(row["repeats"]), pm(row["seconds"], row["seconds_se"], 1), *errors]
        lines.append([name, *cells, *(_rate(row, key) for key in ("a_second", "average_a_second"))])
    head = ("", "run", "runs", "seconds", "mean error, sd", "sd error", "draws a second, worst mean", "all means")
    return table(head, lines)


def _rate(row, key):
    """Effective draws a second; none where the spread is wrong, for chains that stay at the mode know the mean best."""
    if row["sd_rms"] > SD:
        return "spread is wrong"
    digits = 0 if row[key] >= 10 else 1
    return f"{row[key]:,.{digits}f} ± {row[f'{key}_se']:,.{digits}f}"
