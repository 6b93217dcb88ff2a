"""Posteriors of several modes: jumps from an archive, nothing else set, beside the same samplers without.

Twenty particles start uniformly in (−2, 2), warm up for 500 updates and run for 500, of which every tenth is kept: 1000
draws. The energy distance is that of the draws from the exact law, in closed form; 1000 independent ones stand beside.
Inflation is the variance about the nearest mode over its exact value (0.96 for the irregular modes, some of which are
cut off by their neighbors). Effective draws are those of the mean of the first coordinate, by its mean squared error
over seeds. ± is a standard error over seeds.

    python -m benchmarks.studies.jumps [--again]
"""

from functools import cache, partial
import time

import jax
from jax import lax, random
import numpy as np

from numpyro.infer import init_to_uniform

from benchmarks.harness.runs import mean_and_error
from benchmarks.harness.store import Record, pm, run, table
from benchmarks.problems.multimodal import TARGETS, Scores, exact, mixture
from benchmarks.problems.targets import gaussian_mixture
from numpyro_repulsion import SGHMC, SGLD, SGLDR, SGNHT, Archive

PARTICLES, WARMUP, KEPT, SEEDS = 20, 50, 50, 96
EXACT = "1000 independent draws"
SAMPLERS = {
    "`SGLD(moves=Archive())`": (SGLD, Archive()),
    "`SGHMC(moves=Archive())`": (SGHMC, Archive()),
    "`SGNHT(moves=Archive())`": (SGNHT, Archive()),
    "`SGLDR(moves=Archive())`": (SGLDR, Archive()),
    "`SGLD`": (SGLD, None),
    "`SGLDR`": (SGLDR, None),
}


@cache
def scores(target):
    return Scores(TARGETS[target])


def runs(kernel):
    """Kept draws and the last state of one run for each seed, compiled once."""

    @jax.jit
    def sample(state):
        return lax.scan(
            lambda state, _: ((new := kernel.sample(state, (), {})), new.z["z"]), state, length=WARMUP + KEPT
        )

    for seed in range(SEEDS):
        state = kernel.init(random.split(random.key(seed), PARTICLES), WARMUP, None, (), {})
        began = time.perf_counter()
        state, z = jax.block_until_ready(sample(state))
        yield np.asarray(z[WARMUP:], float).reshape(-1, z.shape[-1]), state, time.perf_counter() - began


def summarize(found, target, sampler):
    """A row of what :class:`Scores` say of each seed's draws."""
    distance, inflation, mean = np.array(found).T
    score = scores(target)
    return {
        "target": target,
        "sampler": sampler,
        "seeds": len(found),
        "energy_distance": mean_and_error(distance),
        "inflation": mean_and_error(inflation),
        "effective_draws": float(score.spread / np.mean((mean - score.truth) ** 2)),
    }


def independent(target):
    rng = np.random.default_rng(1)
    return summarize([scores(target)(exact(rng, TARGETS[target], 1000)) for _ in range(SEEDS)], target, EXACT)


def sampled(target, sampler):
    kernel, moves = SAMPLERS[sampler]
    model = gaussian_mixture if target == "3 × 3 grid" else mixture(*TARGETS[target])
    found, acceptance, seconds = [], [], []
    for draws, state, wall in runs(kernel(model, moves=moves, init_strategy=init_to_uniform)):
        found.append(scores(target)(draws))
        seconds.append(wall)
        if moves is not None:
            count, total = state.warmup.jumps.tally
            acceptance.append(float(total / count))
    row = summarize(found, target, sampler) | {"seconds": float(np.median(seconds))}
    return row | ({"acceptance": float(np.mean(acceptance))} if acceptance else {})


def measure(record: Record) -> None:
    for target in TARGETS:
        record.row(f"{target} / {EXACT}", partial(independent, target))
        for sampler in SAMPLERS:
            record.row(f"{target} / {sampler}", partial(sampled, target, sampler))


def tables(record: Record) -> str:
    parts = []
    for target in dict.fromkeys(row["target"] for row in record.rows.values()):
        lines = [
            [
                row["sampler"],
                pm(*row["energy_distance"], digits=4),
                pm(*row["inflation"], digits=3),
                f"{row['effective_draws']:,.0f}",
                f"{row['acceptance']:.2f}" if "acceptance" in row else "",
            ]
            for row in record.select(target=target)
        ]
        head = [target, "energy distance", "inflation", "effective draws of the mean", "acceptance"]
        parts.append(table(head, lines))
    seeds = next(iter(record.rows.values()))["seeds"]
    return "\n\n".join([*parts, f"{seeds} seeds."])


if __name__ == "__main__":
    run(__doc__, "jumps", measure, tables)
