"""Which of 49 posteriors that no setting was made for are right, which are wrong, and which does `diagnose` flag?

`MCMC(kernel(model), 1000, 1000, num_chains=20)` runs with default settings on 36 posteriors of applied work with
simulated data (`benchmarks/problems/collection.py`) and 13 of `benchmarks/problems/posteriordb.py`, against four chains
of NUTS with 2,000 draws each or more. Errors are the worst over all scalars of the latent sites: of a mean, in
posterior standard deviations, and of a standard deviation, relative. z is the largest error of a mean in standard
errors of both runs together; the value in brackets bounds the largest of so many normal numbers in 95 of 100 cases.
*Right* is a mean within 0.1 sd and an sd within 10%. Both kernels run in single precision, `SGLD` in double precision
too.
"""

from functools import cache, partial
import time

import arviz
import jax
from jax import random
import numpy as np
from scipy.stats import norm

from numpyro.handlers import reparam
from numpyro.infer import NUTS, init_to_median
from numpyro.infer.reparam import LocScaleReparam

from benchmarks.harness.runs import flat, vectorized
from benchmarks.harness.store import Record, table
from benchmarks.problems.collection import COLLECTION
from benchmarks.problems.posteriordb import MADE_HERE, POSTERIORDB, data_folder, known
from numpyro_repulsion import SGHMC, SGLD, diagnose, ensemble_mcse

KERNELS = {"SGLD": (SGLD, 32), "SGHMC": (SGHMC, 32), "SGLD, x64": (SGLD, 64)}
SETTINGS = {"num_warmup": 1000, "num_samples": 1000, "num_chains": 20}
#: A large mean error in standard deviations, and a large relative error of a standard deviation.
RIGHT = 0.1, 0.1
#: All but one that is like another.
OLDER = [name for name in (*POSTERIORDB, *MADE_HERE) if name != "gaussian, d = 50, correlated"]
#: Of each of four chains of NUTS; the first fourteen references have 5,000.
DRAWS = 2000
#: Means and standard deviations that formulas give; NUTS has an R-hat of 1.16 there.
EXACT = {"banana": ([0.0, 1.25], [1.5, (2 * 1.5**4 + 0.25) ** 0.5])}
#: Effects that the reference standardizes: without that NUTS has 183 divergences, and the mean of their scale is 0.09
#: sd too large.
CENTERED = {"varying intercepts few data": "a"}


@cache
def problem(name: str) -> tuple:
    """The model, its arguments, and the keyword arguments of all rows."""
    if name in COLLECTION:
        return *COLLECTION[name](), {}, {}
    posterior = known(name)
    return posterior.model, posterior.args, posterior.kwargs, posterior.all_rows


def referred(name: str) -> dict:
    """A row: moments of the reference, their standard errors, and how NUTS fared."""
    if name in EXACT:
        mean, sd = EXACT[name]
        known_by = {"r_hat": 1.0, "divergences": 0, "sites": ["x", "y"], "seconds": 0.0}
        return {"reference": name, "mean": mean, "sd": sd, "errors": [0.0] * len(mean)} | known_by
    # The centered form is the same posterior, and hard for NUTS.
    model, args, _, all_rows = problem("eight_schools_noncentered" if name == "eight schools, centered" else name)
    if name in CENTERED:
        model = reparam(model, {CENTERED[name]: LocScaleReparam(0)})
    mcmc = vectorized(NUTS(model, target_accept_prob=0.9, init_strategy=init_to_median), 1000, DRAWS, 4)
    began = time.process_time()
    mcmc.run(random.key(99), *args, **all_rows)
    draws = mcmc.get_samples(group_by_chain=True)
    sites = {"eight schools, centered": ("mu", "tau", "theta"), **dict.fromkeys(CENTERED, ("mu", "tau", "a"))}
    draws = {site: draws[site] for site in sites.get(name, draws)}
    x = flat(draws)
    row: dict = {"reference": name, "seconds": time.process_time() - began, "sites": sorted(draws)}
    # Entries of a triangular matrix, of a simplex of two or of given size, may be constant or repeated.
    sd = x.std((0, 1))
    errors = np.array([arviz.mcse(x[:, :, k]) if sd[k] > 0 else 0.0 for k in range(x.shape[2])], float)
    r_hat = max(float(arviz.rhat(x[:, :, k])) for k in range(x.shape[2]) if sd[k] > 0)
    divergences = int(mcmc.get_extra_fields()["diverging"].sum())
    row |= {"mean": x.mean((0, 1)).tolist(), "sd": sd.tolist(), "errors": errors.tolist()}
    jax.clear_caches()
    return row | {"r_hat": r_hat, "divergences": divergences}


def measured(record: Record, name: str, label: str) -> dict:
    """A row: the worst errors of a run, and what `diagnose` says."""
    kernel, bits = KERNELS[label]
    model, args, kwargs, _ = problem(name)
    reference = record.rows[f"{name} / reference"]
    mean, sd, known_error = (np.array(reference[key]) for key in ("mean", "sd", "errors"))
    if bits == 64:
        args = jax.tree.map(lambda x: np.asarray(x, np.float64) if np.asarray(x).dtype.kind == "f" else x, args)
    row: dict = {"posterior": name, "kernel": label}
    with jax.enable_x64(bits == 64):
        mcmc = vectorized(kernel(model), **SETTINGS, progress_bar=True)
        began = time.process_time()
        mcmc.run(random.key(0), *args, **kwargs)
        draws = {s: x for s, x in mcmc.get_samples(group_by_chain=True).items() if s in reference["sites"]}
        row["seconds"] = time.process_time() - began
        found = diagnose(mcmc)
        x = flat(draws)
        error = np.asarray(ensemble_mcse(x, 1))
    row["named"] = sorted({f.name for f in found if f.severity == "error"})
    row["warned"] = sorted({f.name for f in found if f.severity == "warning"})
    moves = sd > 0
    off = (np.abs(x.mean((0, 1)) - mean))[moves]
    row["mean"] = float((off / sd[moves]).max())
    row["sd"] = float(np.abs(x.std((0, 1))[moves] / sd[moves] - 1).max())
    z = off / np.hypot(np.nan_to_num(error[moves], nan=np.inf), known_error[moves])
    row |= {"z": float(z.max()), "scalars": int(moves.sum()), "unknown": int(np.isnan(error[moves]).sum())}
    jax.clear_caches()
    return row


def measure(record: Record) -> None:
    older = OLDER if data_folder() is not None else [name for name in OLDER if name in MADE_HERE and "cent" not in name]
    for label in KERNELS:
        for name in (*COLLECTION, *older):
            record.row(f"{name} / reference", partial(referred, name))
            record.row(f"{name} / {label}", partial(measured, record, name, label))


def is_right(row: dict) -> bool:
    return row["mean"] <= RIGHT[0] and row["sd"] <= RIGHT[1]


def tables(record: Record) -> str:
    labels = [label for label in KERNELS if record.select(kernel=label)]
    summary = []
    for label in labels:
        rows = record.select(kernel=label)
        wrong = [row for row in rows if not is_right(row)]
        silent = [row["posterior"] for row in wrong if not row["named"]]
        false = [row["posterior"] for row in rows if row["named"] and is_right(row)]
        cells = [len(rows), len(rows) - len(wrong), len(wrong) - len(silent), len(silent), len(false)]
        summary.append([label, *map(str, cells), ", ".join(silent), ", ".join(false)])
    head = ["kernel", "posteriors", "right", "wrong, flagged", "wrong, not flagged", "right, flagged"]
    parts = [table([*head, "not flagged though wrong", "flagged though right"], summary)]
    lines = []
    for label in labels:
        for row in record.select(kernel=label):
            reference = record.rows[f"{row['posterior']} / reference"]
            limit = norm.isf(0.025 / row["scalars"])
            poor = " †" if reference["r_hat"] > 1.01 or reference["divergences"] > 10 else ""
            cells = [f"{row['mean']:.3f}", f"{row['sd']:.3f}", f"{row['z']:.1f} ({limit:.1f})"]
            named = ", ".join(row["named"]) + (f" ({', '.join(row['warned'])})" if row["warned"] else "")
            mark = "" if is_right(row) else "**"
            lines.append([label, f"{mark}{row['posterior']}{mark}{poor}", str(row["scalars"]), *cells, named])
    head = ["kernel", "posterior", "scalars", "error of a mean, sd", "error of an sd", "z (95% bound)"]
    parts += ["**All posteriors**", table([*head, "errors of `diagnose` (warnings)"], lines)]
    return "\n\n".join(parts)
