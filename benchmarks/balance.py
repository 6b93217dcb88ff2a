"""What balanced and averaged noise gain: logistic regression on all rows, 20 particles, steps given.

The effective sample size is that of the worst posterior mean, from its mean squared error over repeated runs: the
variance of the posterior over the squared error of the run's estimate. Prints a table; writes ``balance.json``.

    python benchmarks/balance.py [--repeats 64]
"""

import argparse
import json
import pathlib

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer.util import initialize_model

from numpyro_repulsion import Balanced, Independent, Overdamped
from numpyro_repulsion.targets import logistic_regression

NUM_PARTICLES, NUM_WARMUP, NUM_UPDATES = 20, 1000, 2000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=64)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 5))
    y = (rng.random(200) < 1 / (1 + np.exp(-X @ np.array([1.0, -1.0, 0.5, 0.0, 0.3])))).astype(float)
    info = initialize_model(random.key(0), logistic_regression, model_args=(jnp.asarray(X), jnp.asarray(y)))
    energy = info.potential_fn

    def potential(u):
        return energy({"beta": u})

    # In coordinates whitened at the mode, as warmup would have it.
    mode = lax.fori_loop(0, 500, lambda _, z: z - 0.01 * jax.grad(potential)(z), jnp.zeros(5))
    scale = jnp.linalg.cholesky(jnp.linalg.inv(jax.hessian(potential)(mode)))
    force = jax.vmap(jax.value_and_grad(lambda u: potential(mode + scale @ u)))

    def simulate(key, interaction, integrator, step_size, num_updates):
        dynamics = Overdamped(integrator)
        start_key, init_key, key = random.split(key, 3)
        u = random.normal(start_key, (NUM_PARTICLES, 5))
        cloud = dynamics.init(init_key, u, force, interaction.couple)

        def update(carry, key):
            cloud, count, total, squares = carry
            cloud = dynamics.step(key, cloud, force, interaction.couple, step_size)
            keep = count >= NUM_WARMUP
            total = total + jnp.where(keep, cloud.z.mean(0), 0.0)
            squares = squares + jnp.where(keep, (cloud.z**2).mean(0), 0.0)
            return (cloud, count + 1, total, squares), None

        start = (cloud, 0, jnp.zeros(5), jnp.zeros(5))
        (_, _, total, squares), _ = lax.scan(update, start, random.split(key, num_updates))
        kept = num_updates - NUM_WARMUP
        return total / kept, squares / kept

    def repeat(interaction, integrator, step_size, num_updates=NUM_WARMUP + NUM_UPDATES, repeats=arguments.repeats):
        run = jax.jit(jax.vmap(lambda key: simulate(key, interaction, integrator, step_size, num_updates)))
        return jax.tree.map(lambda x: np.asarray(x, float), run(random.split(random.key(1), repeats)))

    # The reference: a thousand times as many draws, at a step whose bias is far below what is measured.
    mean, square = (x.mean(0) for x in repeat(Balanced(), "lm", 0.02, 60_000, 128))
    variance = square - mean**2
    rows = []
    print("| ε | noise | Euler | Leimkuhler-Matthews |\n| --- | --- | --- | --- |")
    for step_size in (0.1, 0.3):
        for interaction in (Independent(), Balanced()):
            cells = []
            for integrator in ("euler", "lm"):
                means, squares = repeat(interaction, integrator, step_size)
                draws = (variance / ((means - mean) ** 2).mean(0)).min()
                worst = np.abs((squares - means**2).mean(0) / variance - 1).max()
                cells.append(f"{draws:,.0f} · {100 * worst:.1f} %")
                rows.append(
                    {
                        "step_size": step_size,
                        "noise": repr(interaction),
                        "integrator": integrator,
                        "effective_draws": draws,
                        "variance_error": worst,
                    }
                )
            print(f"| {step_size} | {type(interaction).__name__.lower()} | {' | '.join(cells)} |", flush=True)
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
