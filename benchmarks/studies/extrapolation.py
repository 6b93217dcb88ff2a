"""The bias of the step size, measured by coupled clouds and taken out: what `extrapolate` costs and gains.

`MCMC(kernel(model), 1000, 4000, num_chains=20)`, nothing else set, then `extrapolate(mcmc, f)` for half of the run's
cost, with f the squares of each parameter in units of the reference: ((x - mean) / sd)². References are those of
[posteriordb](https://github.com/stan-dev/posteriordb), of long runs of NUTS, or of formulas, each with an error of its
own, which is not in the table. The first part shows, by posterior, the largest estimated bias of a variance, in %, and
the standard error of that estimate for the median parameter and the worst one. Both, and the largest error of a
variance, are shown without and with extrapolation.

In the second part each minibatch has 200 of 20,000 rows without control variates, and the step is 2, 4 and 8 times the
one that warmup measures, so that there is a bias to see: what the means of squares, over all parameters, are too large
by. One level halves the step once, two levels twice.

The third part is a run with nothing set, 1,000 + 7,000 iterations, on a logistic regression with 100,000 rows and 50
coefficients, minibatches of 500: over all coefficients, the mean error of squares and the root mean square of their
errors in standard errors, which is 1 if nothing but chance is left. Its reference is a Laplace approximation with
corrected means, whose error is of relative order 50 / 100,000.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.extrapolation [--short] [--again]
"""

from functools import partial
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro.diagnostics import effective_sample_size

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, pm, run, table
from benchmarks.problems import logistic_100k as large
from benchmarks.problems.posteriordb import MADE_HERE, POSTERIORDB, data_folder, known, nuts_reference
from numpyro_repulsion import SGHMC, SGLD, Subsampled, extrapolate
from numpyro_repulsion.targets import logistic_regression

KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC}
LENGTH, SHORT_LENGTH, PARTICLES = 4000, 400, 20
ROWS, FACTORS = "logistic, N = 20,000, batch 200", (1, 2, 4, 8)
KEYS = ("plain_mean", "plain_mcse", "shift", "shift_mcse")
SHORT = ("gaussian, d = 100, condition 1e6",)


def reference(name: str) -> dict:
    """Means and standard deviations by site."""
    posterior = known(name)
    return posterior.reference or nuts_reference(name)


def squares(reference: dict):
    """The squares of a draw, in units of a reference."""

    def function(draw):
        return jnp.concatenate([jnp.ravel(((draw[site] - mean) / sd) ** 2) for site, (mean, sd) in reference.items()])

    return function


def finished(kernel, posterior, num_samples: int, **kwargs):
    mcmc = vectorized(kernel, 1000, num_samples, PARTICLES, progress_bar=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(0), *posterior.args, **(posterior.kwargs | kwargs))
    return mcmc


def measured(name: str, kernel: str, num_samples: int) -> dict:
    """A row: shifts and errors of variances, by parameter."""
    posterior = known(name)
    mcmc = finished(KERNELS[kernel](posterior.model), posterior, num_samples)
    found = extrapolate(mcmc, squares(reference(name)))
    row = {"posterior": name, "kernel": kernel, "fall": found.fall}
    row |= {
        key: np.asarray(getattr(found, key)).tolist() for key in ("plain_mean", "plain_mcse", "shift", "shift_mcse")
    }
    print(name, kernel, found.fall, np.abs(found.shift).max(), np.median(found.shift_mcse), flush=True)
    jax.clear_caches()
    return row


def heated(factor: int, num_samples: int) -> dict:
    """A row: the mean of squares over all parameters at a multiple of the measured step, plain and extrapolated."""
    posterior = known(ROWS)
    step = float(np.ravel(finished(SGLD(posterior.model, gradient=Subsampled()), posterior, 8).last_state.step_size)[0])
    # Scales are learned too, as they are where the step is measured.
    settings = {"gradient": Subsampled(), "preconditioner": "dense", "step_size": factor * step}
    mcmc = finished(SGLD(posterior.model, **settings), posterior, num_samples)
    function = squares(reference(ROWS))
    found = {levels: extrapolate(mcmc, lambda draw: function(draw).mean(), levels=levels) for levels in (1, 2)}
    one = found[1]
    row = {"factor": factor, "step": step, "fall": one.fall, "plain": [float(one.plain_mean), float(one.plain_mcse)]}
    row |= {f"levels {levels}": [float(x.mean), float(x.mcse)] for levels, x in found.items()}
    print(row, flush=True)
    jax.clear_caches()
    return row


def many_draws() -> dict:
    """A row: errors of squares, plain and extrapolated, from about a hundred thousand effective draws."""
    X, y = large.data()
    mean, sd = large.reference(X, y)
    X, y = large.as_jax(X, y)
    mcmc = vectorized(SGLD(logistic_regression), 1000, 7000, PARTICLES, progress_bar=True)
    mcmc.run(random.key(0), X, y, subsample_size=large.BATCH)
    found = {levels: extrapolate(mcmc, squares({"beta": (mean, sd)}), levels=levels) for levels in (1, 2)}
    row = {"rows": len(X), "plain": [np.asarray(x).tolist() for x in (found[1].plain_mean, found[1].plain_mcse)]}
    row |= {f"levels {k}": [np.asarray(v).tolist() for v in (x.mean, x.mcse)] for k, x in found.items()}
    row["effective"] = float(np.median(effective_sample_size(mcmc.get_samples(group_by_chain=True)["beta"])))
    return row


def measure(record: Record) -> None:
    length = SHORT_LENGTH if record.short else LENGTH
    names = [*POSTERIORDB, *MADE_HERE] if data_folder() is not None else list(SHORT)
    names = [name for name in names if name in SHORT] if record.short else names
    for kernel in list(KERNELS)[: 1 if record.short else None]:
        for name in names:
            record.row(f"{name} / {kernel}", partial(measured, name, kernel, length))
    for factor in () if record.short else FACTORS:
        record.row(f"{factor} times the step", partial(heated, factor, length))
    if not record.short:
        record.row("100,000 rows", many_draws)


def tables(record: Record) -> str:
    parts = []
    for kernel in KERNELS:
        lines = []
        for row in record.select(kernel=kernel):
            mean, error, shift, own = (np.array(row[key], float) for key in KEYS)
            worst = np.argmax(np.abs(shift))
            rms = [np.sqrt(np.mean(x**2)) for x in (mean - 1, mean + shift - 1)]
            lines.append(
                [
                    row["posterior"],
                    f"{row['fall']:.2f}",
                    pm(100 * shift[worst], 100 * own[worst], 2),
                    f"{100 * np.median(own):.2f} · {100 * own.max():.2f}",
                    f"{100 * np.median(error):.2f}",
                    " · ".join(f"{100 * x:.2f}" for x in rms),
                ]
            )
        head = [f"`{kernel}(model)`", "left with half the step", "largest shift of a variance, %"]
        head += ["error of the shift: median · largest, %", "error of the run's own squares: median, %"]
        head += ["error of squares by the reference, root mean square over parameters: plain · extrapolated, %"]
        if lines:
            parts.append(table(head, lines))
    lines = []
    for factor in FACTORS:
        for row in record.select(factor=factor):
            cells = [
                pm(*(100 * np.array([row[key][0] - 1, row[key][1]])), 1) for key in ("plain", "levels 1", "levels 2")
            ]
            lines.append([f"{factor} × {row['step']:.2g}", *cells])
    if lines:
        head = ["step", "squares too large by, %", "extrapolated with one level", "with two"]
        parts.append(table(head, lines))
    if (row := record.rows.get("100,000 rows")) is not None:
        lines = []
        for name, key in {"plain": "plain", "one level": "levels 1", "two levels": "levels 2"}.items():
            value, error = np.array(row[key], float)
            known = np.isfinite(error)
            # Coefficients are nearly independent, so their errors are too.
            mean, own = 100 * (value - 1).mean(), 100 * np.sqrt(np.nansum(error**2)) / known.sum()
            z = np.sqrt(np.mean(((value - 1) / error)[known] ** 2))
            lines.append([name, pm(mean, own, 2), f"{100 * np.nanmedian(error):.2f}", f"{z:.2f}", f"{known.sum()}"])
        head = [f"{row['rows']:,} rows, {row['effective']:,.0f} effective draws of the median coefficient"]
        head += ["squares too large by, %", "standard error of one, %", "errors in standard errors", "errors known"]
        parts.append(table(head, lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    run(__doc__, "extrapolation", measure, tables, None)
