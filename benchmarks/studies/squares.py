"""What noise that is balanced in pairs gains for squares and quantiles, on the posteriors of the zero-tuning study.

`MCMC(SGLD(model, interaction=...), 1000, 1000, num_chains=20)`, nothing else set, 16 runs of each. An average over all
draws of a run is worth the variance of a draw over the variance of the average from run to run: so many independent
draws. Means, squares around the mean, and the shares of draws below the 5 % and above the 95 % quantile, each by
parameter; the table has the median over parameters, and the worst of all four for the median parameter. The average
over runs is compared as well: the largest difference from that of independent noise, in its standard errors, should be
that of chance.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.squares [--short] [--again]
"""

from functools import partial
import warnings

import jax
from jax import random
import numpy as np
from scipy.stats import norm

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, run, table
from benchmarks.problems.posteriordb import MADE_HERE, POSTERIORDB, data_folder, known
from numpyro_repulsion import SGHMC, SGLD, Antithetic, Balanced, Independent

KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC}
NOISES = {"independent": Independent(), "balanced": Balanced(), "antithetic": Antithetic()}
SETTINGS = {"num_warmup": 1000, "num_samples": 1000, "num_chains": 20}
REPEATS = 16
QUANTITIES = ("mean", "square", "below 5 %", "above 95 %")
SHORT = ("gaussian, d = 100, condition 1e6",)


def flat(draws: dict) -> np.ndarray:
    """All draws, ``(draw, parameter)``."""
    return np.concatenate([np.asarray(x, float).reshape(x.shape[0], -1) for x in draws.values()], 1)


def averages(name: str, kernel: str, noise: str, places, repeats: int):
    """Averages of each run, ``(run, quantity, parameter)``, and the centre and quantiles in use."""
    posterior = known(name)
    mcmc = vectorized(KERNELS[kernel](posterior.model, interaction=NOISES[noise]), **SETTINGS, progress_bar=True)
    found = []
    for seed in range(repeats):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mcmc.run(random.key(seed), *posterior.args, **posterior.kwargs)
        z = flat(mcmc.get_samples())
        if places is None:
            places = z.mean(0), z.std(0), *np.quantile(z, (0.05, 0.95), axis=0)
        centre, sd, low, high = places
        u = (z - centre) / sd
        found.append(np.stack([u.mean(0), (u**2).mean(0), (z < low).mean(0), (z > high).mean(0)]))
    return np.stack(found), places


#: The variance of one draw, for a normal posterior and the quantiles of one run.
VARIANCES = np.array([1.0, 2.0, 0.05 * 0.95, 0.05 * 0.95])[:, None]


def measured(name: str, kernel: str, repeats: int) -> dict:
    """A row: effective draws of each quantity by noise, and how far averages are from those of independent noise."""
    row: dict = {"posterior": name, "kernel": kernel, "repeats": repeats, "worth": {}, "worst": {}, "apart": {}}
    places, plain = None, None
    for noise in NOISES:
        found, places = averages(name, kernel, noise, places, repeats)
        worth = VARIANCES / found.var(0, ddof=1)
        row["worth"][noise] = [float(x) for x in np.median(worth, 1)]
        row["worst"][noise] = float(np.median(worth.min(0)))
        if plain is None:
            plain = found
        else:
            error = np.sqrt((found.var(0, ddof=1) + plain.var(0, ddof=1)) / repeats)
            z = np.abs(found.mean(0) - plain.mean(0)) / error
            row["apart"][noise] = [float(z.max()), int(z.size)]
        jax.clear_caches()
    print(name, kernel, row["worth"], row["apart"], flush=True)
    return row


def measure(record: Record) -> None:
    names = (
        [*POSTERIORDB, *MADE_HERE] if data_folder() is not None else [name for name in MADE_HERE if "cent" not in name]
    )
    names = [name for name in names if name in SHORT] if record.short else names
    for kernel in list(KERNELS)[: 1 if record.short else None]:
        for name in names:
            record.row(f"{name} / {kernel}", partial(measured, name, kernel, 4 if record.short else REPEATS))


def tables(record: Record) -> str:
    parts = []
    for kernel in KERNELS:
        rows = record.select(kernel=kernel)
        if not rows:
            continue
        lines = []
        for row in rows:
            cells = [" · ".join(f"{row['worth'][noise][k]:,.0f}" for noise in NOISES) for k in range(len(QUANTITIES))]
            cells.append(" · ".join(f"{row['worst'][noise]:,.0f}" for noise in NOISES))
            distance, number = row["apart"]["antithetic"]
            chance = norm.isf(0.025 / number)
            lines.append([row["posterior"], *cells, f"{distance:.1f} ({chance:.1f})"])
        gains = [[row["worth"]["antithetic"][k] / row["worth"]["independent"][k] for row in rows] for k in range(4)]
        gains.append([row["worst"]["antithetic"] / row["worst"]["independent"] for row in rows])
        lines.append(["gain of antithetic noise, median", *(f"{np.median(x):.1f}" for x in gains), ""])
        head = [f"`{kernel}`: {' · '.join(NOISES)}", *QUANTITIES, "worst of the four"]
        parts.append(table([*head, "averages apart, standard errors (5 % of the time above)"], lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    run(__doc__, "squares", measure, tables, None)
