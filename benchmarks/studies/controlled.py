"""What control variates from Stein's identity make of draws of `SGLD(model)`: means, squares, standard deviations.

Runs with nothing set, 20 particles, 1000 + 1000 iterations; `control_variates` with 2,000 draws and the richest kind of
control variates for which there are 8 draws per coefficient. A gain is the ratio of squared standard errors of the
same draws without and with control variates: the median over all entries of all sites, and the least. Errors are
against the references of `zero_tuning`, which have errors of up to 0.02 standard deviations themselves: the worst
error of a mean, in standard deviations, and the worst relative error of a standard deviation, without (of all draws)
and with control variates. Three seeds; gains are geometric means over them, and errors the worst.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.controlled [--short] [--again]
"""

from functools import partial
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, run, table
from benchmarks.problems.posteriordb import MADE_HERE, POSTERIORDB, data_folder, errors, known, nuts_reference
from numpyro_repulsion import SGLD, control_variates

SETTINGS = {"num_warmup": 1000, "num_samples": 1000, "num_chains": 20}
NUM_SEEDS, NUM_DRAWS = 3, 2000
SHORT = ("eight_schools_noncentered", "gaussian, d = 100, condition 1e6")


def measured(name: str, seed: int) -> dict:
    """Gains and errors of one run."""
    posterior = known(name)
    reference = posterior.reference or nuts_reference(name)
    mcmc = vectorized(SGLD(posterior.model), **SETTINGS, progress_bar=True)
    mcmc.run(random.key(seed), *posterior.args, **posterior.kwargs)

    def moments(draw):
        return {site: (draw[site], jnp.square(draw[site])) for site in reference}

    began = time.perf_counter()
    found = control_variates(mcmc, moments, num_draws=NUM_DRAWS)
    seconds = time.perf_counter() - began
    gains: dict[str, list] = {"means": [], "squares": []}
    worst = [0.0, 0.0]
    for site, (mean, sd) in reference.items():
        for kind, plain, controlled in zip(gains, found.plain_mcse[site], found.mcse[site], strict=True):
            ratio = np.ravel((plain / np.maximum(controlled, 1e-12)) ** 2)
            gains[kind] += ratio[np.isfinite(ratio)].tolist()
        first, second = (np.asarray(x, float) for x in found.mean[site])
        spread = np.sqrt(np.maximum(second - first**2, 0.0))
        worst[0] = max(worst[0], float(np.max(np.abs(first - mean) / sd)))
        worst[1] = max(worst[1], float(np.max(np.abs(spread / sd - 1))))
    plain = errors(mcmc.get_samples(), reference)
    return {
        "posterior": name,
        "degree": found.degree,
        "dimension": int(mcmc.last_state.gradient.shape[-1]),
        "seconds": seconds,
        **{f"gain_{kind}": [float(np.median(x)), float(np.min(x))] if x else None for kind, x in gains.items()},
        "plain_errors": plain,
        "errors": worst,
    }


def measure(record: Record) -> None:
    names = [*POSTERIORDB, *MADE_HERE] if data_folder() is not None else list(MADE_HERE)
    for name in names:
        if not record.short or name in SHORT:
            for seed in range(1 if record.short else NUM_SEEDS):
                record.row(f"{name} seed {seed}", partial(measured, name, seed))
            jax.clear_caches()


def tables(record: Record) -> str:
    lines = []
    for name in dict.fromkeys(row["posterior"] for row in record.rows.values()):
        rows = [row for row in record.rows.values() if row["posterior"] == name]

        def gain(kind, which, rows=rows):
            values = [row[f"gain_{kind}"][which] for row in rows if row[f"gain_{kind}"]]
            return f"{np.exp(np.mean(np.log(values))):.1f}" if values else "–"

        def error(kind, which, rows=rows):
            return max(row[kind][which] for row in rows)

        lines.append(
            [
                name,
                str(rows[0]["dimension"]),
                rows[0]["degree"],
                *(gain(kind, which) for kind in ("means", "squares") for which in (0, 1)),
                f"{error('plain_errors', 0):.3f} → {error('errors', 0):.3f}",
                f"{100 * error('plain_errors', 1):.1f} → {100 * error('errors', 1):.1f} %",
                f"{np.median([row['seconds'] for row in rows]):.1f}",
            ]
        )
    head = ["", "d", "kind", "gain of means", "least", "of squares", "least", "error of a mean", "of an sd", "seconds"]
    return table(head, lines)


if __name__ == "__main__":
    run(__doc__, "controlled", measure, tables, None)
