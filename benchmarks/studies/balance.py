"""What balanced and averaged noise gain: logistic regression on all rows, twenty particles, steps given.

200 rows, five parameters, 1000 + 2000 updates, in coordinates whitened at the mode. Each cell has the effective draws
for the worst posterior mean, from its squared error over repeated runs, and the worst error of a posterior variance.
The 40,000 gradients of a run would be worth 40,000 draws if each were one.

    python -m benchmarks.studies.balance [--short] [--again]
"""

from functools import cache

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro.infer.util import initialize_model

from benchmarks.harness.store import Record, run, table
from numpyro_repulsion import Balanced, Independent, Overdamped
from numpyro_repulsion.targets import logistic_regression

NUM_PARTICLES, NUM_WARMUP, NUM_UPDATES = 20, 1000, 2000
STEPS = (0.1, 0.3)
NOISES = {"independent": Independent(), "balanced": Balanced()}
INTEGRATORS = {"euler": "Euler", "lm": "averaged (Leimkuhler-Matthews)"}


@cache
def whitened():
    """Energies and gradients of particles in coordinates whitened at the mode, as warmup would have it."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 5))
    y = (rng.random(200) < 1 / (1 + np.exp(-X @ np.array([1.0, -1.0, 0.5, 0.0, 0.3])))).astype(float)
    info = initialize_model(random.key(0), logistic_regression, model_args=(jnp.asarray(X), jnp.asarray(y)))

    def potential(u):
        return info.potential_fn({"beta": u})

    mode = lax.fori_loop(0, 500, lambda _, z: z - 0.01 * jax.grad(potential)(z), jnp.zeros(5))
    scale = jnp.linalg.cholesky(jnp.linalg.inv(jax.hessian(potential)(mode)))
    return jax.vmap(jax.value_and_grad(lambda u: potential(mode + scale @ u)))


def simulate(key, interaction, integrator, step_size, num_updates):
    """Means and mean squares over particles and the updates after warmup."""
    energy_and_grad, dynamics = whitened(), Overdamped(integrator)
    start_key, init_key, key = random.split(key, 3)
    u = random.normal(start_key, (NUM_PARTICLES, 5))
    cloud = dynamics.init(init_key, u, energy_and_grad, interaction.couple)

    def update(carry, key):
        cloud, count, total, squares = carry
        cloud = dynamics.step(key, cloud, energy_and_grad, interaction.couple, step_size)
        keep = count >= NUM_WARMUP
        total = total + jnp.where(keep, cloud.z.mean(0), 0.0)
        squares = squares + jnp.where(keep, (cloud.z**2).mean(0), 0.0)
        return (cloud, count + 1, total, squares), None

    start = (cloud, 0, jnp.zeros(5), jnp.zeros(5))
    (_, _, total, squares), _ = lax.scan(update, start, random.split(key, num_updates))
    kept = num_updates - NUM_WARMUP
    return total / kept, squares / kept


def repeated(interaction, integrator, step_size, num_updates, repeats):
    """The same of runs side by side, as NumPy arrays ``(repeat, parameter)``."""
    whitened()
    run = jax.jit(jax.vmap(lambda key: simulate(key, interaction, integrator, step_size, num_updates)))
    return jax.tree.map(lambda x: np.asarray(x, float), run(random.split(random.key(1), repeats)))


@cache
def reference(short):
    """Means and variances of a thousand times as many draws, at a step whose bias is far below what is measured."""
    length = (6000, 32) if short else (60_000, 128)
    mean, square = (x.mean(0) for x in repeated(Balanced(), "lm", 0.02, *length))
    return mean, square - mean**2


def measure(record: Record) -> None:
    repeats = 8 if record.short else 64
    for step in STEPS:
        for noise in NOISES:
            for integrator in INTEGRATORS:

                def cell(step=step, noise=noise, integrator=integrator):
                    mean, variance = reference(record.short)
                    means, squares = repeated(NOISES[noise], integrator, step, NUM_WARMUP + NUM_UPDATES, repeats)
                    return {
                        "step_size": step,
                        "noise": noise,
                        "integrator": integrator,
                        "effective_draws": float((variance / ((means - mean) ** 2).mean(0)).min()),
                        "variance_error": float(np.abs((squares - means**2).mean(0) / variance - 1).max()),
                        "repeats": repeats,
                    }

                record.row(f"{step} {noise} {integrator}", cell)


def tables(record: Record) -> str:
    lines = []
    for step in STEPS:
        for noise in NOISES:
            rows = [record.rows[f"{step} {noise} {integrator}"] for integrator in INTEGRATORS]
            cells = (f"{row['effective_draws']:,.0f} · {100 * row['variance_error']:.1f} %" for row in rows)
            lines.append([str(step), noise, *cells])
    number = next(iter(record.rows.values()))["repeats"]
    return table(["ε", "noise", *INTEGRATORS.values()], lines) + f"\n\n{number} repeats."


if __name__ == "__main__":
    run(__doc__, "balance", measure, tables, None)
