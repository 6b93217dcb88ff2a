"""Symptoms of posteriors that no linear change of variables suits: funnels, heavy tails and several basins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

from numpyro_repulsion.rounding import AnyArray, matmul
from numpyro_repulsion.warmup.preconditioner import Preconditioner


@dataclass(frozen=True)
class SymptomConstants:
    """From where on a symptom counts."""

    #: Particles are in several basins if more than this share of a variance is between particles, with a gap of so many
    #: standard deviations of one, each has explored its own, and they are not pulled together (``Widest``).
    share: float = 0.5
    gap: float = 4.0
    explored: float = 0.1
    pull: float = 0.5
    #: How many standard errors count as chance.
    errors: float = 2.0
    #: Tails are heavy if the kurtosis is larger and the tail gradient smaller than these. Measured values of both:
    #: Cauchy distribution 18 to 44 and 0.02 to 0.3; Student's t with two degrees of freedom 17 to 52 and 0.3 to 0.6,
    #: with three 12 to 52 and 0.7 to 1.2, with five 6 to 18 and 1.6 to 1.8; Laplace distribution 9 to 12 and 1.0.
    kurtosis: float = 8.0
    tail_gradient: float = 0.5
    #: The dependence of squared gradients on a coordinate was 0.7 to 1.9 for funnels of 10 to 500 dimensions, but once
    #: 0.47, and at most 0.3 elsewhere, but 0.47 for a local level that momenta sample well; that of one particle over
    #: time 0.3 to 1.1 for funnels, and at most 0.02 in basins of other widths.
    dependence: float = 0.5
    dependence_within: float = 0.1
    #: Sums for each particle, and products of blocks with coordinates, take no more numbers.
    numbers: int = 2**20
    blocks: int = 128


SYMPTOMS = SymptomConstants()


class Widest(NamedTuple):
    """Statistics along the direction in which positions vary most; scalars, 0 before a window has ended.

    Minibatch noise cancels in all of them, because it does not depend on positions.

    """

    #: The variance of the positions, over particles and time.
    variance: Float[AnyArray, ""]
    #: The share of the variance that is between particles, in [0, 1].
    share: Float[AnyArray, ""]
    #: The covariance of position and gradient of one particle over time, over T: at least 1 once it has explored its
    #: basin, whatever the shape of that; less errors.
    explored: Float[AnyArray, ""]
    #: How fast mean gradients grow with the distance between particles, compared with those of one particle: 1 in a
    #: common Gaussian basin, however slow particles are, and 0 in separate ones; plus errors.
    pull: Float[AnyArray, ""]
    #: How fast mean gradients grow with that distance; less errors.
    least_pull: Float[AnyArray, ""]
    #: The largest distance between the means of neighboring particles, beyond that by chance in one wide basin, in
    #: units of the standard deviation of one particle over time.
    gap: Float[AnyArray, ""]

    @property
    def has_basins(self) -> Bool[AnyArray, ""]:
        """Whether the particles are in several basins, between which they do not move; false if unknown."""
        return self._apart & (self.explored > SYMPTOMS.explored) & (self.pull < SYMPTOMS.pull)

    @property
    def may_have_basins(self) -> Bool[AnyArray, ""]:
        """Whether particles keep apart, and no force is seen to pull them together."""
        return self._apart & (self.least_pull <= 0)

    @property
    def _apart(self):
        return (self.share > SYMPTOMS.share) & (self.gap > SYMPTOMS.gap)


class Symptoms(NamedTuple):
    """Sums over particles and iterations since the scales were frozen.

    Positions are relative to the first mean of the particles, because a sum of squares loses a small spread about a
    large mean. x are positions in units of the scales and g gradients, along the coordinates of the model; s is the
    logarithm of the mean squared gradient in each of B blocks of successive coordinates.

    """

    number: Float[AnyArray, ""]  # of pairs of particle and iteration
    origin: Float[AnyArray, " d"]  # the first mean of the particles, whitened
    powers: Float[AnyArray, "_ _"]  # sums of x, x², x⁴, g² and x² g², ``(5, d)``
    logs: Float[AnyArray, "_ _"]  # sums of s and s², ``(2, B)``
    products: Float[AnyArray, "_ _"]  # sums of x s, ``(d, B)``
    places: Float[AnyArray, "_ _"]  # sums of x for each particle; without columns if there would be many
    levels: Float[AnyArray, "_ _"]  # sums of s for each particle, ``(P, B)``
    #: A unit vector in whitened coordinates; power iteration, one step per window, turns it into the direction in which
    #: positions vary most.
    direction: Float[AnyArray, " d"]
    images: Float[AnyArray, "_ _"]  # sums over the window of u and of u (u · direction), ``(2, d)``
    along: Float[AnyArray, "_ _"]  # those of p = u · direction, p², q = ∇U · direction and p q, ``(4, P)``
    length: Float[AnyArray, ""]  # iterations in the window so far
    widest: Widest  # statistics along the direction of the last complete window

    @staticmethod
    def empty(particles: int, dimension: int, dtype) -> Symptoms:
        """Return empty sums, and a random direction."""
        blocks = _num_blocks(dimension)
        direction = np.random.default_rng(0).standard_normal(dimension)
        nothing = jnp.zeros((), dtype)
        return Symptoms(
            number=nothing,
            origin=jnp.zeros(dimension, dtype),
            powers=jnp.zeros((5, dimension), dtype),
            logs=jnp.zeros((2, blocks), dtype),
            products=jnp.zeros((dimension, blocks), dtype),
            places=jnp.zeros((particles, dimension if particles * dimension <= SYMPTOMS.numbers else 0), dtype),
            levels=jnp.zeros((particles, blocks), dtype),
            direction=jnp.asarray(direction / np.linalg.norm(direction), dtype),
            images=jnp.zeros((2, dimension), dtype),
            along=jnp.zeros((4, particles), dtype),
            length=nothing,
            widest=Widest(*[nothing] * 6),
        )

    def add(self, u: Float[AnyArray, "n d"], gradient: Float[AnyArray, "n d"], change: Preconditioner) -> Symptoms:
        """Return the sums with the particles of one more iteration, and gradients there, whitened by a change."""
        origin = jnp.where(self.number > 0, self.origin, u.mean(0))
        u = u - origin
        x, slope = change.by_coordinate(u, gradient)
        s = jnp.log(_block_means(slope**2, self.logs.shape[1]) + jnp.finfo(u.dtype).tiny)
        s = jnp.where(jnp.isfinite(s), s, 0.0)
        p, q = matmul(u, self.direction), matmul(gradient, self.direction)
        return self._replace(
            number=self.number + len(u),
            origin=origin,
            powers=self.powers + jnp.stack([y.sum(0) for y in (x, x**2, x**4, slope**2, (x * slope) ** 2)]),
            logs=self.logs + jnp.stack([s.sum(0), (s**2).sum(0)]),
            products=self.products + matmul(x.T, s),
            places=self.places + x[:, : self.places.shape[1]],
            levels=self.levels + s,
            images=self.images + jnp.stack([u.sum(0), matmul(p, u)]),
            along=self.along + jnp.stack([p, p**2, q, p * q]),
            length=self.length + 1.0,
        )

    def next_window(self, temperature: float = 1.0) -> Symptoms:
        """Store the statistics of the window, and start the next one along a direction in which positions vary more."""
        p, squared, q, product = self.along / max(float(self.length), 1.0)
        own, variance = np.mean(squared - p**2), np.mean(squared) - np.mean(p) ** 2
        gap = _gap(np.sort(p)) if len(p) > 1 else np.zeros_like(variance)

        def over(a, b):
            return np.where(b > 0, a / np.where(b > 0, b, 1.0), 0.0)

        covariance, scatter, distance = product - p * q, np.var(p), p - np.mean(p)
        slope = over(np.mean(distance * q), scatter)
        error = np.std(q - slope * distance) / len(p) ** 0.5
        explored = np.mean(covariance) - SYMPTOMS.errors * np.std(covariance) / len(p) ** 0.5
        found = Widest(
            variance=variance,
            share=over(scatter, variance),
            explored=explored / temperature,
            pull=over(slope + SYMPTOMS.errors * over(error, np.sqrt(scatter)), over(explored, own)),
            least_pull=slope - SYMPTOMS.errors * over(error, np.sqrt(scatter)),
            gap=over(gap, np.sqrt(own)),
        )
        total, image = self.images / max(float(self.length) * len(p), 1.0)
        image = image - total * np.mean(p)
        norm = np.linalg.norm(image)
        usable = np.isfinite(norm) & (norm > 0)
        return self._replace(
            direction=np.where(usable, image / np.where(usable, norm, 1.0), self.direction),
            images=np.zeros_like(self.images),
            along=np.zeros_like(self.along),
            length=np.zeros_like(self.length),
            widest=found,
        )

    @property
    def dependence(self) -> float:
        """How strongly the logarithm of squared gradients depends on a coordinate, as in a funnel.

        This is ``|β ρ|``, with β the change of s per standard deviation of x and ρ their correlation: the largest value
        over all pairs of a coordinate and a block without it.
        """
        number = max(float(self.number), 1.0)
        return self._dependence(self.powers[:1] / number, self.logs[:1] / number)

    @property
    def has_funnel(self) -> bool:
        """Whether that is so of one particle over time too, and not only of particles in basins of different widths."""
        if not self.places.size or not self.dependence > SYMPTOMS.dependence:
            return False
        share = len(self.places) / max(float(self.number), 1.0)
        return bool(self._dependence(self.places * share, self.levels * share) > SYMPTOMS.dependence_within)

    def _dependence(self, x, s):
        """Return the dependence about means of x and s, of all particles or of each."""
        number = max(float(self.number), 1.0)
        square, squared, products = self.powers[1] / number, self.logs[1] / number, self.products / number
        covariance = products - np.dot(x.T, s) / len(x)
        variance, spread = square - (x**2).mean(0), np.sqrt(np.maximum(squared - (s**2).mean(0), 0.0))
        found = covariance**2 / (variance[:, None] * spread)
        blocks = s.shape[1]
        own = np.arange(x.shape[1])[:, None] // -(-x.shape[1] // blocks) == np.arange(blocks)
        return np.max(np.where(np.isfinite(found) & ~own, found, 0.0))

    @property
    def kurtosis(self) -> np.ndarray:
        """``E x⁴ / (E x²)²`` of each coordinate, ``(d,)``: 3 for a Gaussian, 0 if unknown."""
        _, square, fourth, *_ = self._means
        found = fourth / square**2
        return np.where(np.isfinite(found), found, 0.0)

    @property
    def tail_gradient(self) -> np.ndarray:
        """``E x² g² / (E x² E g²)`` of each coordinate, ``(d,)``: 3 for a Gaussian, infinite if unknown."""
        _, square, _, slope, both = self._means
        found = both / (square * slope)
        return np.where(np.isfinite(found), found, np.inf)

    @property
    def has_heavy_tails(self) -> bool:
        """Whether a coordinate has heavy tails: some particles are far away, where the gradient is smaller."""
        return bool(np.any((self.kurtosis > SYMPTOMS.kurtosis) & (self.tail_gradient < SYMPTOMS.tail_gradient)))

    @property
    def _means(self):
        return self.powers / max(float(self.number), 1.0)


def _gap(p):
    """Return the largest gap between sorted positions, beyond that between as many in one wide basin."""
    gaps = np.diff(p)
    # At least two particles on each side, because a single one may be in the neck of a funnel.
    inner = gaps[1:-1] if len(p) > 3 else gaps
    # Of n distances between random points the largest is about log₂ n medians. But each particle may be in a basin of
    # its own.
    typical = np.median(gaps) if len(p) > 3 else 0.0
    return np.maximum(typical, inner.max() - typical * np.log2(len(p)))


def _num_blocks(dimension):
    most = int(np.clip(SYMPTOMS.numbers // dimension, 2, SYMPTOMS.blocks))
    return -(-dimension // -(-dimension // most))


def _block_means(x, blocks):
    """Return the means over blocks of successive coordinates, ``(P, B)``."""
    dimension = x.shape[-1]
    size = -(-dimension // blocks)
    padded = jnp.pad(x, ((0, 0), (0, blocks * size - dimension))).reshape(len(x), blocks, size)
    counts = np.minimum(size, dimension - size * np.arange(blocks))
    return padded.sum(-1) / counts
