"""Do intervals cover as stated? Six minibatched models, with parameters and data drawn from their priors.

For each of 500 data sets of 400 rows (100 for `SGHMC`), parameters come from the prior and responses from the model;
then `MCMC(kernel(model), 500, 500, num_chains=20)` runs with default settings and minibatches of 40 rows. If the
posterior is right, the rank of the parameters among the draws is uniform (Talts and others, arXiv 1804.06788). ± is a
standard error over data sets, of the mean over a model's parameters.

z-scores compare a posterior mean with that of a long NUTS run on the first 30 data sets of each model, in units of
`ensemble_mcse` and NUTS's own error: their root mean square should be 1. *Flagged* means that `diagnose` finds an
error.
"""

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
from numpyro_repulsion import SGHMC, SGLDR, diagnose, ensemble_mcse

KERNELS = {"SGLDR": SGLDR, "SGHMC": SGHMC}
#: How many data sets there are, those of each kernel, of each row, and those with references.
NUMBER, NUMBERS, AT_ONCE, REFERENCES = 500, {"SGLDR": 500, "SGHMC": 100}, 50, 30
LEVELS = (50, 90)
ROWS, BATCH = 400, 40


def listed(values: dict, sites) -> list[float]:
    return [float(x) for site in sites for x in np.ravel(values[site])]


def batch(name: str, kernel: str, first: int) -> dict:
    """A row: some data sets of a model, one compiled program for all."""
    problem = problems(ROWS)[name]
    truths, responses = problem.draw(random.key(1), NUMBER)
    kernel_of_model = KERNELS[kernel](partial(problem.model, subsample_size=BATCH))
    mcmc = vectorized(kernel_of_model, 500, 500, 20, progress_bar=True, jit_model_args=True)
    row: dict = {"model": name, "kernel": kernel, "first": first, "ranks": [], "errors": [], "means": [], "mcse": []}
    for k in range(first, first + AT_ONCE):
        mcmc.run(random.key(k), **problem.covariates, y=responses[k])
        found = mcmc.get_samples()
        row["errors"].append([finding.name for finding in diagnose(mcmc) if finding.severity == "error"])
        # The share of draws below each true value.
        below = {site: np.mean(np.asarray(found[site]) < np.asarray(truths[site][k]), 0) for site in problem.sites}
        row["ranks"].append(listed(below, problem.sites))
        if k < REFERENCES:
            row["means"].append(listed(jax.tree.map(lambda x: x.mean(0), found), problem.sites))
            grouped = mcmc.get_samples(group_by_chain=True)
            row["mcse"].append(listed({site: ensemble_mcse(grouped[site]) for site in problem.sites}, problem.sites))
    return row


def reference(name: str) -> dict:
    """A row: posterior means of the first data sets by NUTS, and their errors."""
    problem = problems(ROWS)[name]
    _, responses = problem.draw(random.key(1), NUMBER)
    nuts = vectorized(NUTS(problem.model, target_accept_prob=0.95), 1000, 2000, 4, jit_model_args=True)
    row: dict = {"model": name, "means": [], "mcse": []}
    for k in range(REFERENCES):
        nuts.run(random.key(k), **problem.covariates, y=responses[k])
        draws = {site: np.asarray(x, float) for site, x in nuts.get_samples(group_by_chain=True).items()}
        row["means"].append(listed(jax.tree.map(lambda x: x.mean((0, 1)), draws), problem.sites))
        errors = jax.tree.map(lambda x: x.std((0, 1)) / np.sqrt(effective_sample_size(x)), draws)
        row["mcse"].append(listed(errors, problem.sites))
    return row


def measure(record: Record) -> None:
    for name in problems(ROWS):
        record.row(f"{name} / NUTS", partial(reference, name))
        for kernel, number in NUMBERS.items():
            for first in range(0, number, AT_ONCE):
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
            (row,), nuts = (row for row in rows if row["first"] == 0), record.rows[f"{name} / NUTS"]
            z = np.subtract(row["means"], nuts["means"]) / np.hypot(row["mcse"], nuts["mcse"])
            known = z[np.isfinite(z)]
            cells += [f"{np.sqrt(np.mean(known**2)):.2f}", f"{100 * np.mean(np.abs(known) > 3):.1f}"]
            cells.append(f"{100 * (1 - known.size / z.size):.1f}")
            lines.append([name, f"`{kernel}`", f"{len(errors)}", *cells])
    head = ["model", "kernel", "data sets", "coverage of 50%, %", "of 90%, %", "of 90%, not flagged, %", "flagged"]
    head += ["p, ranks uniform", "z-scores, root mean square", "above 3, %", "no error given, %"]
    return table(head, lines)
