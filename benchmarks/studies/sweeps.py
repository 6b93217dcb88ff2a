"""Minibatches without replacement: `Sweeps()` beside independent ones, on the logistic regression with many rows.

Through ``MCMC`` with nothing else set, control variates off but in the rows of that name: twice 2,000 iterations of 10
updates, that is 100 sweeps of 200 minibatches each. Errors are root mean squares over runs and coefficients, against
the reference; a gain is the ratio of inverse squared errors of the means, at equal time.

    python -m benchmarks.studies.sweeps [--short] [--again]
"""

import time
import warnings

import jax
from jax import random
import numpy as np

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import pm, run, table
from benchmarks.problems import logistic_100k as large
from benchmarks.problems.logistic_100k import BATCH, PARTICLES, data, reference
from numpyro_repulsion import SGHMC, SGLD, ControlVariates, Subsampled, Sweeps, enable_live_warnings
from numpyro_repulsion.targets import logistic_regression

KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC}
GRADIENTS = {
    "independent": Subsampled(),
    "sweeps": Sweeps(control_variates=False),
    "control variates": ControlVariates(),
}


def sampled(kernel, gradient, length, seed, X, y, exact):
    """Errors of one whole run."""
    mean, sd = exact
    jax.clear_caches()
    mcmc = vectorized(KERNELS[kernel](logistic_regression, gradient=GRADIENTS[gradient]), length, length, PARTICLES)
    began = time.perf_counter()
    mcmc.run(random.key(seed), X, y, subsample_size=BATCH)
    draws = np.asarray(mcmc.get_samples()["beta"], float)
    seconds = time.perf_counter() - began
    step = mcmc.last_state.warmup.step
    return {
        "kernel": kernel,
        "gradient": gradient,
        "seed": seed,
        "seconds": seconds,
        "step": float(step.size),
        "predicted": float(step.bias),
        "means": ((draws.mean(0) - mean) / sd).tolist(),
        "deviations": (draws.std(0) / sd - 1.0).tolist(),
    }


def measure(record):
    length, repeats = (300, 2) if record.short else (2000, 3)
    plain = data()
    exact, (X, y) = reference(*plain), large.as_jax(*plain)
    for seed in range(repeats):
        for kernel in KERNELS:
            for gradient in GRADIENTS:
                key = f"{kernel}, {gradient}, {seed}"
                row = record.row(key, lambda k=kernel, g=gradient, s=seed: sampled(k, g, length, s, X, y, exact))
                print(key, {name: row[name] for name in ("seconds", "step", "predicted")}, flush=True)


def root_mean_square(rows, name):
    """The root mean square over coefficients and runs, and its standard error over runs, NaN for a single run."""
    squares = np.mean(np.square([row[name] for row in rows]), 1)
    error = squares.std(ddof=1) / len(squares) ** 0.5 if len(squares) > 1 else np.nan
    return squares.mean() ** 0.5, error / (2 * squares.mean() ** 0.5)


def cell(value, error, digits):
    """A mean with its standard error, or alone if that is unknown."""
    return pm(value, error, digits) if np.isfinite(error) else f"{value:,.{digits}f}"


def tables(record):
    lines = []
    for kernel in KERNELS:
        base = None
        for gradient in GRADIENTS:
            rows = record.select(kernel=kernel, gradient=gradient)
            if not rows:
                continue
            seconds = float(np.mean([row["seconds"] for row in rows]))
            error, spread = root_mean_square(rows, "means")
            bias = np.mean([row["deviations"] for row in rows], 1)
            bias_error = bias.std(ddof=1) / len(bias) ** 0.5 if len(bias) > 1 else np.nan
            base = base or (error, spread, seconds)
            gain = (base[0] / error) ** 2 * base[2] / seconds
            relative = 2 * np.hypot(base[1] / base[0], spread / error)
            predicted = np.mean([(1 + row["predicted"]) ** 0.5 for row in rows]) - 1
            lines.append(
                (
                    f"`{kernel}`, {gradient}",
                    str(len(rows)),
                    f"{seconds:.0f}",
                    f"{np.mean([row['step'] for row in rows]):.2g}",
                    f"{100 * predicted:.1f} %",
                    cell(100 * bias.mean(), 100 * bias_error, 1) + " %",
                    cell(error, spread, 4),
                    cell(gain, gain * relative, 0) if error != base[0] else "",
                )
            )
    head = ("", "runs", "seconds", "step", "bias of sd, predicted", "measured", "error of means, sd")
    return table((*head, "gain in draws a second"), lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    enable_live_warnings(False)
    run(__doc__, "sweeps", measure, tables, None)
