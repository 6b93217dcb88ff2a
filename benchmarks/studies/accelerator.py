"""What does an accelerator change? Draws beside those of a CPU, rounded products, and a million rows beside NUTS.

- *Agreement.* A network of 20 hidden units, 10,000 rows of 10 covariates, 20 particles: 60 updates from the same keys
  on the accelerator and on the CPU of its machine; the largest difference of two weights, in standard deviations of the
  particles. By default the package multiplies in full precision; TF32 is JAX's default there.
- *Rounding.* The gradient over all rows at 20 draws from the posterior, in single precision, against double precision:
  the resulting shift of the point where it vanishes, in posterior standard deviations, for the worst particle and
  coordinate.
- *A million rows.* Logistic regression, 50 covariates: whole runs with default settings, 1,000 draws of each of 20
  particles (500 of each of 4 chains of NUTS on all rows), minibatches of 500. Seconds of a first run with compilation,
  and of a second run in the same process; errors of means are relative to the mode corrected for the third derivative.
"""

from functools import partial
import statistics
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.diagnostics import effective_sample_size
from numpyro.infer import NUTS

from benchmarks.harness.runs import Runs, through_mcmc, vectorized
from benchmarks.harness.store import Record, table
from benchmarks.problems.logistic_100k import data, newton, reference
from benchmarks.problems.targets import bayesian_neural_network, logistic_regression
from numpyro_repulsion import SGHMC, SGHMCR, SGLD, SGLDR, SVGD

NUM_PARTICLES = 20
SIZES = 100_000, 1_000_000
FULL, TF32 = "highest", "tensorfloat32"
KERNELS = {"SGLD": SGLD, "SGLDR": SGLDR, "SGHMCR": SGHMCR, "SVGD": SVGD}
WHOLE = {"SGLD": SGLD, "SGLDR": SGLDR, "SGHMC": SGHMC, "NUTS": NUTS}


def agreement(name: str, precision: str | None) -> dict:
    """The largest difference of two positions after 60 updates."""
    X, y = data(10_000, 10, np.float32)
    kernel = KERNELS[name](partial(bayesian_neural_network, hidden=20, subsample_size=100), step_size=1e-5)

    def draws(device):
        with jax.default_device(device), jax.default_matmul_precision(precision):
            program = through_mcmc(kernel, 60, NUM_PARTICLES)
            return np.asarray(program(random.key(0), jnp.asarray(X), jnp.asarray(y))["w1"], float)

    here, there = draws(jax.devices()[0]), draws(jax.devices("cpu")[0])
    last = there.reshape(NUM_PARTICLES, -1, *there.shape[1:])[:, -1]
    return {"difference": float(np.abs((here - there) / last.std(0)).max())}


def energy(beta, X, y):
    logits = X @ beta
    return jnp.sum(jnp.logaddexp(0.0, logits) - y * logits) + jnp.sum(beta**2) / 2


def seconds_of(program, *args):
    """Median seconds of a call, of which many are in flight."""
    jax.block_until_ready(program(*args))
    found = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(20):
            result = program(*args)
        jax.block_until_ready(result)
        found.append((time.perf_counter() - began) / 20)
    return statistics.median(found)


def rounding(num_rows: int) -> dict:
    """By precision: the worst shift of a particle in standard deviations, and microseconds of all gradients."""
    dimension = 20
    X, y = data(num_rows, dimension, np.float32)
    found = {}
    exact = X.astype(float)
    mode, _, hessian = newton(exact, y, 12)
    covariance = np.linalg.inv(hessian)
    white = np.random.default_rng(1).standard_normal((NUM_PARTICLES, dimension))
    cloud = np.asarray(mode + white @ np.linalg.cholesky(covariance).T, np.float32)
    slopes = (1 / (1 + np.exp(-cloud.astype(float) @ exact.T)) - y) @ exact + cloud
    args = jnp.asarray(cloud), jnp.asarray(X), jnp.asarray(y)
    for precision in (FULL, TF32):
        with jax.default_matmul_precision(precision):
            program = jax.jit(jax.vmap(jax.grad(energy), (0, None, None)))
            shift = (np.asarray(program(*args), float) - slopes) @ covariance / np.sqrt(np.diag(covariance))
            found[precision] = {"shift": float(np.abs(shift).max()), "microseconds": 1e6 * seconds_of(program, *args)}
    return found


def million(name: str) -> dict:
    """Seconds and errors of whole runs, nothing set."""
    dimension = 50
    X, y = data(1_000_000, dimension, np.float32)
    mean, sd = reference(np.asarray(X, float), np.asarray(y, float))
    args = jnp.asarray(X), jnp.asarray(y)

    @jax.jit
    def nuts(key, X, y):
        mcmc = vectorized(NUTS(logistic_regression), 500, 500, 4)
        mcmc.run(key, X, y)
        return mcmc.get_samples(group_by_chain=True)

    # The second run compiles nothing.
    run = nuts
    if name != "NUTS":
        run = Runs(WHOLE[name](partial(logistic_regression, subsample_size=500)), 500, 1000, NUM_PARTICLES)
    seconds = []
    for seed in range(2):
        began = time.perf_counter()
        draws = np.asarray(run(random.key(seed), *args)["beta"], float)
        seconds.append(time.perf_counter() - began)
    row = {"seconds": seconds, "effective": float(np.min(effective_sample_size(draws)))}
    row["mean_error"] = float(np.abs((draws.mean((0, 1)) - mean) / sd).max())
    return row | {"sd_error": float(np.abs(draws.std((0, 1)) / sd - 1).max())}


def measure(record: Record) -> None:
    for name in KERNELS:
        for precision in (None, TF32):
            record.row(f"agreement {name} {precision or 'default'}", partial(agreement, name, precision))
    for num_rows in SIZES:
        record.row(f"rounding {num_rows}", partial(rounding, num_rows))
    for name in WHOLE:
        record.row(f"million {name}", partial(million, name))


def tables(record: Record) -> str:
    rows = record.rows
    lines = [
        [f"`{name}`", *(f"{rows[f'agreement {name} {kind}']['difference']:.1e}" for kind in ("default", TF32))]
        for name in KERNELS
    ]
    parts = [table(["largest difference from a CPU, sd", "full precision", "TF32 chosen"], lines)]
    lines = []
    for number in SIZES:
        found = [rows[f"rounding {number}"][precision] for precision in (FULL, TF32)]
        cells = [f"{x['shift']:.1e} sd" for x in found] + [f"{x['microseconds']:,.0f}" for x in found]
        ratio = found[0]["microseconds"] / found[1]["microseconds"]
        lines.append([f"all of {number:,} rows", *cells, f"{ratio:.2f}"])
    head = ["gradients of 20 particles", "error, full", "error, TF32", "µs, full", "µs, TF32", "ratio"]
    parts.append(table(head, lines))
    lines = []
    for name in (name for name in WHOLE if f"million {name}" in rows):
        row = rows[f"million {name}"]
        cold, warm = row["seconds"]
        cells = [f"{cold:.1f}", f"{warm:.1f}", f"{row['mean_error']:.3f}", f"{100 * row['sd_error']:.1f}%"]
        lines.append([f"`{name}`", *cells, f"{row['effective']:,.0f}", f"{row['effective'] / warm:,.0f}"])
    head = ["a million rows", "s, first run", "s, second", "error of a mean, sd", "of an sd", "ESS", "ESS per second"]
    parts.append(table(head, lines))
    return "\n\n".join(parts)
