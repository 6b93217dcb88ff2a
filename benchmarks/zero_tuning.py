"""Nothing set: what `MCMC(SGLD(model), 1000, 1000, num_chains=20)` makes of posteriors with known moments.

For each posterior, kernel, precision and seed: the worst error of a mean in posterior standard deviations, the worst
relative error of a standard deviation, and what warmup warned of, with the two figures by which it knows a funnel.
Then the network of the paper on two data sets with the paper's 2,000 updates; what warmup costs beyond its gradients;
and how long the first run takes beside NUTS's.

    NUMPYRO_REPULSION_DATA=... python benchmarks/zero_tuning.py [--seeds 3] [--only eight] [--parts moments]

Prints tables in Markdown and writes ``zero_tuning.json`` beside this file. Without the data folder the posteriors of
posteriordb and the networks are left out, and it says so.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import time
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from posteriors import MADE_HERE, POSTERIORDB, ask_nuts, data_folder, posteriordb
import uci

import numpyro
from numpyro.infer import MCMC, NUTS

import numpyro_repulsion
from numpyro_repulsion import SGHMC, SGHMCR, SGLD, SGLDR, SGNHT, SGNHTR, BiasBudget
from numpyro_repulsion.adaptation import judge
from numpyro_repulsion.targets import bayesian_neural_network

KERNELS = (SGLD, SGLDR)
#: The table of moments can have these too, by `--kernels`.
FAMILY = {kernel.__name__: kernel for kernel in (*KERNELS, SGHMC, SGHMCR, SGNHT, SGNHTR)}
SETTINGS = {"num_warmup": 1000, "num_samples": 1000, "num_chains": 20, "chain_method": "vectorized"}
#: The worst errors of a mean and of a standard deviation that are aimed at.
TARGET, MANY_ROWS_TARGET = (0.06, 0.05), (0.05, 0.05)
CENTRED = "eight schools, centred"
#: Hand-tuned SGLD of another library, mean of splits 0 to 4 (log-likelihood, RMSE).
NETWORK_TARGETS = {"yacht": (-2.33, 1.29), "bostonHousing": (-2.52, 2.80)}


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


def errors(draws, reference):
    """The worst error of a mean in standard deviations, and the worst relative error of a standard deviation."""
    means, deviations = [], []
    for site, (mean, sd) in reference.items():
        x = np.asarray(draws[site], float)
        means.append(np.max(np.abs(x.mean(0) - mean) / sd))
        deviations.append(np.max(np.abs(x.std(0) / sd - 1)))
    return float(max(means)), float(max(deviations))


def moments(names, kernels, seeds, precisions, save):
    """Errors of every kernel on every posterior; ``save`` is called with the rows so far, after each posterior."""
    rows, references = [], {}
    for precision in precisions:
        with jax.enable_x64(precision == 64):
            for name in names:
                posterior = posteriordb(name) if name in POSTERIORDB else MADE_HERE[name]()
                if posterior.reference is None:
                    # In double precision or not, one reference.
                    references.setdefault(name, None)
                    references[name] = posterior.reference = references[name] or ask_nuts(posterior)
                for kernel in kernels:
                    # The bar lets one compilation serve all seeds.
                    mcmc = MCMC(kernel(posterior.model), **SETTINGS, progress_bar=True)
                    for seed in range(seeds):
                        said, seconds = run(mcmc, random.key(seed), *posterior.args, **posterior.kwargs)
                        mean, sd = errors(mcmc.get_samples(), posterior.reference)
                        tuning = mcmc.last_state.tuning
                        verdict = judge(tuning, BiasBudget(), mcmc.sampler.dynamics)
                        row = {
                            "posterior": name,
                            "kernel": kernel.__name__,
                            "precision": precision,
                            "seed": seed,
                            "mean_error": mean,
                            "sd_error": sd,
                            "step_size": float(tuning.step_size),
                            # Of diagonal scales the condition is not known.
                            "condition": None if np.isnan(verdict.condition) else float(verdict.condition),
                            "curvature_ratio": float(verdict.curvature_ratio),
                            "flags": said,
                            "seconds": seconds,
                        }
                        rows.append(row)
                        print(
                            f"{name:<34} {kernel.__name__:<6} {row['precision']} seed {seed}: mean {mean:.3f}, sd "
                            f"{sd:.3f}, step {row['step_size']:.4f}, {funnel(row)}, {seconds:.0f} s "
                            f"{'FLAGGED' if said else ''}",
                            flush=True,
                        )
                save(rows)
                jax.clear_caches()


def funnel(row):
    """How a run's curvature varies, in words."""
    condition = "unknown" if row["condition"] is None else f"{row['condition']:.1f}"
    return f"condition {condition}, curvature ratio {row['curvature_ratio']:.1f}"


def merge(old, new):
    """Rows of an earlier run with those of this one in the place of theirs."""
    keys = ("posterior", "kernel", "precision", "seed")
    merged = {tuple(row[key] for key in keys): row for row in (*old, *new)}
    return list(merged.values())


def moments_table(rows, kernels):
    """Worst over seeds, Markdown."""
    rows = [row for row in rows if row["kernel"] in {kernel.__name__ for kernel in kernels}]
    known = {(row["kernel"], row["precision"]) for row in rows}
    cells = [(k.__name__, p) for p in (32, 64) for k in kernels if (k.__name__, p) in known]
    lines = [
        "| posterior | target | "
        + " | ".join(f"`{k}` float{p}" for k, p in cells)
        + " | flagged | curvature, at the extreme |",
        "| --- | --- " + "| --- " * len(cells) + "| --- | --- |",
    ]
    for name in dict.fromkeys(row["posterior"] for row in rows):
        mine = [row for row in rows if row["posterior"] == name]
        target = MANY_ROWS_TARGET if name.startswith("logistic, N") else TARGET
        texts = []
        for kernel, precision in cells:
            found = [row for row in mine if (row["kernel"], row["precision"]) == (kernel, precision)]
            if not found:
                texts.append("not run")
                continue
            pairs = [max(row[key] for row in found) for key in ("mean_error", "sd_error")]
            texts.append(
                " · ".join(
                    f"{value:.3f}" if value <= limit or name == CENTRED else f"**{value:.3f}**"
                    for value, limit in zip(pairs, target, strict=True)
                )
            )
        flagged = sum(bool(row["flags"]) for row in mine)
        goal = "every run flagged" if name == CENTRED else f"{target[0]:.2f} · {target[1]:.2f}"
        # The extreme runs: the worst where all should be fine, the least bad of those to be flagged.
        worst = (min if name == CENTRED else max)(mine, key=lambda row: row["condition"] or row["curvature_ratio"])
        lines.append(f"| {name} | {goal} | {' | '.join(texts)} | {flagged} of {len(mine)} | {funnel(worst)} |")
    return "\n".join(lines)


def network(name, number, kernel):
    """Test log-likelihood and RMSE of the paper's network after 2,000 updates, 1,600 of them warmup's."""
    data = uci.split(name, number)
    X, y, X_test, y_test = map(jnp.asarray, data[:4])
    settings = SETTINGS | {"num_warmup": 160, "num_samples": 40}
    mcmc = MCMC(kernel(bayesian_neural_network), **settings, progress_bar=True)
    run(mcmc, random.key(number), X, y, subsample_size=100)
    found = uci.in_units(uci.score(mcmc.get_samples(group_by_chain=True), X_test, y_test), data.unit)
    return float(found["log_likelihood"]), float(found["rmse"])


def networks(splits=range(5)):
    """The networks on both data sets."""
    rows = []
    for name in NETWORK_TARGETS:
        for kernel in KERNELS:
            scores = np.array([network(name, split, kernel) for split in splits])
            mean, error = scores.mean(0), scores.std(0, ddof=1) / len(scores) ** 0.5
            rows.append({"data": name, "kernel": kernel.__name__, "mean": mean.tolist(), "error": error.tolist()})
            print(rows[-1], flush=True)
            jax.clear_caches()
    return rows


def networks_table(rows):
    lines = ["| data | kernel | test log-likelihood (target) | RMSE (target) |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = [
            f"{mean:.2f} ± {error:.2f} ({goal})" if better else f"**{mean:.2f} ± {error:.2f}** ({goal})"
            for mean, error, goal, better in zip(
                row["mean"],
                row["error"],
                NETWORK_TARGETS[row["data"]],
                (row["mean"][0] > NETWORK_TARGETS[row["data"]][0], row["mean"][1] < NETWORK_TARGETS[row["data"]][1]),
                strict=True,
            )
        ]
        lines.append(f"| {row['data']} | `{row['kernel']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def gradients_of(num_warmup, num_steps, minibatch):
    """How many gradients for each particle a warmup takes: ``(in its updates, to arrive, in measurements)``."""
    from numpyro_repulsion.adaptation.measurement import POWER_ITERATIONS
    from numpyro_repulsion.adaptation.timetable import ARRIVED, ENDS

    arriving = int(ARRIVED * num_warmup)
    measurements = int((ENDS >= ARRIVED).sum())
    # With control variates in use an update takes two gradients, and arriving on minibatches two without.
    running = (2 if minibatch else 1) * num_steps * (num_warmup - arriving)
    return (
        running,
        (2 if minibatch else 1) * num_steps * arriving,
        (5 if minibatch else 2) * POWER_ITERATIONS * measurements,
    )


def cost(names, rounds=5):
    """Time per gradient in warmup over that in sampling, and the first run's time over NUTS's."""
    rows = []
    for name in names:
        posterior = posteriordb(name) if name in POSTERIORDB else MADE_HERE[name]()
        minibatch = "subsample_size" in posterior.kwargs
        for kernel in KERNELS:
            jax.clear_caches()
            fresh = MCMC(kernel(posterior.model), **SETTINGS, progress_bar=False)
            _, first = run(fresh, random.key(0), *posterior.args, **posterior.kwargs)
            jax.clear_caches()
            kwargs = {k: v for k, v in posterior.kwargs.items() if k != "subsample_size"}
            nuts = MCMC(NUTS(posterior.model), **SETTINGS | {"num_chains": 4}, progress_bar=False)
            _, nuts_first = run(nuts, random.key(0), *posterior.args, **kwargs)
            jax.clear_caches()
            # Compiled once, as the bar has it; warmup and sampling in turns.
            mcmc = MCMC(kernel(posterior.model), **SETTINGS, progress_bar=True)
            run(mcmc, random.key(0), *posterior.args, **posterior.kwargs)
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
                in_warmup = sum(gradients_of(1000, 10, minibatch))
                in_sampling = (2 if minibatch else 1) * 10_000
                ratios.append((warmup / in_warmup) / (sampling / in_sampling))
                mcmc.post_warmup_state = None
            row = {
                "posterior": name,
                "kernel": kernel.__name__,
                "warmup_per_gradient": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
                "first_run_seconds": first,
                "nuts_first_run_seconds": nuts_first,
                "first_run_ratio": first / nuts_first,
            }
            rows.append(row)
            print(row, flush=True)
    return rows


def cost_table(rows):
    lines = [
        "| posterior | kernel | warmup / sampling, time per gradient (at most 1.05) "
        "| first run | NUTS's | ratio (at most 1.5) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, high = row["range"]
        lines.append(
            f"| {row['posterior']} | `{row['kernel']}` | {row['warmup_per_gradient']:.2f} ({low:.2f} to {high:.2f}) | "
            f"{row['first_run_seconds']:.1f} s | {row['nuts_first_run_seconds']:.1f} s | {row['first_run_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="posteriors whose name holds this")
    parser.add_argument("--kernels", nargs="*", default=["SGLD", "SGLDR"], choices=FAMILY)
    parser.add_argument("--precisions", type=int, nargs="*", default=[32, 64])
    parser.add_argument("--parts", nargs="*", default=["moments", "networks", "cost"])
    arguments = parser.parse_args()
    names = [*POSTERIORDB, *MADE_HERE]
    if data_folder() is None:
        print("NUMPYRO_REPULSION_DATA is not set: posteriordb and the networks are left out.")
        names = [name for name in MADE_HERE if name != CENTRED]
    names = [name for name in names if arguments.only in name]
    kernels = [FAMILY[name] for name in arguments.kernels]
    path = pathlib.Path(__file__).with_suffix(".json")
    result = json.loads(path.read_text()) if path.exists() else {}
    if "moments" in arguments.parts:
        known = result.get("moments", [])

        def save(rows):
            result["moments"] = merge(known, rows)
            path.write_text(json.dumps(result, indent=1) + "\n")

        moments(names, kernels, arguments.seeds, arguments.precisions, save)
    if "networks" in arguments.parts and data_folder() is not None:
        result["networks"] = networks()
    if "cost" in arguments.parts:
        chosen = ("eight_schools_noncentered", "garch11", "hierarchical logistic", "logistic, N = 20,000, batch 200")
        result["cost"] = cost([name for name in names if name in chosen])
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].platform}"
    result["versions"] = {m.__name__: m.__version__ for m in (jax, numpyro, numpyro_repulsion)}
    if "moments" in arguments.parts:
        print("\n" + moments_table(result["moments"], kernels))
    for part, table in (("networks", networks_table), ("cost", cost_table)):
        if part in arguments.parts and part in result:
            print("\n" + table(result[part]))
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
