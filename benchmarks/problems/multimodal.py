"""Mixtures of Gaussians in the plane and in ten dimensions, and how draws from them are scored."""

import itertools

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.special import i0e, i1e
import numpy as np

import numpyro
import numpyro.distributions as dist

GRID = np.array(list(itertools.product((-2.0, 0.0, 2.0), repeat=2)))
#: Seven modes of unequal weights, no grid; fixed before anything was run.
IRREGULAR = np.array([[-1.9, -1.2], [-1.5, 1.7], [-0.2, 0.4], [0.3, -1.8], [1.1, 1.2], [1.9, -0.6], [1.7, 2.0]])
WEIGHTS = np.array([0.05, 0.1, 0.25, 0.15, 0.2, 0.1, 0.15])


def mixture(centers, weights, variance):
    def model():
        which = dist.Categorical(probs=jnp.asarray(weights))
        numpyro.sample("z", dist.MixtureSameFamily(which, dist.Normal(jnp.asarray(centers), variance**0.5).to_event(1)))

    return model


def in_ten(centers):
    return np.concatenate((centers, np.zeros((len(centers), 8))), 1)


#: Centers, weights and the variance about them.
TARGETS = {
    "3 × 3 grid": (GRID, np.full(9, 1 / 9), 0.1),
    "seven irregular modes": (IRREGULAR, WEIGHTS, 0.1),
    "nine modes in 10-d": (in_ten(GRID), np.full(9, 1 / 9), 0.1),
}


def exact(rng, target, number):
    centers, weights, variance = target
    which = rng.choice(len(weights), number, p=weights)
    return centers[which] + variance**0.5 * rng.standard_normal((number, centers.shape[1]))


def mean_distance(squared, variance):
    """``E ‖Y‖`` for Y in the plane, ``N(c, variance · I)`` with ``‖c‖² = squared`` (Rice)."""
    q = squared / (4.0 * variance)
    return (np.pi * variance / 2.0) ** 0.5 * ((1.0 + 2.0 * q) * i0e(q) + 2.0 * q * i1e(q))


class Scores:
    """Energy distance (of the two coordinates that have modes), inflation and mean of a set of draws."""

    def __init__(self, target):
        centers, self.weights, self.variance = target
        self.centers = centers[:, :2]
        self.truth = (self.weights @ centers)[0]
        self.spread = self.weights @ (centers[:, 0] - self.truth) ** 2 + self.variance
        own = self.weights @ mean_distance(self._squared(self.centers), 2 * self.variance) @ self.weights

        def distance(x):
            cross = mean_distance(self._squared(x), self.variance) @ self.weights
            within = lax.map(lambda y: jnp.linalg.norm(x - y, axis=-1).mean(), x, batch_size=200)
            return 2 * cross.mean() - within.mean() - own

        self.distance = jax.jit(distance)

    def _squared(self, x):
        return ((x[:, None] - self.centers) ** 2).sum(-1)

    def __call__(self, draws):
        pair = draws[:, :2]
        nearest = self._squared(pair).argmin(1)
        rest = draws - np.concatenate((self.centers[nearest], np.zeros((len(draws), draws.shape[1] - 2))), 1)
        return float(self.distance(jnp.asarray(pair))), (rest**2).mean() / self.variance, pair[:, 0].mean()
