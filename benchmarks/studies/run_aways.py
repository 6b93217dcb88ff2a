"""Two hundred runs on real data: does the verdict name particles that have left or stand still, before all else?

Runs with default settings but short, so that more goes wrong: 300 + 300 iterations of 20 particles, by `SGLD` and
`SGHMC` in turn, each with a seed of its own; the runs of one kernel share their compiled program. A particle counts as
gone if its mean of some scalar is more than 30 standard deviations of the reference away from the reference's mean, and
as standing still if its standard deviation of every scalar is below a thousandth of the reference's. That is judged by
the reference, which the package does not know. A run is missed if it has such a particle and no error is named; it is
named first if the first finding is an error that says so (`strayed`, `separate_modes` or `not_mixed`).

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.run_aways [--short] [--again]
"""

import warnings

import jax
from jax import random
import numpy as np

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, run, table
from benchmarks.problems import real
from numpyro_repulsion import SGHMC, SGLD, diagnose, enable_live_warnings, to_inference_data

KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC}
#: How many runs of each kernel on each posterior.
RUNS = {"survival": 25, "wine": 25, "protein": 25, "volatility": 10, "bikes": 15}
SETTINGS = {"num_warmup": 300, "num_samples": 300, "num_chains": 20}
GONE, STILL = 30.0, 1e-3
NAMES = ("strayed", "separate_modes", "not_mixed")


def gone_and_still(samples, reference):
    """Which particles are gone, and which stand still, by the reference; ``(particle,)`` each."""
    distance, spread = [], []
    for site, known in reference["sites"].items():
        mean, sd = np.ravel(known["mean"]), np.ravel(known["sd"])
        draws = np.asarray(samples[site], float)
        draws = draws.reshape(*draws.shape[:2], -1)
        distance.append(np.abs(draws.mean(1) - mean) / sd)
        spread.append(draws.std(1) / sd)
    distance, spread = np.concatenate(distance, -1), np.concatenate(spread, -1)
    return ~(distance < GONE).all(-1), ~(spread > STILL).any(-1)


def sampled(name, kernel, number):
    """Rows of ``number`` runs of one kernel on one posterior."""
    problem, reference = real.load(name), real.reference(name)
    jax.clear_caches()
    # With its progress bar one compilation serves all runs.
    mcmc = vectorized(KERNELS[kernel](problem.model), **SETTINGS, progress_bar=True)
    runs = []
    for seed in range(number):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mcmc.run(random.key(1000 + seed), **problem.kwargs)
            verdict = diagnose(mcmc)
            marked = to_inference_data(mcmc)["posterior"]["strayed"].values
        gone, still = gone_and_still(mcmc.get_samples(group_by_chain=True), reference)
        bad = gone | still
        runs.append(
            {
                "gone": int(gone.sum()),
                "still": int(still.sum()),
                "marked": int((marked & bad).sum()),
                "marked wrongly": int((marked & ~bad).sum()),
                "findings": [[finding.name, finding.severity] for finding in verdict],
            }
        )
    return {"problem": name, "kernel": kernel, "runs": runs}


def measure(record: Record) -> None:
    enable_live_warnings(False)
    for name, number in {"survival": 3}.items() if record.short else RUNS.items():
        for kernel in KERNELS:
            record.row(f"{name} / {kernel}", lambda n=name, k=kernel, c=number: sampled(n, k, c))


def tables(record: Record) -> str:
    lines, total = [], np.zeros(7, int)
    for row in record.rows.values():
        runs = row["runs"]
        bad = [each for each in runs if each["gone"] or each["still"]]
        first = [each for each in bad if each["findings"] and each["findings"][0][0] in NAMES]
        errors = [each for each in bad if any(severity == "error" for _, severity in each["findings"])]
        counts = np.array(
            [
                len(runs),
                len(bad),
                len(first),
                len(bad) - len(errors),
                sum(each["gone"] + each["still"] for each in bad),
                sum(each["marked"] for each in bad),
                sum(each["marked wrongly"] for each in runs),
            ]
        )
        total += counts
        lines.append([row["problem"], f"`{row['kernel']}`", *map(str, counts)])
    lines.append(["all", "", *map(str, total)])
    head = ["posterior", "kernel", "runs", "with such particles", "named first", "missed", "such particles", "marked"]
    return table([*head, "others marked"], lines)


if __name__ == "__main__":
    run(__doc__, "run_aways", measure, tables, None)
