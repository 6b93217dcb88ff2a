"""Deep linear networks with a teacher, whose learning coefficients are known.

The teacher's layers are diagonal, each of the rank of the whole, so it is among the most singular of the weights with
its product: at others the local learning coefficient is larger than the one that the theorem gives.
"""

import itertools
import math

from jax import random
import numpy as np

import numpyro
import numpyro.distributions as dist

#: (widths from inputs to outputs, rank): reduced-rank regression in all four cases of Aoyagi and Watanabe, and deeper.
NETWORKS = (
    ((3, 2, 6), 1),
    ((5, 3, 5), 2),
    ((4, 3, 8), 1),
    ((3, 8, 4), 2),
    ((4, 4, 4, 4), 2),
)
NUM_ROWS = 20_000
BATCH = 200


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
    """The weights of the teacher by site."""
    pairs = itertools.pairwise(widths)
    return {f"w{i}": np.eye(a, b) * (np.arange(a) < rank)[:, None] for i, (a, b) in enumerate(pairs)}


def data(widths, rank, number=NUM_ROWS):
    """Covariates, uniform on [-10, 10], and the teacher's outputs without noise, so that its loss is the lowest."""
    x = random.uniform(random.key(0), (number, widths[0]), minval=-10, maxval=10)
    return x, x @ np.linalg.multi_dot([np.eye(widths[0]), *teacher(widths, rank).values()])


def sample_weights(widths):
    pairs = itertools.pairwise(widths)
    return [numpyro.sample(f"w{i}", dist.Normal(0, 10).expand(pair).to_event(2)) for i, pair in enumerate(pairs)]


def network(widths, x, y):
    """The model, with minibatches."""
    weights = sample_weights(widths)
    with numpyro.plate("rows", len(x), subsample_size=BATCH) as i:
        h = x[i]
        for w in weights:
            h = h @ w
        numpyro.sample("y", dist.Normal(h, 1).to_event(1), obs=y[i])


def loss(weights, gram, truth):
    """Its loss over all rows, above that of the teacher, by the Gram matrix of the covariates."""
    error = weights[0]
    for w in weights[1:]:
        error = error @ w
    error = error - truth
    return 0.5 * (error * (gram @ error)).sum()
