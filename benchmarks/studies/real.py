"""Real data, nothing set: what `MCMC(SGLD(model), 1000, 1000, num_chains=20)` and `SGHMC` make of ten posteriors.

Errors are against long NUTS runs, in posterior standard deviations: the worst error of a mean, the worst relative error
of a standard deviation, the largest R-hat and the fewest effective draws of any scalar, and what `diagnose` says.
Seconds are those of the whole run, compilation included. NUTS's seconds are of the same model on all rows, as a user
writes it, for 100 effective draws of its slowest scalar; the reference models, which need far less, are made by hand.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.real [--short] [--again]
"""

import time
import warnings

import jax
from jax import random
import numpy as np

from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, run, table
from benchmarks.problems import real
from numpyro_repulsion import SGHMC, SGLD, diagnose

KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC}
SETTINGS = {"num_warmup": 1000, "num_samples": 1000, "num_chains": 20}
#: Scalars of a group of three, whose scale the data hardly know, have wider targets.
FEW_LEVELS = {"flights": ("origin", "s_origin"), "flights_noncentred": ("origin", "s_origin")}


def scalars(draws, quantities):
    """Draws ``(particle, draw)`` of each scalar, by site."""
    return {
        name: np.moveaxis(np.asarray(draws[name], float).reshape(*draws[name].shape[:2], -1), -1, 0)
        for name in quantities
    }


def errors(name, found):
    """The worst errors against the reference, of the usual scalars and of those of few levels."""
    stored = real.reference(name)
    if stored is None:
        return {}
    few = FEW_LEVELS.get(name, ())
    row = {}
    for kind, sites in (("", [s for s in found if s not in few]), ("few ", [s for s in found if s in few])):
        worst = {"mean": (0.0, ""), "sd": (0.0, "")}
        for site in sites:
            known, x = stored["sites"][site], found[site]
            mean, sd = np.ravel(known["mean"]), np.ravel(known["sd"])
            gaps = {"mean": np.abs(x.mean((1, 2)) - mean) / sd, "sd": np.abs(x.std((1, 2)) / sd - 1.0)}
            for what, gap in gaps.items():
                worst[what] = max(worst[what], (float(gap.max()), f"{site}[{int(gap.argmax())}]"))
        if sites:
            row |= {f"{kind}{what}": value for what, value in worst.items()}
    return row


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
    each = [(f"{site}[{i}]", x) for site, xs in found.items() for i, x in enumerate(xs)]
    with np.errstate(all="ignore"):
        rhat = max((float(split_gelman_rubin(x)), label) for label, x in each)
        ess = min((float(effective_sample_size(x)), label) for label, x in each)
    return {
        "problem": name,
        "kernel": kernel,
        "seed": seed,
        "parameters": int(sum(x[0].size for x in mcmc.last_state.z.values())),
        "seconds": seconds,
        "rhat": rhat,
        "ess": ess,
        "findings": [finding.name for finding in verdict if finding.severity != "note"],
        "step": float(mcmc.last_state.warmup.step.size),
    } | errors(name, found)


def measure(record: Record) -> None:
    names = ("survival", "bikes") if record.short else real.NAMES
    for seed in range(1 if record.short else 3):
        for name in names:
            for kernel in KERNELS:
                key = f"{name} / {kernel} / {seed}"
                row = record.row(key, lambda n=name, k=kernel, s=seed: sampled(n, k, s))
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
    run(__doc__, "real", measure, tables, None)
