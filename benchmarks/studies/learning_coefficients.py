"""Does `llc` find the learning coefficients of deep linear networks with default settings?

20,000 rows, minibatches of 200, noise of variance 1 in the model and none in the data; a tether of strength 1 at the
teacher, a prior of standard deviation 10, and inverse temperature 1 / log n. Ten particles make 1,000 iterations of
warmup and as many draws of ten updates. The theorem's value holds as n goes to infinity; the value for this posterior
comes from NUTS on all rows (two chains of 2,000 draws).
"""

from functools import partial, reduce
import itertools
import math
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import NUTS, init_to_value

from benchmarks.harness.runs import vectorized
from benchmarks.harness.store import Record, table
from numpyro_repulsion import SGHMC, SGLD, SGNHT, init_around
from numpyro_repulsion.contrib import Localized, llc

KERNELS = {"SGLD": SGLD, "SGHMC": SGHMC, "SGNHT": SGNHT}
#: (widths from inputs to outputs, rank): reduced-rank regression in all four cases of Aoyagi and Watanabe, and deeper.
NETWORKS = (((3, 2, 6), 1), ((5, 3, 5), 2), ((4, 3, 8), 1), ((3, 8, 4), 2), ((4, 4, 4, 4), 2))
NUM_ROWS, BATCH = 20_000, 200


def coefficient(widths, rank):
    """λ by theorem 1 of Aoyagi (2024), Neural Networks 172, as in appendix J of Lau et al., arXiv 2308.12108."""
    excess = [width - rank for width in widths]
    for size in range(2, len(widths) + 1):
        for chosen in itertools.combinations(range(len(widths)), size):
            some = [excess[i] for i in chosen]
            others = [excess[i] for i in range(len(widths)) if i not in chosen]
            last, total = size - 1, sum(some)
            if total < last * max(some):
                continue
            if others and not (max(some) < min(others) and total < last * min(others)):
                continue
            a = total - (math.ceil(total / last) - 1) * last
            pairs = sum(x * y for x, y in itertools.combinations(some, 2))
            first = (rank * (widths[0] + widths[-1]) - rank**2) / 2
            return first + a * (last - a) / (4 * last) - (last - 1) / (4 * last) * total**2 + pairs / 2
    raise ValueError(f"no set of layers of {widths} with rank {rank}")


def teacher(widths, rank):
    """The weights of the teacher by site: diagonal layers of the rank of all, so among the most singular ones."""
    pairs = itertools.pairwise(widths)
    return {f"w{i}": np.eye(a, b) * (np.arange(a) < rank)[:, None] for i, (a, b) in enumerate(pairs)}


def data(widths, rank):
    """Covariates, uniform on [-10, 10], and the teacher's outputs without noise, so that its loss is the lowest."""
    x = random.uniform(random.key(0), (NUM_ROWS, widths[0]), minval=-10, maxval=10)
    return x, x @ np.linalg.multi_dot([np.eye(widths[0]), *teacher(widths, rank).values()])


def sample_weights(widths):
    pairs = itertools.pairwise(widths)
    return [numpyro.sample(f"w{i}", dist.Normal(0, 10).expand(pair).to_event(2)) for i, pair in enumerate(pairs)]


def network(widths, x, y):
    """The model, with minibatches."""
    weights = sample_weights(widths)
    with numpyro.plate("rows", len(x), subsample_size=BATCH) as i:
        h = reduce(jnp.matmul, weights, x[i])
        numpyro.sample("y", dist.Normal(h, 1).to_event(1), obs=y[i])


def loss(weights, gram, truth):
    """Its loss over all rows, above that of the teacher, by the Gram matrix of the covariates."""
    error = reduce(jnp.matmul, weights) - truth
    return 0.5 * (error * (gram @ error)).sum()


def settings(widths, rank):
    return {"center": teacher(widths, rank), "strength": 1.0, "inverse_temperature": 1 / math.log(NUM_ROWS)}


def by_llc(widths, rank, kernel):
    """λ̂ with nothing set."""
    x, y = data(widths, rank)
    local = Localized(network, **settings(widths, rank))
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

    local = Localized(model, factors=["likelihood"], **settings(widths, rank))
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


def tables(record: Record) -> str:
    lines = []
    for widths, rank in NETWORKS:
        rows = [record.rows[f"{widths}, rank {rank}, {kernel}"] for kernel in ("NUTS", *KERNELS)]
        cells = [f"{row['value']:.2f} ± {row['error']:.2f}".replace("nan", "unknown") for row in rows]
        half = sum(a * b for a, b in itertools.pairwise(widths)) / 2
        known = coefficient(widths, rank)
        lines.append(["-".join(map(str, widths)), str(rank), f"{half:g}", f"{known:g}", *cells])
    return table(["widths", "rank", "d/2", "theorem", "NUTS, all rows", *KERNELS], lines)
