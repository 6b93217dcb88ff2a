"""Own minibatches at less cost: which rows particles look at, how rows are fetched, how gradients are multiplied out.

SGLD with balanced and averaged noise on the logistic regression with many rows, in bare compiled loops with steps
given: time per update, in turns, and the error of the means when all have had the same time; and what the noise of
the gradients is like. Then blocks of rows, ``ControlVariates(block_size=...)``, through ``MCMC`` with nothing else set.

    python -m benchmarks.studies.minibatches [--short] [--again]
"""

import warnings

from jax import random
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter
import numpy as np

from benchmarks.harness.runs import in_turns, middle
from benchmarks.harness.store import pm, run, table
from benchmarks.methods.logistic_peers import Sampler, ours
from benchmarks.methods.minibatch_schemes import SCHEMES, STEPS, Problem
from benchmarks.problems import logistic_100k as large
from benchmarks.problems.logistic_100k import BATCH, PARTICLES, ROWS, accuracy, accuracy_table
from numpyro_repulsion import SGLD, ControlVariates, enable_live_warnings

#: How many minibatches are in the data.
EPOCH = ROWS // BATCH


def kinds(record):
    """The gradients that are measured: the short form has the default's alone."""
    return ("control variates",) if record.short else tuple(STEPS)


def time_updates(problem, schemes, kinds, short):
    """Microseconds for an update of all particles, and over that of the first scheme, as medians over rounds."""
    num_updates, rounds = (100, 7) if short else (200, 25)
    found = {}
    for kind in kinds:
        programs = {scheme.name: problem.program(scheme, kind, num_updates) for scheme in schemes}
        seconds = {name: np.array(values) for name, values in in_turns(programs, (), rounds).items()}
        own = seconds[schemes[0].name]
        found[kind] = {
            name: {"microseconds": middle(1e6 * values / num_updates), "ratio": middle(values / own)}
            for name, values in seconds.items()
        }
    return {"part": "updates", "rounds": rounds, "num_updates": num_updates, "kinds": found}


def error_at(problem, scheme, kind, seconds, microseconds, repeats):
    """Errors after as many updates as fit into the time."""
    num_updates = int(1e6 * seconds / microseconds)
    program = problem.program(scheme, kind, num_updates)
    found = [program(random.key(seed)) for seed in range(repeats)]
    means, deviations = (np.asarray(values, float) for values in zip(*found, strict=True))
    scores = large.scores((means - problem.mean) / problem.sd, deviations / problem.sd - 1)
    row = {"part": "error", "scheme": scheme.name, "kind": kind, "seconds": seconds, "num_updates": num_updates}
    row |= {"repeats": repeats, "bias": float((deviations / problem.sd - 1).mean())} | scores
    print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def noise(problem, scheme, num_updates):
    """The noise of one particle's gradient at the reference, in successive updates.

    - **variance** - of a coordinate, the mean over coordinates, over that of independent rows.
    - **largest** - the same in the direction where that is largest.
    - **neighbours** - the correlation of successive updates.
    - **half**, **whole** - the variance of means over half an epoch, or a whole one, times its length, over variance.
    - **bias** - the mean over its standard error if updates are uncorrelated, root mean square: 1 without bias.
    """
    found = problem.noise(scheme, num_updates)
    exact = problem.covariance
    covariance = found.T @ found / len(found)
    inverse = np.linalg.inv(np.linalg.cholesky(exact))
    variance = np.diag(covariance)
    row = {
        "part": "noise",
        "scheme": scheme.name,
        "num_updates": num_updates,
        "variance": np.mean(variance / np.diag(exact)),
        "largest": np.linalg.eigvalsh(inverse @ covariance @ inverse.T)[-1],
        "neighbours": np.mean(np.mean(found[1:] * found[:-1], 0) / variance),
        "bias": np.sqrt(np.mean(found.mean(0) ** 2 / variance)) * len(found) ** 0.5,
    }
    for name, length in (("half", EPOCH // 2), ("whole", EPOCH)):
        means = found[: len(found) // length * length].reshape(-1, length, found.shape[1]).mean(1)
        row[name] = np.mean((means**2).mean(0) * length / variance)
    return {name: value if isinstance(value, str | int) else float(value) for name, value in row.items()}


THROUGH_MCMC = [
    Sampler("`SGLD`", setting, ours(SGLD, gradient=gradient), "{0} + {0} iterations of 10", 1000, repeats=4)
    for setting, gradient in (
        ("own", ControlVariates()),
        ("own, blocks of 25 rows", ControlVariates(block_size=25)),
        ("own, one block", ControlVariates(block_size=BATCH)),
        ("shared", ControlVariates(shared=True)),
        ("shared, one block", ControlVariates(shared=True, block_size=BATCH)),
    )
]


def measure(record):
    problem = Problem()
    schemes = [scheme for scheme in SCHEMES if scheme.in_short or not record.short]
    timed = record.row("updates", lambda: time_updates(problem, schemes, kinds(record), record.short))
    seconds, repeats = (1.0, 4) if record.short else (4.0, 8)
    for scheme in schemes:
        for kind in kinds(record):
            micro = timed["kinds"][kind][scheme.name]["microseconds"][0]
            record.row(
                f"error: {scheme.name}, {kind}",
                lambda s=scheme, k=kind, m=micro: error_at(problem, s, k, seconds, m, repeats),
            )
    for scheme in (scheme for scheme in schemes if scheme.number == PARTICLES and scheme.is_distinct):
        record.row(
            f"noise: {scheme.name}", lambda s=scheme: noise(problem, s, 10 * EPOCH if record.short else 100 * EPOCH)
        )
    for sampler in () if record.short else THROUGH_MCMC:
        record.row(
            f"through MCMC: {sampler.setting}",
            lambda s=sampler: accuracy(s, s.length, s.repeats, True, *problem.plain, (problem.mean, problem.sd)),
        )


def tables(record):
    found = [*(scheme_table(record, kind) for kind in kinds(record)), noise_table(record)]
    return "\n\n".join([*found, *(() if record.short else (accuracy_table(record),))])


def scheme_table(record, kind):
    timed = record.rows["updates"]["kinds"][kind]
    rows = {row["scheme"]: row for row in record.select(part="error", kind=kind)}
    own = rows[SCHEMES[0].name]
    lines = []
    for name, row in rows.items():
        gain = (own["mean_rms"] / row["mean_rms"]) ** 2
        relative = 2 * np.hypot(own["mean_rms_se"] / own["mean_rms"], row["mean_rms_se"] / row["mean_rms"])
        lines.append(
            (
                name,
                pm(*timed[name]["microseconds"], digits=0),
                pm(*timed[name]["ratio"], digits=2),
                f"{row['num_updates']:,}",
                pm(row["mean_rms"], row["mean_rms_se"], 4),
                pm(gain, gain * relative, 2) if name != SCHEMES[0].name else "",
                f"{100 * row['bias']:+.1f} %",
            )
        )
    seconds = own["seconds"]
    head = (
        kind,
        "µs per update",
        "of own",
        f"updates in {seconds:g} s",
        "error of means, sd",
        "gain in draws",
        "bias of sd",
    )
    return table(head, lines)


def noise_table(record):
    head = (
        "noise of the gradient",
        "variance over independent rows'",
        "in the worst direction",
        "bias, standard errors",
    )
    head += ("correlation of neighbours", "lasting for half an epoch", "for an epoch")
    keys = ("variance", "largest", "bias", "neighbours", "half", "whole")
    return table(head, [(row["scheme"], *(f"{row[key]:.2f}" for key in keys)) for row in record.select(part="noise")])


def draw(record):
    """The error of means at equal time, beside the time of an update."""
    figure, axes = plt.subplots(1, len(kinds(record)), figsize=(11, 5), sharey=True, squeeze=False)
    for axis, kind in zip(axes[0], kinds(record), strict=True):
        rows = record.select(part="error", kind=kind)[::-1]
        at = range(len(rows))
        axis.errorbar([r["mean_rms"] for r in rows], at, xerr=[r["mean_rms_se"] for r in rows], fmt="o", capsize=2)
        axis.set(xscale="log", title=f"{kind}, {rows[0]['seconds']:g} s each", xlabel="error of means, sd")
        axis.set_yticks(at, [r["scheme"] for r in rows], fontsize=8)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(lw=0.4, which="both")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    enable_live_warnings(False)
    run(__doc__, "minibatches", measure, tables, draw)
