"""What minibatch noise leaves of a posterior, by kernel and by gradient, with the step that warmup measures.

`MCMC(kernel(model, gradient=...), 1000, 2000, num_chains=20)`, nothing else set, on a logistic regression of 20,000
rows, 20 covariates and minibatches of 200 rows, three seeds. Squares are those around the mean of four long chains of
NUTS, over its variances; ± is a standard error over seeds. The last column is how many independent draws warmup
expects 1,000 iterations to be worth in the slowest direction. Thermostats refuse minibatches without replacement.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.minibatch_noise [--again]
"""

from functools import partial
import itertools
import warnings

import jax
from jax import random
import numpy as np

from benchmarks.harness.runs import mean_and_error, vectorized
from benchmarks.harness.store import Record, pm, run, table
from benchmarks.problems.posteriordb import known, nuts_reference
from numpyro_repulsion import (
    SGHMC,
    SGHMCR,
    SGLD,
    SGLDR,
    SGNHT,
    SGNHTR,
    SVRG,
    ControlVariates,
    Subsampled,
    Sweeps,
    diagnose,
)

POSTERIOR = "logistic, N = 20,000, batch 200"
KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC, "SGNHT": SGNHT, "SGLDR": SGLDR, "SGHMCR": SGHMCR, "SGNHTR": SGNHTR}
GRADIENTS = {
    "Subsampled()": Subsampled(),
    "ControlVariates()": ControlVariates(),
    "SVRG()": SVRG(),
    "Sweeps()": Sweeps(),
}
SETTINGS = {"num_warmup": 1000, "num_samples": 2000, "num_chains": 20}
SEEDS = 3


def measured(kernel: str, gradient: str) -> dict:
    """A row: squares and errors of means by seed and parameter, the steps, and what `diagnose` names."""
    posterior, reference = known(POSTERIOR), nuts_reference(POSTERIOR)
    mcmc = vectorized(KERNELS[kernel](posterior.model, gradient=GRADIENTS[gradient]), **SETTINGS, progress_bar=True)
    row: dict = {"kernel": kernel, "gradient": gradient, "squares": [], "means": [], "steps": [], "named": []}
    row |= {"predicted": [], "effective": []}
    for seed in range(SEEDS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mcmc.run(random.key(seed), *posterior.args, **posterior.kwargs)
            row["named"].append([f"{x.name} ({x.severity})" for x in diagnose(mcmc) if x.severity != "note"])
        draws, state = mcmc.get_samples(group_by_chain=True), mcmc.last_state
        off = [(np.asarray(draws[site], float) - mean) / sd for site, (mean, sd) in reference.items()]
        row["squares"].append(np.concatenate([np.ravel((x**2).mean((0, 1))) for x in off]).tolist())
        row["means"].append(np.concatenate([np.ravel(x.mean((0, 1))) for x in off]).tolist())
        for name, value in (
            ("steps", state.step_size),
            ("predicted", state.warmup.step.bias),
            ("effective", state.warmup.step.effective_draws),
        ):
            row[name].append(float(np.ravel(value)[0]))
    print(gradient, kernel, row["steps"], [np.mean(x) for x in row["squares"]], row["named"], flush=True)
    jax.clear_caches()
    return row


def measure(record: Record) -> None:
    for gradient, kernel in itertools.product(GRADIENTS, KERNELS):
        if gradient != "Sweeps()" or not kernel.startswith("SGNHT"):
            record.row(f"{gradient} / {kernel}", partial(measured, kernel, gradient))


def tables(record: Record) -> str:
    lines = []
    for row in record.rows.values():
        squares = 100 * (np.array(row["squares"]) - 1.0)
        worst = squares.mean(0)
        named = sorted({name for names in row["named"] for name in names})
        lines.append(
            [
                f"`{row['kernel']}(model, gradient={row['gradient']})`",
                f"{np.mean(row['steps']):.2g}",
                pm(*mean_and_error(squares.mean(1)), 1),
                f"{worst[np.argmax(np.abs(worst))]:.1f}",
                f"{100 * np.mean(row['predicted']):.0f}",
                f"{np.abs(row['means']).mean():.3f}",
                f"{np.mean(row['effective']):,.0f}",
                ", ".join(named),
            ]
        )
    head = ["", "step", "squares too large by, %", "worst parameter, %", "expected at most, %"]
    return table([*head, "mean error of a mean, sd", "draws expected", "findings of any seed"], lines)


if __name__ == "__main__":
    run(__doc__, "minibatch_noise", measure, tables)
