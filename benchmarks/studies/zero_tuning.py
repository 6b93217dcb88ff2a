"""Nothing set: what `MCMC(SGLD(model), 1000, 1000, num_chains=20)` makes of posteriors with known moments.

In each cell the worst error of a mean, in posterior standard deviations, and the worst relative error of a standard
deviation, over all parameters and seeds; bold where it misses its target. References are posteriordb's 10,000 draws,
exact moments, or 40,000 draws of NUTS; the first have an error of up to 0.02 themselves. The last column is of the run
whose curvature varies most (of the funnel: least), by the two figures that tell a funnel: the verdict complains above
40 and 25. Below, what warmup costs beyond its gradients, and the first run, compilation included, beside NUTS's with
four chains.

Without the data folder the posteriors of posteriordb are left out, and it says so.

    NUMPYRO_REPULSION_DATA=... python -m benchmarks.studies.zero_tuning [--short] [--again]
"""

from functools import partial
import statistics
import time
import warnings

import jax
from jax import random
import numpy as np

from numpyro.infer import NUTS

from benchmarks.harness import store
from benchmarks.harness.runs import vectorized, warmup_gradients
from benchmarks.harness.store import Record, plt, table
from benchmarks.problems.posteriordb import MADE_HERE, POSTERIORDB, data_folder, errors, known, nuts_reference
from numpyro_repulsion import SGHMC, SGHMCR, SGLD, SGLDR, SGNHT, SGNHTR, BiasBudget
from numpyro_repulsion.warmup import diagnose_warmup

KERNELS = {kernel.__name__: kernel for kernel in (SGLD, SGLDR, SGHMC, SGHMCR, SGNHT, SGNHTR)}
#: Kernels with the precisions in which they are run, and how many seeds.
RUNS = [*((name, bits, 3) for bits in (32, 64) for name in ("SGLD", "SGLDR"))]
RUNS += [(name, 32, 2) for name in ("SGHMC", "SGHMCR", "SGNHT", "SGNHTR")]
SETTINGS = {"num_warmup": 1000, "num_samples": 1000, "num_chains": 20}
#: The worst errors of a mean and of a standard deviation that are aimed at.
TARGET, MANY_ROWS_TARGET = (0.06, 0.05), (0.05, 0.05)
CENTRED, MANY_ROWS = "eight schools, centred", "logistic, N = 20,000, batch 200"
TIMED = ("eight_schools_noncentered", "garch11", "hierarchical logistic", MANY_ROWS)
SHORT = ("eight_schools_noncentered", "gaussian, d = 100, condition 1e6")


def run(mcmc, key, *args, **kwargs):
    """Runs and returns the warnings of warmup, and the seconds it took."""
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mcmc.run(key, *args, **kwargs)
        jax.block_until_ready(mcmc.get_samples())
        jax.effects_barrier()
    seconds = time.perf_counter() - began
    said = {str(w.message) for w in caught if "expects trouble" in str(w.message) or "not finite" in str(w.message)}
    return sorted(said), seconds


class Moments:
    """Errors of one kernel on one posterior, compiled once for all seeds."""

    def __init__(self, name, kernel, bits):
        self.at = {"posterior": name, "kernel": kernel, "precision": bits}
        self.mcmc = None

    def __call__(self, seed):
        name = self.at["posterior"]
        # One for both precisions.
        reference = known(name).reference or nuts_reference(name)
        with jax.enable_x64(self.at["precision"] == 64):
            if self.mcmc is None:
                self.posterior = known(name)
                # With the bar one compilation serves all seeds.
                kernel = KERNELS[self.at["kernel"]](self.posterior.model)
                self.mcmc = vectorized(kernel, **SETTINGS, progress_bar=True)
            said, seconds = run(self.mcmc, random.key(seed), *self.posterior.args, **self.posterior.kwargs)
            mean, sd = errors(self.mcmc.get_samples(), reference)
            warmup = self.mcmc.last_state.warmup
            verdict = diagnose_warmup(warmup, BiasBudget(), self.mcmc.sampler.dynamics)
            return self.at | {
                "seed": seed,
                "mean_error": mean,
                "sd_error": sd,
                "step_size": float(warmup.step.size),
                # Of diagonal scales the condition is not known.
                "condition": None if np.isnan(verdict.condition) else float(verdict.condition),
                "curvature_ratio": float(verdict.curvature_ratio),
                "flags": said,
                "seconds": seconds,
            }


def measure(record):
    names = [*POSTERIORDB, *MADE_HERE]
    if data_folder() is None:
        print("NUMPYRO_REPULSION_DATA is not set: the posteriors of posteriordb are left out.")
        names = [name for name in MADE_HERE if name != CENTRED]
    runs = RUNS
    if record.short:
        names, runs = [name for name in names if name in SHORT], [(name, 32, 1) for name in ("SGLD", "SGLDR")]
    for kernel, bits, seeds in runs:
        for name in names:
            moments = Moments(name, kernel, bits)
            for seed in range(seeds):
                record.row(f"{name} {kernel} float{bits} seed {seed}", partial(moments, seed))
            jax.clear_caches()
    for name in () if record.short else (name for name in TIMED if name in names):
        for kernel in ("SGLD", "SGLDR"):
            record.row(f"cost of {name} {kernel}", partial(cost, name, kernel))


def tables(record: Record) -> str:
    rows = [row for row in record.rows.values() if "mean_error" in row]
    momentum = [row for row in rows if row["kernel"] not in ("SGLD", "SGLDR")]
    parts = [moments_table([row for row in rows if row not in momentum])]
    if momentum:
        parts.append(moments_table(momentum))
    if timed := [row for row in record.rows.values() if "first_run_ratio" in row]:
        parts.append(cost_table(timed))
    return "\n\n".join(parts)


def draw(record: Record):
    """Every run's two errors, beside what is aimed at."""
    figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for kernel in KERNELS:
        rows = [row for row in record.select(kernel=kernel) if "mean_error" in row and row["posterior"] != CENTRED]
        if rows:
            ax.plot([r["mean_error"] for r in rows], [r["sd_error"] for r in rows], ".", label=kernel)
    ax.axvline(TARGET[0], color="k", lw=0.8)
    ax.axhline(TARGET[1], color="k", lw=0.8)
    ax.set(xlabel="worst error of a mean, sd", ylabel="worst relative error of a sd", xlim=(0, None), ylim=(0, None))
    ax.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6, columnspacing=1)
    return figure


def funnel(row):
    """How a run's curvature varies, in words."""
    condition = "unknown" if row["condition"] is None else f"{row['condition']:.1f}"
    return f"condition {condition}, curvature ratio {row['curvature_ratio']:.1f}"


def moments_table(rows):
    """Worst over seeds."""
    cells = list(dict.fromkeys((row["kernel"], row["precision"]) for row in rows))
    lines = []
    for name in dict.fromkeys(row["posterior"] for row in rows):
        mine = [row for row in rows if row["posterior"] == name]
        target = MANY_ROWS_TARGET if name == MANY_ROWS else TARGET
        texts = []
        for kernel, precision in cells:
            found = [row for row in mine if (row["kernel"], row["precision"]) == (kernel, precision)]
            if not found:
                texts.append("not run")
                continue
            pairs = [max(row[key] for row in found) for key in ("mean_error", "sd_error")]
            texts.append(
                " · ".join(
                    text if value <= limit or name == CENTRED else f"**{text}**"
                    for value, limit in zip(pairs, target, strict=True)
                    for text in [f"{value:.3f}" if value < 1000 else f"{value:.0e}"]
                )
            )
        flagged = sum(bool(row["flags"]) for row in mine)
        goal = "every run flagged" if name == CENTRED else f"{target[0]:.2f} · {target[1]:.2f}"
        # The extreme runs: the worst where all should be fine, the least bad of those to be flagged.
        worst = (min if name == CENTRED else max)(mine, key=lambda row: row["condition"] or row["curvature_ratio"])
        lines.append([name, goal, *texts, f"{flagged} of {len(mine)}", funnel(worst)])
    head = ["posterior", "target", *(f"`{k}` float{p}" for k, p in cells), "flagged", "curvature, at the extreme"]
    return table(head, lines)


def cost(name, kernel, rounds=5):
    """Time per gradient in warmup over that in sampling, and the first run's time over NUTS's."""
    posterior = known(name)
    minibatch = "subsample_size" in posterior.kwargs
    kernel_of = KERNELS[kernel]
    jax.clear_caches()
    fresh = vectorized(kernel_of(posterior.model), **SETTINGS)
    _, first = run(fresh, random.key(0), *posterior.args, **posterior.kwargs)
    jax.clear_caches()
    kwargs = {k: v for k, v in posterior.kwargs.items() if k != "subsample_size"}
    nuts = vectorized(NUTS(posterior.model), **SETTINGS | {"num_chains": 4})
    _, nuts_first = run(nuts, random.key(0), *posterior.args, **kwargs)
    jax.clear_caches()
    # Compiled once, as the bar has it; warmup and sampling in turns.
    mcmc = vectorized(kernel_of(posterior.model), **SETTINGS, progress_bar=True)
    run(mcmc, random.key(0), *posterior.args, **posterior.kwargs)
    in_warmup = warmup_gradients(
        kernel_of(posterior.model), posterior.args, posterior.kwargs, SETTINGS["num_warmup"], SETTINGS["num_chains"]
    )
    ratios = []
    for seed in range(rounds):
        began = time.perf_counter()
        mcmc.warmup(random.key(seed), *posterior.args, **posterior.kwargs)
        jax.block_until_ready(mcmc.last_state)
        warmup = time.perf_counter() - began
        began = time.perf_counter()
        mcmc.run(random.key(seed), *posterior.args, **posterior.kwargs)
        jax.block_until_ready(mcmc.last_state)
        sampling = time.perf_counter() - began
        in_sampling = (2 if minibatch else 1) * 10_000
        ratios.append((warmup / in_warmup) / (sampling / in_sampling))
        mcmc.post_warmup_state = None
    return {
        "timed": name,
        "by": kernel,
        "warmup_per_gradient": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "first_run_seconds": first,
        "nuts_first_run_seconds": nuts_first,
        "first_run_ratio": first / nuts_first,
    }


def cost_table(rows):
    lines = []
    for row in rows:
        low, high = row["range"]
        seconds = (f"{row[f'{whose}first_run_seconds']:.1f} s" for whose in ("", "nuts_"))
        per_gradient = f"{row['warmup_per_gradient']:.2f} ({low:.2f} to {high:.2f})"
        lines.append([row["timed"], f"`{row['by']}`", per_gradient, *seconds, f"{row['first_run_ratio']:.2f}"])
    head = ["posterior", "kernel", "warmup / sampling, time per gradient (at most 1.05)"]
    return table([*head, "first run", "NUTS's", "ratio (at most 1.5)"], lines)


if __name__ == "__main__":
    store.run(__doc__, "zero_tuning", measure, tables, draw)
