"""How does cost grow? Time per update against particles, rows, parameters and minibatch rows; memory.

Logistic regression, each particle on its own minibatches; one of the four numbers varies. Whole runs of 200 updates
through `MCMC` are compiled first. Exponents are slopes of a line through the logarithms of the upper half of the sizes.
Memory is what XLA allocates for the program in addition to its arguments and results.
"""

from functools import partial
import statistics

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.runs import in_turns, through_mcmc
from benchmarks.harness.store import Record, table
from benchmarks.problems.targets import logistic_regression
from numpyro_repulsion import RBF, SGHMC, SGHMCR, SGLD, SGLDR
from numpyro_repulsion.interactions import RandomFeatures

BASE = {"L": 20, "N": 10_000, "d": 20, "batch": 100}
SIZES = {
    "L": (5, 10, 20, 40, 80, 160, 320),
    "N": (1_000, 10_000, 100_000, 1_000_000),
    "d": (5, 20, 80, 320, 1280),
    "batch": (10, 40, 160, 640, 2560),
}
NAMES = {"L": "particles", "N": "rows", "d": "parameters", "batch": "minibatch rows"}
KERNELS = {
    "SGLD": SGLD,
    "SGLDR": partial(SGLDR, interaction=RBF(1.0)),
    "SGLDR, random features": partial(SGLDR, interaction=RandomFeatures(1.0, num_features=64)),
    "SGHMC": SGHMC,
    "SGHMCR": partial(SGHMCR, interaction=RBF(1.0)),
}
UPDATES = 200


def timed(varied, size, name):
    """Median seconds of an update, and the bytes that the program sets aside."""
    sizes = BASE | {varied: size}
    N, d = sizes["N"], sizes["d"]
    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.standard_normal((N, d)), jnp.float32)
    y = jnp.asarray(rng.random(N) < 0.5, jnp.float32)
    kernel = KERNELS[name](partial(logistic_regression, subsample_size=sizes["batch"]), step_size=1e-6)
    start = {"beta": jnp.asarray(0.1 * rng.standard_normal((sizes["L"], d)), jnp.float32)}

    compiled = through_mcmc(kernel, UPDATES, sizes["L"], init_params=start).lower(random.key(0), X, y).compile()
    memory = compiled.memory_analysis()
    seconds = [x / UPDATES for x in in_turns({"one": compiled}, (X, y), 9)["one"]]
    row = {"varied": varied, "size": size, "kernel": name, "seconds": statistics.median(seconds)}
    row |= {"range": [min(seconds), max(seconds)]}
    return row | {"bytes": None if memory is None else memory.temp_size_in_bytes}


def measure(record):
    for varied, sizes in SIZES.items():
        for size in sizes:
            for name in KERNELS:
                record.row(f"{varied} {size} {name}", partial(timed, varied, size, name))
            jax.clear_caches()


def exponent(rows):
    """The slope of log time over log size, upper half of the sizes."""
    size, seconds = np.array([(row["size"], row["seconds"]) for row in rows]).T
    upper = slice((len(size) - 1) // 2, None)
    return np.polyfit(np.log(size[upper]), np.log(seconds[upper]), 1)[0]


def tables(record: Record) -> str:
    sections = []
    for varied, name in NAMES.items():
        mine = record.select(varied=varied)
        sizes = sorted({row["size"] for row in mine})
        lines = []
        for kernel in dict.fromkeys(row["kernel"] for row in mine):
            rows = sorted(record.select(varied=varied, kernel=kernel), key=lambda row: row["size"])
            cells = [f"{1e6 * row['seconds']:,.0f} · {(row['bytes'] or np.nan) / 2**20:,.1f}" for row in rows]
            lines.append([f"`{kernel}`", *cells, f"{exponent(rows):.2f}"])
        head = [f"{name}: µs per update · MiB", *(f"{size:,}" for size in sizes), "exponent"]
        sections.append(table(head, lines))
    fixed = ", ".join(f"{size:,} {NAMES[name]}" for name, size in BASE.items())
    sections.append(f"Values that do not vary: {fixed}.")
    return "\n\n".join(sections)
