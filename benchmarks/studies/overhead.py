"""What do repulsion and `MCMC` cost per update of 50 particles of the paper's network?

The network has 50 hidden units and 13 inputs; there are 455 rows, a minibatch of 100 rows for each particle, and ten
updates for each kept draw. The bare loop is a `lax.scan` of the vmapped gradient of NumPyro's potential with the same
minibatches and independent noise. Times are medians over rounds in which the programs run in turn, in one process,
after compilation; a ratio is the median of the rounds' ratios. All of it is done three times.
"""

from functools import partial
import statistics

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.handlers import substitute
from numpyro.infer.util import initialize_model

from benchmarks.harness.runs import in_turns, through_mcmc
from benchmarks.harness.store import Record, table
from benchmarks.problems.targets import bayesian_neural_network
from numpyro_repulsion import RBF, SGLD, SGLDR, Independent
from numpyro_repulsion.dynamics import Overdamped
from numpyro_repulsion.gradients import draw_indices

NUM_PARTICLES, STEP_SIZE, NUM_STEPS = 50, 1e-6, 10
BARE, BASELINE = "bare `lax.scan`", "`SGLD`, the paper's baseline (independent noise, Euler)"
DEFAULT, REPELLED = "`SGLD`, default (balanced and averaged noise)", "`SGLDR`"
#: The program that each is compared with, its name in the table, and the ratio that is aimed at.
COMPARED = {BASELINE: (BARE, "bare", None), DEFAULT: (BARE, "bare", 1.15), REPELLED: (DEFAULT, "`SGLD`", 1.15)}


def bare_scan(model, X, y, num_updates, start):
    """SGLD by hand: a scan of the vmapped gradient of NumPyro's potential, and white noise."""

    def indexed(*args, _rows):
        return substitute(model, data=_rows)(*args)

    plates = {"rows": (X.shape[0], 100)}
    given = {"model_args": (X, y), "model_kwargs": {"_rows": {"rows": jnp.arange(100)}}}
    info = initialize_model(random.key(0), indexed, dynamic_args=True, **given)

    @jax.jit
    def run(key, X, y):
        def energy(z, rows):
            return info.potential_fn(X, y, _rows=rows)(z)

        def update(z, key):
            rows_key, noise_key = random.split(key)
            rows = jax.vmap(lambda k: draw_indices(k, plates))(random.split(rows_key, NUM_PARTICLES))
            gradient = jax.vmap(jax.grad(energy))(z, rows)
            flat, unravel = ravel_pytree(z)
            noise = unravel(random.normal(noise_key, flat.shape))
            z = jax.tree.map(lambda x, g, n: x - STEP_SIZE * g + (2 * STEP_SIZE) ** 0.5 * n, z, gradient, noise)
            return z, None

        def iteration(z, keys):
            z, _ = lax.scan(update, z, keys)
            return z, z

        keys = random.split(key, num_updates).reshape(-1, NUM_STEPS)
        return lax.scan(iteration, start, keys)[1]

    return run


def timed(num_updates, rounds):
    """Microseconds for an update, and ratios."""
    X = random.normal(random.key(0), (455, 13))
    y = jnp.sin(X[:, 0]) + 0.1 * random.normal(random.key(1), (455,))
    model = partial(bayesian_neural_network, subsample_size=100)
    kernels = {
        DEFAULT: SGLD(model, step_size=STEP_SIZE),
        BASELINE: SGLD(model, step_size=STEP_SIZE, interaction=Independent(), dynamics=Overdamped("euler")),
        REPELLED: SGLDR(model, step_size=STEP_SIZE, interaction=RBF()),
    }
    start = kernels[DEFAULT].init(random.split(random.key(2), NUM_PARTICLES), 0, None, (X, y), {}).z
    programs = {BARE: bare_scan(model, X, y, num_updates, start)}
    programs |= {name: through_mcmc(kernel, num_updates, NUM_PARTICLES) for name, kernel in kernels.items()}
    seconds = in_turns(programs, (X, y), rounds)

    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))
        for name, (other, _, _) in COMPARED.items()
    }
    times = {name: 1e6 * statistics.median(times) / num_updates for name, times in seconds.items()}
    return {"rounds": rounds, "num_updates": num_updates, "microseconds": times, "ratios": ratios}


def measure(record: Record) -> None:
    for number in range(1, 4):
        record.row(f"run {number}", lambda: timed(500, 9))


def tables(record: Record) -> str:
    rows = record.rows.values()
    lines = []
    for name in (BARE, *COMPARED):
        _, other, target = COMPARED.get(name, (None, "", None))
        ratios = [row["ratios"][name] for row in rows] if other else []
        cells = (f"**{ratio:.2f}**" if target and ratio > target else f"{ratio:.2f}" for ratio in ratios)
        over = f"{', '.join(cells)} of {other}" if other else ""
        times = ", ".join(f"{row['microseconds'][name]:.0f}" for row in rows)
        lines.append([name.replace("balanced", "zero-sum"), times, over, str(target or "")])
    runs = ", ".join(name.removeprefix("run ") for name in record.rows)
    return table(["", f"µs per update, run {runs}", f"ratio, run {runs}", "target"], lines)
