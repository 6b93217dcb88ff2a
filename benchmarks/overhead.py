"""What interaction costs, and what ``MCMC`` costs, per update: one process, programs compiled first, then in turns.

The model is the one-hidden-layer network of the paper (50 units, minibatches of 100 rows of its own for each of 50
particles) on synthetic data of the size of the Boston set. Prints a table; writes ``overhead.json`` beside this file.

    python benchmarks/overhead.py [--rounds 9] [--updates 500]
"""

import argparse
from functools import partial
import json
import pathlib
import statistics
import time

import jax
from jax import lax, random
import jax.numpy as jnp
from record import provenance
from turns import in_turns, through_mcmc

from numpyro.handlers import substitute
from numpyro.infer.util import initialize_model

from numpyro_repulsion import RBF, SGLD, SGLDR, Independent, Overdamped
from numpyro_repulsion.gradients import draw_indices
from numpyro_repulsion.targets import bayesian_neural_network

NUM_PARTICLES, STEP_SIZE, NUM_STEPS = 50, 1e-6, 10


def bare_scan(model, X, y, num_updates, start):
    """SGLD by hand: a scan of the vmapped gradient of NumPyro's potential, and white noise."""

    def indexed(*args, _rows):
        return substitute(model, data=_rows)(*args)

    plates = {"rows": (X.shape[0], 100)}
    info = initialize_model(
        random.key(0), indexed, model_args=(X, y), model_kwargs={"_rows": {"rows": jnp.arange(100)}}, dynamic_args=True
    )

    @jax.jit
    def run(key, X, y):
        def energy(z, rows):
            return info.potential_fn(X, y, _rows=rows)(z)

        def update(z, key):
            rows_key, noise_key = random.split(key)
            rows = jax.vmap(lambda k: draw_indices(k, plates))(random.split(rows_key, NUM_PARTICLES))
            gradient = jax.vmap(jax.grad(energy))(z, rows)
            leaves, treedef = jax.tree.flatten(z)
            keys = random.split(noise_key, len(leaves))
            noise = [random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
            noise = jax.tree.unflatten(treedef, noise)
            z = jax.tree.map(lambda x, g, n: x - STEP_SIZE * g + (2 * STEP_SIZE) ** 0.5 * n, z, gradient, noise)
            return z, None

        def iteration(z, keys):
            z, _ = lax.scan(update, z, keys)
            return z, z

        keys = random.split(key, num_updates).reshape(-1, NUM_STEPS)
        return lax.scan(iteration, start, keys)[1]

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=500)
    arguments = parser.parse_args()

    X = random.normal(random.key(0), (455, 13))
    y = jnp.sin(X[:, 0]) + 0.1 * random.normal(random.key(1), (455,))
    model = partial(bayesian_neural_network, subsample_size=100)
    kernels = {
        "SGLD through MCMC": SGLD(model, step_size=STEP_SIZE),
        "SGLD, paper's baseline": SGLD(
            model, step_size=STEP_SIZE, interaction=Independent(), dynamics=Overdamped("euler")
        ),
        "SGLDR through MCMC": SGLDR(model, step_size=STEP_SIZE, interaction=RBF()),
    }
    keys = random.split(random.key(2), NUM_PARTICLES)
    start = kernels["SGLD through MCMC"].init(keys, 0, None, (X, y), {}).z
    programs = {"bare lax.scan": bare_scan(model, X, y, arguments.updates, start)}
    programs |= {name: through_mcmc(kernel, arguments.updates, NUM_PARTICLES) for name, kernel in kernels.items()}
    seconds = {
        name: [time_ / arguments.updates for time_ in times]
        for name, times in in_turns(programs, (X, y), arguments.rounds).items()
    }

    init_seconds = []
    for round_ in range(arguments.rounds):
        began = time.perf_counter()
        state = kernels["SGLDR through MCMC"].init(random.split(random.key(round_), NUM_PARTICLES), 0, None, (X, y), {})
        jax.block_until_ready(state.gradient)
        init_seconds.append(time.perf_counter() - began)
    # The first call compiles.
    later_init = statistics.median(init_seconds[1:])

    def ratio(name, other):
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))

    ratios = {
        "SGLD / bare scan (at most 1.15)": ratio("SGLD through MCMC", "bare lax.scan"),
        "paper's SGLD / bare scan": ratio("SGLD, paper's baseline", "bare lax.scan"),
        "SGLDR / SGLD (at most 1.15)": ratio("SGLDR through MCMC", "SGLD through MCMC"),
    }
    print(f"{NUM_PARTICLES} particles, minibatch 100, {arguments.rounds} rounds of {arguments.updates} updates")
    for name, values in seconds.items():
        low, middle, high = (1e6 * f(values) for f in (min, statistics.median, max))
        print(f"{name:<26} {middle:8.0f} µs per update ({low:.0f} to {high:.0f})")
    print(f"init, second call and later {1e3 * later_init:.0f} ms (first {init_seconds[0]:.1f} s)")
    for name, value in ratios.items():
        print(f"{name:<34} {value:.3f}")
    result = {
        "microseconds_per_update": {name: 1e6 * statistics.median(values) for name, values in seconds.items()},
        "ratios": ratios,
        "init_seconds": later_init,
        "rounds": arguments.rounds,
    } | provenance()
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
