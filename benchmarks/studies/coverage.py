"""Do intervals cover as stated? Six minibatched models, with parameters and data drawn from their priors.

For each of 100 data sets of 400 rows `calibrate` draws parameters from the prior and
responses from the model; then `MCMC(kernel(model), 500, 500, num_chains=20)` runs with default settings and
minibatches of 40 rows. If the posterior is right, the rank of the parameters among the draws is uniform (Talts and
others, arXiv 1804.06788). ± is a standard error over data sets, of the mean over a model's parameters.

z-scores compare a posterior mean with that of a long NUTS run on 30 more data sets of each model, in units of
`ensemble_mcse` and NUTS's own error: their root mean square should be 1. *Flagged* means that `diagnose` finds an
error.
"""

from collections.abc import Callable
from functools import partial

import jax
from jax import random
import numpy as np
from scipy.stats import kstest

from numpyro.diagnostics import effective_sample_size
from numpyro.infer import NUTS

from benchmarks.harness.runs import mean_and_error, vectorized
from benchmarks.harness.store import Record, pm, table
from benchmarks.problems.simulated import problems
from numpyro_repulsion import SGHMC, SGLDR, ensemble_mcse
from numpyro_repulsion.contrib import calibrate

KERNELS = {"SGLDR": SGLDR, "SGHMC": SGHMC}
#: The data sets of each kernel, those of each row, and those with references, the first of so many.
NUMBERS, AT_ONCE, REFERENCES, DRAWN = {"SGLDR": 500, "SGHMC": 100}, 100, 30, 500
LEVELS = (50, 90)
ROWS, BATCH = 400, 40


def batch(name: str, kernel: str, first: int) -> dict:
    """A row: some data sets of a model, one compiled program for all."""
    problem = problems(ROWS)[name]
    _, responses = problem.draw(random.key(1), 1)
    kernel_of_model = KERNELS[kernel](partial(problem.model, subsample_size=BATCH))
    key = random.fold_in(random.key(0), first)
    found = calibrate(
        kernel_of_model, **problem.covariates, y=responses[0], num_datasets=AT_ONCE, rng_key=key, progress_bar=False
    )
    ranks = np.concatenate([found.ranks[site].reshape(AT_ONCE, -1) for site in problem.sites], 1)
    return {"model": name, "kernel": kernel, "first": first, "ranks": ranks.tolist(), "errors": found.errors}


def nuts_mcse(draws: np.ndarray) -> np.ndarray:
    return draws.std((0, 1)) / np.sqrt(effective_sample_size(draws))


def means(name: str, method: str) -> dict:
    """A row: posterior means of the data sets with references, and their errors."""
    problem = problems(ROWS)[name]
    _, responses = problem.draw(random.key(1), DRAWN)
    mcse: Callable = nuts_mcse
    if method == "NUTS":
        mcmc = vectorized(NUTS(problem.model, target_accept_prob=0.95), 1000, 2000, 4, jit_model_args=True)
    else:
        kernel = KERNELS[method](partial(problem.model, subsample_size=BATCH))
        mcmc, mcse = vectorized(kernel, 500, 500, 20, progress_bar=True, jit_model_args=True), ensemble_mcse
    row: dict = {"means of": name, "method": method, "means": [], "mcse": []}
    for k in range(REFERENCES):
        mcmc.run(random.key(k), **problem.covariates, y=responses[k])
        draws = {site: np.asarray(x, float) for site, x in mcmc.get_samples(group_by_chain=True).items()}
        for column, function in (("means", lambda x: x.mean((0, 1))), ("mcse", mcse)):
            row[column].append([float(x) for site in problem.sites for x in np.ravel(function(draws[site]))])
    return row


def measure(record: Record) -> None:
    for name in problems(ROWS):
        for method in (*KERNELS, "NUTS"):
            record.row(f"{name} / means / {method}", partial(means, name, method))
    for kernel, number in NUMBERS.items():
        for first in range(0, number, AT_ONCE):
            for name in problems(ROWS):
                record.row(f"{name} / {kernel} / {first}", partial(batch, name, kernel, first))
                jax.clear_caches()


def coverage(rows: list[dict], level: float) -> tuple[float, float]:
    """How often central intervals hold the parameters: the mean over data sets, and its standard error."""
    found = np.abs(np.concatenate([row["ranks"] for row in rows]) - 0.5) <= level / 200
    return mean_and_error(found.mean(1))


def tables(record: Record) -> str:
    lines = []
    for name in problems(ROWS):
        for kernel in KERNELS:
            rows = record.select(model=name, kernel=kernel)
            if not rows:
                continue
            all_ranks = np.concatenate([row["ranks"] for row in rows])
            # Of the parameter whose ranks are farthest from uniform, for as many parameters as there are.
            worst = min(1.0, all_ranks.shape[1] * min(kstest(x, "uniform").pvalue for x in all_ranks.T))
            errors = [names for row in rows for names in row["errors"]]
            flagged = sum(map(bool, errors))
            fine = [[r for r, names in zip(row["ranks"], row["errors"], strict=True) if not names] for row in rows]
            unflagged = coverage([{"ranks": [x for part in fine for x in part]}], 90)
            cells = [pm(*(100 * x for x in coverage(rows, level)), 1) for level in LEVELS]
            cells += [pm(*(100 * x for x in unflagged), 1), f"{flagged} of {len(errors)}", f"{worst:.2g}"]
            # Differences of means from NUTS', in standard errors, (data set, parameter).
            ours, nuts = (record.rows.get(f"{name} / means / {method}") for method in (kernel, "NUTS"))
            if ours and nuts:
                z = np.subtract(ours["means"], nuts["means"]) / np.hypot(ours["mcse"], nuts["mcse"])
                known = z[np.isfinite(z)]
                cells += [f"{np.sqrt(np.mean(known**2)):.2f}", f"{100 * np.mean(np.abs(known) > 3):.1f}"]
                cells.append(f"{100 * (1 - known.size / z.size):.1f}")
            else:
                cells += [""] * 3
            lines.append([name, f"`{kernel}`", f"{len(errors)}", *cells])
    head = ["model", "kernel", "data sets", "coverage of 50%, %", "of 90%, %", "of 90%, not flagged, %", "flagged"]
    head += ["p, ranks uniform", "z-scores, root mean square", "above 3, %", "no error given, %"]
    return table(head, lines)
