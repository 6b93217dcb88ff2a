"""Networks with two heads on tabular sets: kernels with nothing set beside published figures of another sampler.

Four hidden layers of 16 SiLU units and heads for mean and standard deviation, weights N(0, 1); 10 particles,
minibatches of 100 rows, 25 updates an iteration, one seed. SiLU rather than
ReLU, and N(0, 1) rather than smaller weights, were chosen on validation rows of `airfoil`. Scores are those of the
published table: the negative log-likelihood of test rows under Normals with the mean and the standard deviation of the
predictive mixture, standardized; beside it that of the mixture itself, by `predict` with 2,000 draws. Core-seconds
include compilation and predictions. The published runs took 240 s (`airfoil`) and 2,550 s on ten cores. With
`BDE_PYTHON`, the interpreter of an environment that has sklearn-contrib-bde 1.0.2, that package runs here too.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.tabular [--short] [--again]
"""

from functools import partial
import json
import os
import pathlib
import subprocess
import tempfile
import time
import warnings

import jax
from jax import random
import numpy as np
from scipy.stats import norm

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import HERE, Record, run, table
from benchmarks.problems.posteriordb import data_folder
from benchmarks.problems.tabular import PUBLISHED, network, split
from numpyro_repulsion import SGHMC, SGLD, SGNHT, diagnose, enable_live_warnings, predict

KERNELS = {"SGHMC": SGHMC, "SGNHT": SGNHT, "SGLD": SGLD}
PARTICLES, BATCH, NUM_STEPS, NUM_DRAWS = 10, 100, 25, 2000
#: (warmup, draws) in iterations; the longer run by the first kernel alone.
LENGTHS = {"airfoil": ((2000, 1000), (8000, 4000)), "bikesharing": ((2000, 1000), (8000, 4000))}
SHORT = {"airfoil": ((200, 100),)}


def fitted(name: str, kernel: str, length: tuple[int, int], seed: int) -> dict:
    """Scores of one run on the test rows."""
    data = split(name)
    began, wall = time.process_time(), time.perf_counter()
    mcmc = vectorized(KERNELS[kernel](network, num_steps=NUM_STEPS), *length, PARTICLES, progress_bar=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(random.key(seed), data.X, data.y, subsample_size=BATCH)
    found = predict(mcmc, data.X_test, data.y_test, num_draws=NUM_DRAWS)
    y = np.asarray(data.y_test, float)
    mean, sd = np.asarray(found.mean, float), np.asarray(found.sd, float)
    low, high = np.quantile(found.replicates, (0.05, 0.95), axis=0)
    return {
        "problem": name,
        "kernel": kernel,
        "length": list(length),
        "nll": float(-norm.logpdf(y, mean, sd).mean()),
        "mixture": float(-np.mean(found.log_likelihood)),
        "rmse": float(np.sqrt(np.mean((y - mean) ** 2))),
        "coverage": float(np.mean((low <= y) & (y <= high))),
        "core_seconds": time.process_time() - began,
        "seconds": time.perf_counter() - wall,
        "errors": [finding.name for finding in diagnose(mcmc) if finding.severity == "error"],
    }


def peer(name: str, python: str) -> dict:
    """Scores of sklearn-contrib-bde on the same rows, in the environment of that interpreter."""
    data = split(name)
    with tempfile.TemporaryDirectory() as folder:
        arrays, row = (pathlib.Path(folder) / file for file in ("data.npz", "row.json"))
        np.savez(arrays, **{key: np.asarray(value) for key, value in data._asdict().items()})
        subprocess.run([python, str(HERE / "methods" / "bde_by_itself.py"), str(arrays), str(row)], check=True)
        return {"problem": name, "peer": "sklearn-contrib-bde, run here"} | json.loads(row.read_text())


def measure(record: Record) -> None:
    enable_live_warnings(False)
    if data_folder() is None:
        print("NUMPYRO_REPULSION_DATA is not set: there is nothing to fit.")
        return
    for name, lengths in (SHORT if record.short else LENGTHS).items():
        for length in lengths:
            for kernel in list(KERNELS)[: None if length == lengths[0] else 1]:
                key = f"{name} / {kernel} / {length[0]} + {length[1]} / seed 0"
                row = record.row(key, partial(fitted, name, kernel, length, 0))
                print(key, row, flush=True)
                jax.clear_caches()
    if (python := os.environ.get("BDE_PYTHON")) and not record.short:
        for name in LENGTHS:
            print(record.row(f"{name} / bde", partial(peer, name, python)), flush=True)


def tables(record: Record) -> str:
    lines = []
    for name, published in PUBLISHED.items():
        rows = record.select(problem=name)
        for row in (row for row in rows if "kernel" in row):
            lines.append(
                [
                    name,
                    f"`{row['kernel']}`, {row['length'][0]:,} + {row['length'][1]:,}",
                    *(f"{row[key]:.3f}" for key in ("nll", "mixture", "rmse", "coverage")),
                    f"{row['core_seconds']:.0f}",
                ]
            )
        for row in (row for row in rows if "peer" in row):
            cells = (f"{row['nll']:.3f}", "", f"{row['rmse']:.3f}", "", f"{row['core_seconds']:.0f}")
            lines.append([name, row["peer"], *cells])
        for source, (nll, rmse) in published.items() if rows else ():
            lines.append([name, f"*{source}*", f"{nll:.3f}", "", f"{rmse:.3f}", "", ""])
    head = ["", "", "NLL", "of the mixture", "RMSE", "in 90 % intervals", "core-seconds"]
    return table(head, lines)


if __name__ == "__main__":
    run(__doc__, "tabular", measure, tables, None)
