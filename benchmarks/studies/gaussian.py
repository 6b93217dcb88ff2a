"""The paper's first example: six particles on N(0, I) in the plane, by SVGD and by plain SGLD with repulsion.

The particles start from N((3, 3), I/4) and make 200 updates. The paper estimates the mean and the two standard
deviations, and does not say from which particles. Here they come once from the last six particles and once from the
last hundred iterations. The bandwidth is the median rule on the starting particles, or the one that is given.
"""

from functools import partial

from jax import random
import numpy as np

from benchmarks.harness.runs import mean_and_error, repeats
from benchmarks.harness.store import Record, plain, pm, table
from benchmarks.problems.targets import gaussian
from numpyro_repulsion import RBF, SGLD, SGLDR, SVGD, Independent
from numpyro_repulsion.dynamics import Overdamped

PARTICLES, UPDATES, STEP, LAST, REPEATS = 6, 200, 0.05, 100, 200
SAMPLERS = {
    "SVGD": SVGD,
    "SGLD+R": SGLDR,
    "SGLD+R, h = 2": partial(SGLDR, interaction=RBF(2.0)),
    "SGLD": partial(SGLD, interaction=Independent(), dynamics=Overdamped("euler")),
}
#: As the paper prints them, for a target that its own notebook had with variance 1/2.
PAPER = {"SVGD": (0.18, 0.70, 0.74), "SGLD+R": (0.08, 0.90, 0.87)}


def start(key):
    return 3.0 + 0.5 * random.normal(key, (PARTICLES, 2))


def estimates(clouds):
    """``|mean|``, averaged over the coordinates, and the standard deviations, from points ``(..., point, 2)``."""
    mean, deviation = clouds.mean(-2), clouds.std(-2)
    return np.abs(mean).mean(-1), deviation[..., 0], deviation[..., 1]


def summarize(clouds):
    """Means and standard errors over repeats: of clouds ``(seed, particle, draw, 2)``."""
    pooled = clouds[:, :, -LAST:].reshape(len(clouds), -1, 2)
    return {
        "last cloud": [mean_and_error(x) for x in estimates(clouds[:, :, -1])],
        "last hundred clouds": [mean_and_error(x) for x in estimates(pooled)],
    }


def measure(record):
    def of(kernel):
        def make(step):
            return kernel(gaussian, step_size=step, num_steps=1)

        run = repeats(make, start=start, num_warmup=0, num_samples=UPDATES, num_chains=PARTICLES)
        clouds, _ = run(STEP, range(REPEATS))
        return {"repeats": REPEATS, "trajectories": np.round(clouds[0], 3).tolist()} | summarize(clouds)

    for name, kernel in SAMPLERS.items():
        record.row(name, partial(of, kernel))
    independent = np.random.default_rng(1).standard_normal((REPEATS, PARTICLES, UPDATES, 2))
    record.row("independent draws", lambda: {"repeats": REPEATS} | summarize(independent))


def tables(record: Record) -> str:
    lines = []
    for stored, what in (("last cloud", "last particles"), ("last hundred clouds", "last hundred iterations")):
        for name, row in record.rows.items():
            lines.append([what, plain(name), *(pm(*cell) for cell in row[stored])])
    lines += [["the paper", plain(name), *(f"{value:.2f}" for value in values)] for name, values in PAPER.items()]
    head = ("from", "sampler", "mean: 0", "σ of x: 1", "σ of y: 1")
    return table(head, lines) + f"\n\nStep {STEP}, means and standard errors over {REPEATS} repeats."
