"""Other libraries on the logistic regression with many rows: time per update, ESS per second.

Logistic regression with 100,000 rows, 50 coefficients, minibatches of 500 and 20 particles. Our samplers run with
default settings, 300 + 300 iterations of ten updates. Steps of the others are those of a grid, and only the known
answer tells which one is best. Updates are timed in turns, compiled before, ours through the whole of `MCMC.run`. Whole
runs start from cold caches: their seconds include compilation, warmup and the search for a mode.

Errors are root mean squares over runs for the worst of 50 coefficients, in brackets the worst of all; targets are 0.05
sd and 5%. The ESS is that of the worst mean and of all means, by squared error; the worst is worse the fewer runs there
are. It is not given if standard deviations are wrong by more than 5%, because chains that stay at the mode know the
mean best. The reference is a Laplace approximation corrected for the third derivative; importance sampling agrees
within 0.003 sd. BlackJAX's SGHMC takes ten gradients on one minibatch per step. SteinVI evaluates the model for every
pair of particles. HMCECS runs one chain. SGMCMCJax and jax-sgmc cannot be imported beside a current JAX.
"""

from functools import partial
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.runs import in_turns, middle, through_mcmc
from benchmarks.harness.store import pm, table
from benchmarks.methods import logistic_peers as peers
from benchmarks.methods.logistic_peers import AT_ZERO, INNER, SAMPLERS, gradient
from benchmarks.problems import logistic_100k as large
from benchmarks.problems.logistic_100k import BATCH, PARTICLES
from benchmarks.problems.targets import logistic_regression
from numpyro_repulsion import SGHMC, SGLD, SGLDR, SGNHT, Independent, Subsampled
from numpyro_repulsion.dynamics import Overdamped

#: Time over BlackJAX's that is aimed at.
RATIO = 1.1
#: The largest errors of a mean and of a standard deviation that are aimed at.
MEAN, SD = 0.05, 0.05
THINNING = 10
OF_TEN = f"BlackJAX SGHMC, {INNER} gradients on each minibatch"


def programs(num_updates):
    """``{(name, minibatches): (program, name of the one it is compared with)}``; each has as many gradients."""
    num_draws = num_updates // THINNING
    plain = {"interaction": Independent(), "dynamics": Overdamped("euler")}
    found = {}
    for shared in (True, False):

        def by(step, thinning=THINNING, shared=shared):
            settings = {"num_draws": num_draws, "thinning": thinning, "shared": shared}
            program = jax.jit(partial(peers.sample, lambda X, y: step, **settings))
            return lambda key, X, y: program(key, X, y, AT_ZERO)

        def ours(kernel, shared=shared, **settings):
            kernel = kernel(logistic_regression, step_size=1e-6, gradient=Subsampled(shared=shared), **settings)
            return through_mcmc(kernel, num_updates, PARTICLES, subsample_size=BATCH)

        these = {
            "bare `lax.scan`": (by(peers.no_library(gradient, 1e-6)), "BlackJAX SGLD"),
            "BlackJAX SGLD": (by(peers.sgld(gradient, 1e-6)), None),
            "`SGLD`": (ours(SGLD), "BlackJAX SGLD"),
            "`SGLDR`": (ours(SGLDR), "BlackJAX SGLD"),
            "`SGLD`, independent noise, Euler": (ours(SGLD, **plain), "BlackJAX SGLD"),
            "BlackJAX SGNHT": (by(peers.sgnht(gradient, 1e-6)), None),
            "`SGHMC`": (ours(SGHMC), "BlackJAX SGNHT"),
            "`SGNHT`": (ours(SGNHT), "BlackJAX SGNHT"),
            OF_TEN: (by(peers.sghmc(gradient, 1e-6), THINNING // INNER), None),
        }
        found |= {(name, "shared" if shared else "own"): program for name, program in these.items()}
    return found


def time_updates(X, y):
    """Microseconds for an update of all chains, and ratios, as medians over rounds."""
    num_updates, rounds = 500, 25
    found = programs(num_updates)
    seconds = in_turns({key: program for key, (program, _) in found.items()}, (X, y), rounds)
    updates = []
    for (name, rows), (_, other) in found.items():
        mine = np.array(seconds[name, rows])
        row = {"program": name, "rows": rows, "microseconds": middle(1e6 * mine / num_updates), "other": other}
        updates.append(row | {"ratio": middle(mine / np.array(seconds[other, rows])) if other else None})
    return {"part": "updates", "rounds": rounds, "num_updates": num_updates, "updates": updates}


def measure(record):
    X, y = large.data()
    exact = large.reference(X, y)
    X, y = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    record.row("updates", lambda: time_updates(X, y))
    if jax.default_backend() != "cpu":
        return  # Whole runs on a GPU are those of the study `accelerator`.
    for sampler in SAMPLERS:
        key = f"{sampler.name}, {sampler.setting}, {sampler.run}"
        record.row(key, partial(accuracy, sampler, X, y, exact))


def scores(means, deviations):
    """Errors of one run at the root mean square over runs, with standard errors, of the worst coefficient and of all.

    The worst of 50 coefficients is the worse the fewer runs there are: two of them make it twice as bad as ten do. The
    average over coefficients is not, so that samplers with other numbers of runs can be compared by it. Errors have one
    run a row; those of means are in posterior standard deviations, those of standard deviations relative.
    """
    runs = len(means)

    def root_se(squares):
        return squares.std(ddof=1) / runs**0.5 / (2 * np.sqrt(squares.mean()))

    found = {}
    for name, errors in (("mean", np.asarray(means)), ("sd", np.asarray(deviations))):
        square = errors**2
        worst = square.mean(0).argmax()
        found |= {
            f"{name}_error": np.sqrt(square.mean(0)[worst]),
            f"{name}_error_se": root_se(square[:, worst]),
            f"{name}_error_at_worst": np.abs(errors).max(),
            f"{name}_rms": np.sqrt(square.mean()),
            f"{name}_rms_se": root_se(square.mean(1)),
        }
    return {name: float(value) for name, value in found.items()}


def rates(found, seconds, error):
    """Effective draws a second by the worst mean and by all, with errors: the inverse squared error over time."""
    row = {}
    for name, kind in (("a_second", "error"), ("average_a_second", "rms")):
        value = 1 / found[f"mean_{kind}"] ** 2 / seconds
        relative = np.hypot(2 * found[f"mean_{kind}_se"] / found[f"mean_{kind}"], error / seconds)
        row |= {name: value, f"{name}_se": float(value * relative)}
    return row


def accuracy(sampler, X, y, exact):
    """Errors and seconds of repeated whole runs, each of which compiles."""
    mean, sd = exact
    means, deviations, seconds = [], [], []
    for seed in range(sampler.repeats):
        jax.clear_caches()
        began = time.perf_counter()
        draws = np.asarray(sampler.sampled(sampler.length, random.key(seed), X, y), float)
        seconds.append(time.perf_counter() - began)
        means.append((draws.mean(0) - mean) / sd)
        deviations.append(draws.std(0) / sd - 1)
    found = scores(means, deviations)
    middle_seconds, error = middle(seconds)
    row = {"part": "accuracy", "sampler": sampler.name, "setting": sampler.setting, "run": sampler.run}
    row |= {"repeats": sampler.repeats, "seconds": middle_seconds, "seconds_se": error}
    row |= found | rates(found, middle_seconds, error)
    return row


def tables(record):
    accuracies = f"\n\n**Whole runs**\n\n{accuracy_table(record)}" if record.select(part="accuracy") else ""
    return updates_table(record) + accuracies


def updates_table(record):
    cells = {}
    for row in record.rows["updates"]["updates"]:
        ratio = ""
        if row["ratio"]:
            ratio = f"{pm(*row['ratio'], digits=2)} of {row['other'].removeprefix('BlackJAX ')}"
            if row["program"].startswith("`") and row["ratio"][0] > RATIO:
                ratio = f"**{ratio}**"
        cells.setdefault(row["program"], {})[row["rows"]] = (pm(*row["microseconds"], digits=0), ratio)
    head = ("per update", "shared minibatch, µs", "ratio", "own minibatches, µs", "ratio")
    return table(head, [(name, *pair["shared"], *pair["own"]) for name, pair in cells.items()])


def accuracy_table(record):
    lines = []
    for row in record.select(part="accuracy"):
        errors = []
        for kind, limit, unit, sign in (("mean", MEAN, 1, ""), ("sd", SD, 100, "%")):
            value, error, worst = (unit * row[f"{kind}_error{end}"] for end in ("", "_se", "_at_worst"))
            digits = 3 if unit == 1 else 1
            cell = f"{pm(value, error, digits)}{sign} ({worst:,.{digits}f}{sign})"
            errors.append(f"**{cell}**" if worst > unit * limit else cell)
        name = f"{row['sampler']}{', ' if row['setting'] else ''}{row['setting']}"
        cells = [row["run"], str(row["repeats"]), pm(row["seconds"], row["seconds_se"], 1), *errors]
        lines.append([name, *cells, *(_rate(row, key) for key in ("a_second", "average_a_second"))])
    head = ["sampler", "run", "runs", "seconds", "error of a mean, sd", "error of an sd"]
    return table([*head, "ESS/s, worst mean", "ESS/s, all means"], lines)


def _rate(row, key):
    """Effective draws a second; none if the sds are wrong, for chains that stay at the mode know the mean best."""
    if row["sd_rms"] > SD:
        return "sds are wrong"
    digits = 0 if row[key] >= 10 else 1
    return f"{row[key]:,.{digits}f} ± {row[f'{key}_se']:,.{digits}f}"
