"""What many particles cost: time for an update of interactions whose cost is linear in their number.

Overdamped dynamics on N(0, I) in ten dimensions, groups and frequencies drawn anew in every update, beside the Gram
matrix of the RBF kernel as far as that goes; microseconds for an update, and for each particle of it. Every round runs
all interactions at one size in turn; medians over rounds.

    python -m benchmarks.studies.particles [--short] [--again]
"""

import resource
import statistics

import jax
from jax import lax, random
import jax.numpy as jnp

from benchmarks.harness.runs import in_turns
from benchmarks.harness.store import Record, run, table
from numpyro_repulsion import RBF, Balanced, Overdamped, RandomFeatures, RandomGroups

DIMENSION = 10
SIZES = (100, 1000, 10_000, 100_000)
INTERACTIONS = {
    "RBF, Gram matrix": RBF(10.0),
    "RandomFeatures, F = 64": RandomFeatures(10.0, num_features=64),
    "RandomGroups of 20": RandomGroups(RBF(10.0), size=20),
    "Balanced": Balanced(),
}
#: Its Gram matrix and Cholesky factor would take 80 GB at 100,000 particles, and minutes at 10,000.
MAX_GRAM = 1000


def updates(interaction, size, count):
    """A program of some updates, from particles that are drawn."""
    dynamics = Overdamped("euler")

    def energy_and_grad(z):
        return 0.5 * jnp.sum(z**2, -1), z

    @jax.jit
    def run(key, z):
        def update(cloud, key):
            interaction_key, noise_key = random.split(key)
            couple = interaction.at(interaction_key, 0).couple
            return dynamics.step(noise_key, cloud, energy_and_grad, couple, 1e-3), None

        cloud = dynamics.init(key, z, energy_and_grad, interaction.couple)
        return lax.scan(update, cloud, random.split(key, count))[0].z

    return run


def timed(size, rounds):
    """Seconds for an update with each interaction, and the most memory that the process took so far."""
    count = max(2, min(100, 200_000 // size))
    programs = {
        name: updates(interaction, size, count)
        for name, interaction in INTERACTIONS.items()
        if not (isinstance(interaction, RBF) and size > MAX_GRAM)
    }
    seconds = in_turns(programs, (random.normal(random.key(0), (size, DIMENSION)),), rounds)
    return {
        "size": size,
        "rounds": rounds,
        "seconds": {name: statistics.median(times) / count for name, times in seconds.items()},
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def measure(record: Record) -> None:
    for size in SIZES[:-1] if record.short else SIZES:
        record.row(f"L = {size}", lambda size=size: timed(size, 2 if record.short else 5))


def tables(record: Record) -> str:
    rows = sorted(record.rows.values(), key=lambda row: row["size"])
    lines = []
    for name in INTERACTIONS:
        cells = []
        for row in rows:
            seconds = row["seconds"].get(name)
            cells.append(f"{1e6 * seconds:,.0f} · {1e6 * seconds / row['size']:.2f}" if seconds else "not run")
        lines.append([name, *cells])
    head = ["µs per update · µs per particle", *(f"L = {row['size']:,}" for row in rows)]
    peak = max(row.get("peak_gib", 0.0) for row in rows)
    rounds = rows[0]["rounds"]
    return f"{table(head, lines)}\n\nMedians of {rounds} rounds. The process took {peak:.1f} GiB at its peak."


if __name__ == "__main__":
    run(__doc__, "particles", measure, tables, None)
