"""Real data, nothing set: what `MCMC(SGLD(model), 1000, 1000, num_chains=20)` and `SGHMC` make of ten posteriors.

Errors are against long NUTS runs, in posterior standard deviations: the worst error of a mean, the worst relative error
of a standard deviation, the largest R-hat and the fewest effective draws of any scalar, and what `diagnose` says.
Seconds are those of the whole run, compilation included. What others make of these models is a study of its own:
[peers on real data](#peers-on-real-data). The references took models of the same posteriors that are made by hand.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.real [--again]
"""

from functools import partial
import time
import warnings

import jax
from jax import random

from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, run, table
from benchmarks.problems import real
from benchmarks.problems.real_scores import errors, extreme, scalars
from numpyro_repulsion import SGHMC, SGLD, diagnose

KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC}
SETTINGS = {"num_warmup": 1000, "num_samples": 1000, "num_chains": 20}


def sampled(name, kernel, seed):
    """One run with nothing set."""
    problem = real.load(name)
    jax.clear_caches()
    mcmc = vectorized(KERNELS[kernel](problem.model), **SETTINGS)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(seed), **problem.kwargs)
        draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
        seconds = time.perf_counter() - began
        verdict = diagnose(mcmc)
    found = scalars(draws, problem.quantities)
    return {
        "problem": name,
        "kernel": kernel,
        "seed": seed,
        "parameters": int(sum(x[0].size for x in mcmc.last_state.z.values())),
        "seconds": seconds,
        "rhat": extreme(found, split_gelman_rubin, max),
        "ess": extreme(found, effective_sample_size),
        "findings": [finding.name for finding in verdict if finding.severity != "note"],
        "step": float(mcmc.last_state.warmup.step.size),
    } | errors(name, found)


def measure(record: Record) -> None:
    for seed in range(3):
        for name in real.NAMES:
            for kernel in KERNELS:
                key = f"{name} / {kernel} / {seed}"
                row = record.row(key, partial(sampled, name, kernel, seed))
                print(key, {k: v for k, v in row.items() if k not in ("problem", "kernel", "seed", "date", "cores")})


def tables(record: Record) -> str:
    lines = []
    for row in record.rows.values():

        def worst(what, row=row):
            value = row.get(what)
            return f"{value[0]:.2f} ({value[1]})" if value else ""

        cells = [row["problem"], row["kernel"], str(row["seed"]), str(row["parameters"]), f"{row['seconds']:.0f}"]
        cells += [f"{row[what][0]:.{digits}f} ({row[what][1]})" for what, digits in (("rhat", 2), ("ess", 0))]
        lines.append([*cells, *map(worst, ("mean", "sd", "few mean", "few sd")), ", ".join(row["findings"])])
    head = ["posterior", "kernel", "seed", "d", "seconds", "R-hat", "effective draws", "mean", "sd"]
    return table([*head, "mean, few levels", "sd, few levels", "named"], lines)


if __name__ == "__main__":
    run(__doc__, "real", measure, tables)
