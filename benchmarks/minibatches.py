"""Own minibatches at less cost: which rows particles look at, how rows are fetched, how gradients are multiplied out.

SGLD with balanced and averaged noise on the logistic regression with many rows, in bare compiled loops with steps
given: time per update, in turns, and the error of the means when all have had the same time. Then the cheapest way
that keeps minibatches of one's own, as a ``Gradient`` of a few lines, through ``MCMC`` with nothing else set.

    python benchmarks/minibatches.py [--short] [--again]
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
import large
from large import BATCH, DIMENSION, PARTICLES, ROWS
import matplotlib.pyplot as plt
import numpy as np
from peer_samplers import Sampler, ours
from peers import accuracy, accuracy_table
from record import pm, run, table
from turns import in_turns, middle

from numpyro_repulsion import SGLD, ControlVariates, enable_live_warnings
from numpyro_repulsion.gradients import draw_indices

#: Without control variates gradient noise is most of the noise already at a step of 1e-6.
STEPS = {"plain": 2e-7, "control variates": 1e-5}


def strata(key, count, number):
    """One row from each of as many strata as there are rows in a minibatch, as the package draws them."""
    del count
    return draw_indices(key, {"rows": (ROWS, BATCH)}, (number,))["rows"]


def independent(key, count, number):
    """With replacement."""
    del count
    return random.randint(key, (number, BATCH), 0, ROWS)


def pieces(key, count, number, length=25):
    """Short pieces of the order of the rows, from anywhere."""
    del count
    starts = random.randint(key, (number, BATCH // length, 1), 0, ROWS)
    return _wrapped(starts + jnp.arange(length)).reshape(number, BATCH)


def contiguous(key, count, number):
    """Rows in a row, from anywhere: unbiased in any order of the rows, for each is in as many minibatches."""
    del count
    return _wrapped(random.randint(key, (number, 1), 0, ROWS) + jnp.arange(BATCH))


def one_after_another(key, count, number):
    """Each goes on where its last minibatch ended, so that none is drawn; the starts are spread evenly."""
    del key
    starts = jnp.arange(number) * (ROWS // number) + count * BATCH % ROWS
    return _wrapped(starts[:, None] + jnp.arange(BATCH))


def _wrapped(rows):
    return jnp.where(rows >= ROWS, rows - ROWS, rows)


def gathered(rows, X, y):
    return X[rows], y[rows]


def sliced(rows, X, y):
    """The same rows where they are contiguous, as slices of data whose first rows stand once more at the end."""

    def one(row):
        return lax.dynamic_slice_in_dim(X, row, BATCH), lax.dynamic_slice_in_dim(y, row, BATCH)

    return jax.vmap(one)(rows[:, 0])


def autodiff(z, X, y):
    """The gradient of the likelihood's part of U on one minibatch for several particles, ``(g, d)``."""

    def energy(z):
        logits = X @ z
        return ROWS / BATCH * jnp.sum(jax.nn.softplus(logits) - y * logits)

    return jax.vmap(jax.grad(energy))(z)


def product(z, X, y):
    """The same as two matrix products over all particles."""
    return ROWS / BATCH * (jax.nn.sigmoid(z @ X.T) - y) @ X


@dataclass(frozen=True)
class Scheme:
    """How an update comes by its gradients: ``number`` minibatches, each for as many neighbouring particles."""

    name: str
    number: int
    rows: Callable = strata
    fetch: Callable = gathered
    gradient: Callable = autodiff
    #: Whether rows are ordered by what they say.
    is_sorted: bool = False
    in_short: bool = False


SCHEMES = [
    Scheme("own", PARTICLES, in_short=True),
    Scheme("own, with replacement", PARTICLES, independent),
    Scheme("own, matrix products", PARTICLES, gradient=product),
    Scheme("groups of 2", 10),
    Scheme("groups of 4", 5, in_short=True),
    Scheme("groups of 4, matrix products", 5, gradient=product),
    Scheme("groups of 5", 4),
    Scheme("shared", 1, in_short=True),
    Scheme("shared, matrix products", 1, gradient=product),
    Scheme("own, pieces of 25 rows", PARTICLES, pieces),
    Scheme("own, contiguous", PARTICLES, contiguous, in_short=True),
    Scheme("own, contiguous, slices", PARTICLES, contiguous, sliced),
    Scheme("own, contiguous, slices, matrix products", PARTICLES, contiguous, sliced, product),
    Scheme("groups of 4, contiguous", 5, contiguous),
    Scheme("shared, contiguous", 1, contiguous),
    Scheme("own, one after another", PARTICLES, one_after_another),
    Scheme("own, contiguous, rows sorted by their logits", PARTICLES, contiguous, is_sorted=True),
    Scheme("own, pieces of 25 rows, sorted by their logits", PARTICLES, pieces, is_sorted=True),
]


def simulate(scheme, kind, num_updates, key, X, y, centre, known, start):
    """Means and standard deviations over particles and the last nine tenths of the updates.

    :param centre: the reference of control variates.
    :param known: the gradient of the likelihood's part of U there.
    :param start: ``(L, d)``.
    """
    step_size = STEPS[kind]

    def noise(key):
        white = random.normal(key, start.shape)
        return (PARTICLES / (PARTICLES - 1)) ** 0.5 * (white - white.mean(0))

    def force(key, count, z):
        rows = scheme.fetch(scheme.rows(key, count, scheme.number), X, y)
        groups = z.reshape(scheme.number, -1, DIMENSION)
        found = jax.vmap(scheme.gradient)(groups, *rows)
        if kind == "control variates":
            found = found - jax.vmap(lambda X, y: scheme.gradient(centre[None], X, y))(*rows) + known
        return z + found.reshape(z.shape)

    def update(carry, count):
        z, old, total, squares = carry
        rows_key, noise_key = random.split(random.fold_in(key, count))
        new = noise(noise_key)
        z = z - step_size * force(rows_key, count, z) + (2 * step_size) ** 0.5 * (old + new) / 2
        # About the centre, lest squares lose what single precision has.
        seen = jnp.where(count >= num_updates // 10, z - centre, 0.0)
        return (z, new, total + seen.mean(0), squares + (seen**2).mean(0)), None

    zero = jnp.zeros(DIMENSION)
    carry = (start, noise(random.fold_in(key, num_updates)), zero, zero)
    (_, _, total, squares), _ = lax.scan(update, carry, jnp.arange(num_updates))
    kept = num_updates - num_updates // 10
    mean = total / kept
    return centre + mean, jnp.sqrt(squares / kept - mean**2)


class Problem:
    """The data in both orders, the reference, and what control variates know."""

    def __init__(self):
        X, y = large.data()
        self.mean, self.sd = large.reference(X, y)
        order = np.argsort((2 * y - 1) * (X @ self.mean))
        self.data = {
            is_sorted: _repeated(X[rows], y[rows]) for is_sorted, rows in ((False, slice(None)), (True, order))
        }
        self.plain = large.as_jax(X, y)
        self.centre = jnp.asarray(self.mean, jnp.float32)
        p = 1 / (1 + np.exp(-X @ np.asarray(self.centre, float)))
        self.known = jnp.asarray(X.T @ (p - y), jnp.float32)

    def program(self, scheme, kind, num_updates):
        """``key -> (means, standard deviations)``, from particles of about the right spread."""
        simulated = jax.jit(partial(simulate, scheme, kind, num_updates))
        X, y = self.data[scheme.is_sorted]

        def start(key):
            return self.centre + jnp.asarray(self.sd, jnp.float32) * random.normal(key, (PARTICLES, DIMENSION))

        return lambda key: simulated(key, X, y, self.centre, self.known, start(random.fold_in(key, num_updates + 1)))


def _repeated(X, y):
    return large.as_jax(np.concatenate((X, X[:BATCH])), np.concatenate((y, y[:BATCH])))


def time_updates(problem, schemes, short):
    """Microseconds for an update of all particles, and over that of the first scheme, as medians over rounds."""
    num_updates, rounds = (100, 7) if short else (200, 25)
    found = {}
    for kind in STEPS:
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


@dataclass(frozen=True)
class Contiguous(ControlVariates):
    """Control variates on minibatches of rows in a row."""

    def rows(self, key, target, shape):
        shape = shape[:1] if self.shared else shape
        found = {}
        for name, plate_key in zip(target.plates, random.split(key, len(target.plates)), strict=True):
            size, batch = target.plates[name]
            rows = random.randint(plate_key, (*shape, 1), 0, size) + jnp.arange(batch)
            found[name] = jnp.where(rows >= size, rows - size, rows)
        return found, len(shape)


THROUGH_MCMC = [
    Sampler("`SGLD`", setting, ours(SGLD, gradient=gradient), "{0} + {0} iterations of 10", 300, repeats=10)
    for setting, gradient in (
        ("own", ControlVariates()),
        ("own, contiguous", Contiguous()),
        ("shared", ControlVariates(shared=True)),
        ("shared, contiguous", Contiguous(shared=True)),
    )
]


def measure(record):
    problem = Problem()
    schemes = [scheme for scheme in SCHEMES if scheme.in_short or not record.short]
    timed = record.row("updates", lambda: time_updates(problem, schemes, record.short))
    seconds, repeats = (1.0, 4) if record.short else (4.0, 8)
    for scheme in schemes:
        for kind in STEPS:
            micro = timed["kinds"][kind][scheme.name]["microseconds"][0]
            record.row(
                f"error: {scheme.name}, {kind}",
                lambda s=scheme, k=kind, m=micro: error_at(problem, s, k, seconds, m, repeats),
            )
    for sampler in () if record.short else THROUGH_MCMC:
        record.row(
            f"through MCMC: {sampler.setting}",
            lambda s=sampler: accuracy(s, s.length, s.repeats, *problem.plain, (problem.mean, problem.sd)),
        )


def tables(record):
    found = [scheme_table(record, kind) for kind in STEPS]
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


def draw(record):
    """The error of means at equal time, beside the time of an update."""
    figure, axes = plt.subplots(1, len(STEPS), figsize=(11, 5), sharey=True)
    for axis, kind in zip(axes, STEPS, strict=True):
        rows = record.select(part="error", kind=kind)[::-1]
        at = range(len(rows))
        axis.errorbar([r["mean_rms"] for r in rows], at, xerr=[r["mean_rms_se"] for r in rows], fmt="o", capsize=2)
        axis.set(xscale="log", title=f"{kind}, {rows[0]['seconds']:g} s each", xlabel="error of means, sd")
        axis.set_yticks(at, [r["scheme"] for r in rows], fontsize=8)
        axis.grid(axis="y", lw=0.4)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    enable_live_warnings(False)
    run(__doc__, "minibatches", measure, tables, draw)
