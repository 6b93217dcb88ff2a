"""Does `llc` find the learning coefficients of deep linear networks, with nothing set?

20,000 rows, minibatches of 200, noise of variance 1 in the model and none in the data; a tether of strength 1 at the
teacher, a prior of standard deviation 10, and inverse temperature 1 / log n. Ten particles, 1,000 iterations of warmup
and as many draws of ten updates. The theorem's value holds for n without end; beside it stands that of this posterior,
from NUTS on all rows (two chains of 2,000 draws).

    python -m benchmarks.studies.learning_coefficients [--again]
"""

from functools import partial
import itertools
import math
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import NUTS, init_to_value

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, run, table
from benchmarks.problems.linear_networks import NETWORKS, coefficient, data, loss, network, sample_weights, teacher
from numpyro_repulsion import SGHMC, SGLD, SGNHT, init_around
from numpyro_repulsion.contrib import Localized, llc

KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC, "SGNHT": SGNHT}


def settings(widths, rank, number):
    return {"center": teacher(widths, rank), "strength": 1.0, "inverse_temperature": 1 / math.log(number)}


def by_llc(widths, rank, kernel):
    """λ̂ with nothing set."""
    x, y = data(widths, rank)
    local = Localized(network, **settings(widths, rank, len(x)))
    began = time.perf_counter()
    mcmc = vectorized(KERNELS[kernel](local, init_strategy=init_around(local.center, scale=0.05)), 1000, 1000, 10)
    mcmc.run(random.key(0), widths, x, y)
    found = llc(mcmc)
    return {"value": found.value, "error": found.mcse, "seconds": time.perf_counter() - began}


def by_nuts(widths, rank):
    """λ̂ of the same posterior, from draws of NUTS on all rows."""
    x, _ = data(widths, rank)
    center, gram = teacher(widths, rank), np.asarray(x, float).T @ np.asarray(x, float)
    truth = np.linalg.multi_dot([np.eye(widths[0]), *center.values()])

    def model():
        numpyro.factor("likelihood", -loss(sample_weights(widths), jnp.asarray(gram), truth))

    local = Localized(model, factors=["likelihood"], **settings(widths, rank, len(x)))
    began = time.perf_counter()
    nuts = NUTS(local, init_strategy=init_to_value(values=center), target_accept_prob=0.9)
    mcmc = vectorized(nuts, 1500, 2000, 2)
    mcmc.run(random.key(0))
    draws = mcmc.get_samples(group_by_chain=True)
    losses = jax.vmap(jax.vmap(lambda one: loss([one[name] for name in center], jnp.asarray(gram), truth)))(draws)
    values = np.asarray(losses, float) * local.inverse_temperature
    error = values.std() / float(effective_sample_size(values)) ** 0.5
    return {"value": values.mean(), "error": error, "seconds": time.perf_counter() - began}


def measure(record: Record) -> None:
    for widths, rank in NETWORKS:
        for kernel in KERNELS:
            record.row(f"{widths}, rank {rank}, {kernel}", partial(by_llc, widths, rank, kernel))
        record.row(f"{widths}, rank {rank}, NUTS", partial(by_nuts, widths, rank))


def cell(row):
    if row is None:
        return "not run"
    error = f"± {row['error']:.2f}" if np.isfinite(row["error"]) else "± unknown"
    return f"{row['value']:.2f} {error}"


def tables(record: Record) -> str:
    lines = []
    for widths, rank in NETWORKS:
        rows = {kernel: record.rows.get(f"{widths}, rank {rank}, {kernel}") for kernel in ("NUTS", *KERNELS)}
        if not any(rows.values()):
            continue
        half = sum(a * b for a, b in itertools.pairwise(widths)) / 2
        known = coefficient(widths, rank)
        lines.append(["-".join(map(str, widths)), str(rank), f"{half:g}", f"{known:g}", *map(cell, rows.values())])
    return table(["widths", "rank", "d/2", "theorem", "NUTS, all rows", *KERNELS], lines)


if __name__ == "__main__":
    run(__doc__, "learning_coefficients", measure, tables)
