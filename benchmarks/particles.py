"""What many particles cost: time per update and per particle of interactions whose cost is linear in their number.

Overdamped dynamics on N(0, I) in ten dimensions, beside the Gram matrix of the RBF kernel as far as that goes. Every
round runs all interactions at one size in turn; medians over rounds. Prints a table in Markdown and writes
``particles.json`` beside this file.

    python benchmarks/particles.py [--rounds 5]
"""

import argparse
import json
import pathlib
import resource
import statistics
import time

import jax
from jax import lax, random
import jax.numpy as jnp
from record import provenance

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


def updates(interaction, size):
    """A compiled run of some updates, and how many they are."""
    count = max(2, min(100, 200_000 // size))
    dynamics = Overdamped("euler")

    def force(z):
        return 0.5 * jnp.sum(z**2, -1), z

    @jax.jit
    def run(z, key):
        def update(cloud, key):
            interaction_key, noise_key = random.split(key)
            couple = interaction.at(interaction_key, 0).couple
            return dynamics.step(noise_key, cloud, force, couple, 1e-3), None

        cloud = dynamics.init(key, z, force, interaction.couple)
        return lax.scan(update, cloud, random.split(key, count))[0].z

    z = random.normal(random.key(0), (size, DIMENSION))
    run(z, random.key(1)).block_until_ready()
    return lambda key: run(z, key).block_until_ready(), count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    table = {}
    for size in SIZES:
        programs = {
            name: updates(interaction, size)
            for name, interaction in INTERACTIONS.items()
            if not (isinstance(interaction, RBF) and size > MAX_GRAM)
        }
        seconds = {name: [] for name in programs}
        for i in range(arguments.rounds):
            for name, (run, count) in programs.items():
                began = time.perf_counter()
                run(random.key(i))
                seconds[name].append((time.perf_counter() - began) / count)
        table[size] = {name: statistics.median(times) for name, times in seconds.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("| µs per update · µs per particle | " + " | ".join(f"L = {size:,}" for size in SIZES) + " |")
    print("| --- " * (1 + len(SIZES)) + "|")
    for name in INTERACTIONS:
        cells = [
            f"{1e6 * t:,.0f} · {1e6 * t / size:.2f}" if (t := table[size].get(name)) else "not run" for size in SIZES
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\nPeak memory of the process: {peak:.1f} GiB")
    result = {"seconds_per_update": table, "peak_memory_gib": peak} | provenance()
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
