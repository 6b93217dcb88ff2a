"""How do current samplers compare on small posteriors? ESS of the worst of means, squares and quantiles, bias included.

Each sampler makes six runs with different seeds. For each parameter, a run gives four averages over all its draws:
the mean, the mean square around the reference's mean, and the shares of draws below the reference's 5% quantile and
above its 95% quantile. Their mean squared error over parameters and runs, in units of the variance of one draw, is
1 / n for n independent draws; this n is the ESS. If the reference is a sample, its known variance is subtracted; "over"
means that the ESS exceeds the number of reference draws. The study ranks samplers by the least of the four ESS.

A gradient is one of all rows for one chain; those of warmup and tuning count too. Seconds are process time of the
median run on one core, without compilation. nutpie calls a compiled gradient from Python at each step, so its seconds
are mostly Python's.
"""

from functools import cache, partial
import time

import jax
from jax import random
import numpy as np
from scipy.stats import norm

from numpyro.infer import NUTS

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, table
from benchmarks.methods.current_peers import METHODS, Problem, counted, ours
from benchmarks.problems.posteriordb import POSTERIORDB, data_folder, known

RUNS = 6
#: Posteriors, and how many rows there are for each in a minibatch.
EXACT = ("gaussian, d = 100, condition 1e6", "gaussian, d = 50, correlated")
NAMES = {
    **dict.fromkeys(("eight_schools_noncentered", "garch11", "arK"), 1.0),
    **dict.fromkeys(EXACT, 1.0),
    "robust regression": 1.0,
    "hierarchical logistic": 1.0,
    "logistic, N = 20,000, batch 200": 100.0,
}
QUANTITIES = ("mean", "square", "below 5%", "above 95%")
#: The variance of one draw, for a normal marginal.
VARIANCES = np.array([1.0, 2.0, 0.05 * 0.95, 0.05 * 0.95])
#: Draws of NUTS for a reference, of 4 chains.
REFERENCE = 20_000


def problem(name: str) -> Problem:
    posterior = known(name)
    return Problem(posterior, tuple(posterior.moments or posterior.draws or _asked(name)), NAMES[name])


@cache
def _asked(name):
    posterior = known(name)
    mcmc = vectorized(NUTS(posterior.model, target_accept_prob=0.9), 1000, REFERENCE // 4, 4)
    mcmc.run(random.key(99), *posterior.args, **posterior.all_rows)
    return {site: np.asarray(x) for site, x in mcmc.get_samples().items()}


@cache
def reference(name: str) -> tuple[np.ndarray, float]:
    """Mean, standard deviation and two quantiles of each scalar, ``(4, scalar)``; and of how many draws."""
    posterior = known(name)
    if posterior.moments:
        ((mean, sd),) = posterior.moments.values()
        return np.stack([mean, sd, mean + norm.ppf(0.05) * sd, mean + norm.ppf(0.95) * sd]), np.inf
    x = problem(name).scalars(posterior.draws or _asked(name))
    return np.stack([x.mean(0), x.std(0), *np.quantile(x, (0.05, 0.95), axis=0)]), len(x)


def squared_errors(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Of each quantity, the mean over scalars of its squared error in units of the variance of a draw."""
    center, sd, low, high = places
    u = (x - center) / sd
    found = np.stack([u.mean(0), (u**2).mean(0) - 1, (x < low).mean(0) - 0.05, (x > high).mean(0) - 0.05])
    return (found**2).mean(1) / VARIANCES


def measured(name: str, label: str) -> dict:
    """A row: squared errors by run and quantity, gradients and seconds."""
    places, _ = reference(name)
    make, _ = METHODS[label]
    row: dict = {"posterior": name, "method": label}
    # Not on the clock: only we have to be counted by a run of its own.
    if getattr(make, "func", None) is ours:
        make = partial(make, in_warmup=counted(problem(name), **make.keywords))
    began = time.process_time()
    program = make(problem(name))
    # The first run compiles; it counts as a run.
    x, gradients = program(0)
    first = time.process_time() - began
    found, seconds = [squared_errors(x, places)], []
    for seed in range(1, RUNS):
        began = time.process_time()
        x, gradients = program(seed)
        seconds.append(time.process_time() - began)
        found.append(squared_errors(x, places))
    errors = np.where(np.isfinite(found), found, np.inf)
    row |= {"errors": [[min(float(e), 1e6) for e in run] for run in errors], "gradients": gradients}
    row |= {"first": first, "seconds": float(np.median(seconds)), "draws": len(x)}
    jax.clear_caches()
    return row


def measure(record: Record) -> None:
    names = NAMES if data_folder() is not None else [name for name in NAMES if name not in POSTERIORDB]
    for name in names:
        for label in METHODS:
            record.row(f"{name} / {label}", partial(measured, name, label))


def worth(row: dict, number: float) -> tuple[int, float, float]:
    """The quantity that is known least, of how many effective draws, and its relative standard error."""
    errors = np.array(row["errors"])
    mean = errors.mean(0)
    worst = int(np.argmax(mean))
    left = mean[worst] - 1 / number
    spread = errors[:, worst].std(ddof=1) / len(errors) ** 0.5
    return worst, 1 / left if left > 0 else np.inf, spread / max(left, 1e-30)


def tables(record: Record) -> str:
    lines = []
    for name in NAMES:
        rows = record.select(posterior=name)
        number = np.inf if name in EXACT else (10_000 if name in POSTERIORDB else REFERENCE)
        for row in rows:
            told = METHODS[row["method"]][1]
            worst, value, error = worth(row, number)
            cell = f"{value:,.0f} ± {value * error:,.0f}"
            # The spread of so few runs is small by chance; that of one parameter's square is not smaller than this.
            if value > number or error > 1.0:
                cell = f"over {number:,.0f}" if value > number else f"about {value:,.0f}"
            value = min(value, number)
            each = " · ".join(f"{1 / e:,.0f}" if e > 1e-6 else "over 1e6" for e in np.array(row["errors"]).mean(0))
            gradients = row["gradients"]
            per = f"{1000 * value / gradients:,.1f}" if np.isfinite(gradients) else "not counted"
            taken = f"{gradients:,.0f}" if np.isfinite(gradients) else ""
            compiled = f"{row['first'] - row['seconds']:.1f}" if row["first"] is not None else "not known"
            seconds = f"{value / row['seconds']:,.0f}", f"{compiled} · {row['seconds']:.1f}"
            lines.append([name, row["method"], f"{cell} ({QUANTITIES[worst]})", each, per, taken, *seconds, told])
    head = ["posterior", "sampler", "least ESS (of what)", "ESS of each, with the error of the reference"]
    head += ["ESS per 1,000 gradients", "gradients", "ESS per second, compiled", "seconds: to compile · of a run"]
    return "**All samplers and posteriors**\n\n" + table([*head, "you supply, besides the model"], lines)
