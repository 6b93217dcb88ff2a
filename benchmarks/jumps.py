"""Posteriors of several modes: jumps from an archive, nothing set, beside the same samplers without.

Twenty particles start uniformly in (−2, 2), warm up for 500 updates and run for 500, every tenth kept: 1000 draws.
The energy distance is that from the exact law, in closed form: for n independent draws a mean distance over n. The
inflation is the variance about the nearest mode over its exact value. Effective draws are those of the mean of the
first coordinate, by its mean squared error over seeds. Prints a table in Markdown and writes ``jumps.json`` beside
this file.

    python benchmarks/jumps.py [--seeds 96]
"""

import argparse
import itertools
import json
import pathlib
import time

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import i0e, i1e
import numpy as np
from record import provenance

import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_repulsion import SGHMC, SGLD, SGLDR, SGNHT, Archive, enable_live_warnings
from numpyro_repulsion.targets import gaussian_mixture

PARTICLES, WARMUP, KEPT = 20, 50, 50
GRID = np.array(list(itertools.product((-2.0, 0.0, 2.0), repeat=2)))
#: Seven modes of unequal weights, no grid; fixed before anything was run.
IRREGULAR = np.array([[-1.9, -1.2], [-1.5, 1.7], [-0.2, 0.4], [0.3, -1.8], [1.1, 1.2], [1.9, -0.6], [1.7, 2.0]])
WEIGHTS = np.array([0.05, 0.1, 0.25, 0.15, 0.2, 0.1, 0.15])


def mixture(centres, weights, variance):
    def model():
        which = dist.Categorical(probs=jnp.asarray(weights))
        numpyro.sample("z", dist.MixtureSameFamily(which, dist.Normal(jnp.asarray(centres), variance**0.5).to_event(1)))

    return model


def in_ten(centres):
    return np.concatenate((centres, np.zeros((len(centres), 8))), 1)


#: Centres, weights and the variance about them.
TARGETS = {
    "3 × 3 grid": (GRID, np.full(9, 1 / 9), 0.1),
    "seven irregular modes": (IRREGULAR, WEIGHTS, 0.1),
    "nine modes in 10-d": (in_ten(GRID), np.full(9, 1 / 9), 0.1),
}
SAMPLERS = {
    "`SGLD(moves=Archive())`": (SGLD, Archive()),
    "`SGHMC(moves=Archive())`": (SGHMC, Archive()),
    "`SGNHT(moves=Archive())`": (SGNHT, Archive()),
    "`SGLDR(moves=Archive())`": (SGLDR, Archive()),
    "`SGLD`": (SGLD, None),
    "`SGLDR`": (SGLDR, None),
}


def exact(rng, target, number):
    centres, weights, variance = target
    which = rng.choice(len(weights), number, p=weights)
    return centres[which] + variance**0.5 * rng.standard_normal((number, centres.shape[1]))


def mean_distance(squared, variance):
    """``E ‖Y‖`` for Y in the plane, ``N(c, variance · I)`` with ``‖c‖² = squared`` (Rice)."""
    q = squared / (4.0 * variance)
    return (np.pi * variance / 2.0) ** 0.5 * ((1.0 + 2.0 * q) * i0e(q) + 2.0 * q * i1e(q))


class Scores:
    """Energy distance (of the two coordinates that have modes), inflation and mean of a set of draws."""

    def __init__(self, target):
        centres, self.weights, self.variance = target
        self.centres = centres[:, :2]
        self.truth = (self.weights @ centres)[0]
        self.spread = self.weights @ (centres[:, 0] - self.truth) ** 2 + self.variance
        own = self.weights @ mean_distance(self._squared(self.centres), 2 * self.variance) @ self.weights

        def distance(x):
            cross = mean_distance(self._squared(x), self.variance) @ self.weights
            within = lax.map(lambda y: jnp.linalg.norm(x - y, axis=-1).mean(), x, batch_size=200)
            return 2 * cross.mean() - within.mean() - own

        self.distance = jax.jit(distance)

    def _squared(self, x):
        return ((x[:, None] - self.centres) ** 2).sum(-1)

    def __call__(self, draws):
        pair = draws[:, :2]
        nearest = self._squared(pair).argmin(1)
        rest = draws - np.concatenate((self.centres[nearest], np.zeros((len(draws), draws.shape[1] - 2))), 1)
        return float(self.distance(jnp.asarray(pair))), (rest**2).mean() / self.variance, pair[:, 0].mean()


def runs(kernel, seeds):
    """Kept draws and the last state of one run for each seed, compiled once."""

    @jax.jit
    def sample(state):
        return lax.scan(
            lambda state, _: ((new := kernel.sample(state, (), {})), new.z["z"]), state, length=WARMUP + KEPT
        )

    for seed in range(seeds):
        state = kernel.init(random.split(random.key(seed), PARTICLES), WARMUP, None, (), {})
        began = time.perf_counter()
        state, z = jax.block_until_ready(sample(state))
        yield np.asarray(z[WARMUP:], float).reshape(-1, z.shape[-1]), state, time.perf_counter() - began


def summarize(scores, target):
    distance, inflation, mean = np.array(scores).T
    error = len(scores) ** 0.5
    return {
        "energy_distance": distance.mean(),
        "energy_distance_se": distance.std(ddof=1) / error,
        "inflation": inflation.mean(),
        "inflation_se": inflation.std(ddof=1) / error,
        "effective_draws": target.spread / np.mean((mean - target.truth) ** 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=96)
    seeds = parser.parse_args().seeds
    enable_live_warnings(False)
    table = {}
    for name, target in TARGETS.items():
        score = Scores(target)
        rng = np.random.default_rng(1)
        rows = {"1000 independent draws": summarize([score(exact(rng, target, 1000)) for _ in range(seeds)], score)}
        for label, (kernel, moves) in SAMPLERS.items():
            scores, acceptance, seconds = [], [], []
            model = gaussian_mixture if name == "3 × 3 grid" else mixture(*target)
            for draws, state, wall in runs(kernel(model, moves=moves, init_strategy=init_to_uniform), seeds):
                scores.append(score(draws))
                seconds.append(wall)
                if moves is not None:
                    count, total = state.tuning.jumps.tally
                    acceptance.append(float(total / count))
            rows[label] = summarize(scores, score) | {"seconds": float(np.median(seconds))}
            if acceptance:
                rows[label] |= {"acceptance": float(np.mean(acceptance))}
        table[name] = rows
        print(f"\n{name}\n\n| | energy distance | inflation | effective draws of the mean | acceptance |")
        print("| --- | --- | --- | --- | --- |")
        for label, row in rows.items():
            distance = f"{row['energy_distance']:.4f} ± {row['energy_distance_se']:.4f}"
            inflation = f"{row['inflation']:.3f} ± {row['inflation_se']:.3f}"
            accepted = f"{row['acceptance']:.2f}" if "acceptance" in row else ""
            print(f"| {label} | {distance} | {inflation} | {row['effective_draws']:,.0f} | {accepted} |", flush=True)
    result = {"table": table, "seeds": seeds} | provenance()
    pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
