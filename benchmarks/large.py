"""A large logistic regression with nothing set: effective draws a second, from the squared error over repeated runs.

100,000 rows, 50 coefficients, minibatches of 500, 20 particles. Seconds are those of a whole run, compilation included.
Effective draws are those of the worst of the 50 means: the posterior variance over the mean squared error over runs.
Errors are the worst over coefficients, of one run at the root mean square over runs. Prints a table in Markdown and
writes ``large.json`` beside this file.

    python benchmarks/large.py [--repeats 10]
"""

import argparse
import json
import os
import pathlib
import platform
import time
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.infer import MCMC

from numpyro_repulsion import SGHMC, SGLD, SGLDR, ControlVariates, enable_live_warnings
from numpyro_repulsion.targets import logistic_regression

ROWS, DIMENSION, BATCH, PARTICLES = 100_000, 50, 500, 20


def data():
    """Standard normal covariates and coefficients of size 1/2."""
    rng = np.random.default_rng(2021)
    X = rng.standard_normal((ROWS, DIMENSION))
    beta = rng.standard_normal(DIMENSION) / 2
    y = rng.random(ROWS) < 1 / (1 + np.exp(-X @ beta))
    return X, y.astype(float)


def reference(X, y):
    """Posterior means and standard deviations: the Laplace approximation, its means corrected for the third derivative.

    What is left out is of relative order d / N. Importance sampling from it agrees to within its own error, which is
    several times larger than that of the samplers here.
    """
    beta = np.zeros(DIMENSION)
    for _ in range(30):  # Newton's method
        p = 1 / (1 + np.exp(-X @ beta))
        hessian = (X * (p * (1 - p))[:, None]).T @ X + np.eye(DIMENSION)
        beta = beta - np.linalg.solve(hessian, X.T @ (p - y) + beta)
    covariance = np.linalg.inv(hessian)
    third = p * (1 - p) * (1 - 2 * p)
    shift = -covariance @ (X.T @ (third * ((X @ covariance) * X).sum(1))) / 2
    return beta + shift, np.sqrt(np.diag(covariance))


SAMPLERS = {
    "`SGLD`": (SGLD, {}),
    "`SGLD`, shared minibatches": (SGLD, {"gradient": ControlVariates(shared=True)}),
    "`SGHMC`": (SGHMC, {}),
    "`SGLDR`": (SGLDR, {}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--lengths", type=int, nargs="*", default=[300])
    arguments = parser.parse_args()
    enable_live_warnings(False)
    X, y = data()
    mean, sd = reference(X, y)
    print("| | iterations | seconds | worst mean error | worst sd error | effective draws | a second |")
    print("| --- " * 7 + "|")
    X, y = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    table = []
    for length in arguments.lengths:
        for label, (kernel, settings) in SAMPLERS.items():
            if arguments.only and label.strip("`") not in arguments.only:
                continue
            mcmc = MCMC(
                kernel(logistic_regression, **settings),
                num_warmup=length,
                num_samples=length,
                num_chains=PARTICLES,
                chain_method="vectorized",
                progress_bar=False,
            )
            means, sds, seconds = [], [], []
            for seed in range(arguments.repeats):
                began = time.perf_counter()
                mcmc.run(random.key(seed), X, y, subsample_size=BATCH)
                draws = np.asarray(mcmc.get_samples()["beta"], float)
                seconds.append(time.perf_counter() - began)
                means.append((draws.mean(0) - mean) / sd)
                sds.append(draws.std(0) / sd - 1)
            error = np.sqrt(np.mean(np.square(means), 0)).max()
            row = {
                "sampler": label,
                "iterations": length,
                "seconds": float(np.median(seconds)),
                "first": seconds[0],
                "mean_error": error,
                "sd_error": np.sqrt(np.mean(np.square(sds), 0)).max(),
                "worst_mean_error": float(np.abs(means).max()),
                "worst_sd_error": float(np.abs(sds).max()),
                "effective_draws": 1 / error**2,
                "a_second": 1 / error**2 / float(np.median(seconds)),
                "step_size": float(mcmc.last_state.step_size[0]),
            }
            table.append(row)
            cells = (
                f"{length} + {length}",
                f"{row['seconds']:.1f}",
                f"{error:.3f} ({row['worst_mean_error']:.3f})",
                f"{100 * row['sd_error']:.1f} % ({100 * row['worst_sd_error']:.1f} %)",
                f"{row['effective_draws']:,.0f}",
                f"{row['a_second']:,.0f}",
            )
            print(f"| {label} | {' | '.join(cells)} |", flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].platform}"
    result = {"table": table, "repeats": arguments.repeats, "machine": machine, "jax": jax.__version__}
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
