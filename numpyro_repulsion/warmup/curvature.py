"""Curvature of U and noise of its gradient, from differences of gradients over the cloud and over successive clouds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Integer
import numpy as np
from numpy.random import Generator

from numpyro_repulsion.dynamics import CurvatureStats, Dynamics
from numpyro_repulsion.interactions import Coupling
from numpyro_repulsion.rounding import AnyArray, matmul

#: Marks an unknown number in a state whose known values are 0 or more; not NaN, because `jax_debug_nans` stops at it.
UNKNOWN = -1.0
#: Of control variates: 0 for none, 1 and 2.
NUM_ORDERS = 3


@dataclass(frozen=True)
class CurvatureConstants:
    """Constants of the measurements of curvature and noise."""

    #: Half the distance over which gradients are compared, in units of the scales.
    width: float = 0.2
    #: The distance between points whose gradients differ from a parabola by rounding alone.
    nearby: float = 0.1
    #: Products with random signs that give a diagonal, and iterations that give a largest eigenvalue.
    probes: int = 20
    iterations: int = 8
    #: The quantile over the particles that is their high curvature, or over gradients that is their extreme.
    quantile: float = 0.9
    #: Clouds of more numbers than this are large: of each group, the noise is measured on this many particles at most,
    #: and on fewer that have that many numbers, because the gradients of all power iterations are kept.
    large: int = 1_000_000
    kept: int = 4


CURVATURE = CurvatureConstants()


class NoiseFigures(NamedTuple):
    """The noise of gradients: 0 or more, or negative if unknown; by the order of control variates ``(3,)``, or of one.

    - **largest**, **mean** - the largest variance in any direction, and its mean over all.
    - **extreme_gradient** - the largest coordinate that one gradient in ten exceeds.
    - **extreme** - the same of its noise, which is not long where particles are far from the posterior.
    """

    largest: Float[AnyArray, ...]
    mean: Float[AnyArray, ...]
    extreme_gradient: Float[AnyArray, ...]
    extreme: Float[AnyArray, ...]


class Measurements(NamedTuple):
    """Measurements on successive clouds since the scales last changed, in the first ``number`` rows.

    - **number** - how many clouds.
    - **curvature** - the largest absolute curvature at each particle, ``(rows, particles)``.
    - **noise** - the ``NoiseFigures``, ``(rows, 4, 3)``.
    - **steepness** - how fast Γ changes, ``(rows,)``.

    Unknown or non-finite numbers are negative.
    """

    number: Integer[AnyArray, ""]
    curvature: Float[AnyArray, "_ _"]
    noise: Float[AnyArray, "_ 4 3"]
    steepness: Float[AnyArray, " _"]

    @staticmethod
    def empty(rows: int, particles: int, dtype) -> Measurements:
        """Return no measurements, with room for ``rows`` clouds."""
        shapes = (particles,), (len(NoiseFigures._fields), NUM_ORDERS), ()
        return Measurements(jnp.zeros((), jnp.int32), *(jnp.full((rows, *shape), UNKNOWN, dtype) for shape in shapes))

    def add(self, curvature: np.ndarray, noise: np.ndarray, steepness: float) -> Measurements:
        """Return the measurements with one more cloud."""
        row = int(self.number)
        arrays = [np.array(known) for known in self[1:]]
        for known, new in zip(arrays, (curvature, noise, steepness), strict=True):
            known[row] = new
        return Measurements(np.asarray(row + 1), *arrays)

    @property
    def high_curvature(self) -> float:
        """The curvature that one particle in ten exceeds; 0 if unknown."""
        known = self.curvature[self.curvature >= 0]
        return np.quantile(known, CURVATURE.quantile) if known.size else known.sum()

    @property
    def largest_curvature(self) -> float:
        """The largest curvature; 0 if unknown."""
        return self.curvature[self.curvature >= 0].max(initial=0.0)

    @property
    def mean_noise(self) -> NoiseFigures:
        """The mean figures by the order of control variates; 0 where unknown."""
        return NoiseFigures(*_mean_of_known(self.noise))

    @property
    def typical_steepness(self) -> float:
        """The root mean square of the steepness; 0 if unknown."""
        return _mean_of_known(self.steepness, 2) ** 0.5


def summarize_curvature(
    measurements: Measurements,
    noise: tuple[float, float],
    largest_variance: float,
    coupling: Coupling,
    dynamics: Dynamics,
    shared: bool,
    sweep: int | None,
) -> CurvatureStats:
    """Return the statistics that bound the step size.

    :param noise: the largest variance of the gradient in use, in any direction, and the mean over all directions.
    :param largest_variance: that of the positions in any direction, in units of the temperature.
    :param shared: whether the particles of a group share their minibatch.
    :param sweep: the number of minibatches that pass through all rows; ``None`` if minibatches are independent.
    """
    temperature = dynamics.unit_of_energy
    # K amplifies noise that all particles share by its largest eigenvalue Λ, and each particle's own noise by K_ii.
    largest_noise, isotropic_noise = (
        x * (coupling.bound / np.mean(coupling.diagonal) if shared else 1.0) / temperature for x in noise
    )
    # The mean curvature in a direction is at least 1 / variance, even if the measurements missed it.
    curvature = np.maximum(measurements.high_curvature, 1.0 / largest_variance)
    largest = np.maximum(measurements.largest_curvature, curvature)
    steepness = temperature * measurements.typical_steepness
    return CurvatureStats(curvature, largest, largest_noise, steepness, sweep, isotropic_noise)


def _mean_of_known(x, power=1):
    """Return the mean over rows of numbers that are 0 or more, to a power; 0 where there is none."""
    is_known = x >= 0
    total = (np.where(is_known, x, 0.0) ** power).sum(0)
    return total / np.maximum(is_known.sum(0), 1).astype(x.dtype)


#: The gradients ``(G, L, d)`` for each case ``(seed, point, order)``: the seed of a minibatch, the particles,
#: and the order of the control variates.
Gradients = Callable[[Iterable[tuple[int, np.ndarray, int]]], Iterator[np.ndarray]]


def draw_seed(rng: Generator) -> int:
    return int(rng.integers(2**32))


def signs(rng: Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return 1 and -1, each with probability 1/2."""
    return (2 * rng.integers(2, size=shape, dtype=np.int8) - 1).astype(dtype)


def particle_mean(x: np.ndarray) -> np.ndarray:
    """Return the mean over the particles ``(G, L, d)`` with finite values, ``(d,)``."""
    usable = np.isfinite(x).all(-1, keepdims=True)
    return np.where(usable, x, 0.0).sum((0, 1)) / max(usable.sum(), 1)


def estimate_curvature(
    rng: Generator,
    u: np.ndarray,
    width: np.ndarray | float,
    gradients: Gradients,
    orders: Sequence[int],
    mixes: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate the curvature by power iteration on gradient differences, and the gradient noise from their midpoints.

    Both sides of a difference use the same minibatch, and each iteration uses another one. So midpoints differ between
    iterations by the minibatch and, where U is not quadratic, slightly by the direction.

    :param u: particles, ``(G, L, d)``.
    :param width: half the distance over which gradients are compared, ``(G, L)`` or a scalar.
    :param orders: those of the control variates: the one in use, and others whose noise is measured too.
    :param mixes: whether the particles visit the same places. Noise in directions that a single particle has is then
        that of a moment; otherwise, as in modes of a network, it stays.
    :return: the largest absolute curvature at each particle, ``(G L,)``, negative where it is not finite; and the
        ``NoiseFigures``, ``(4, 3)``, pooled over the particles.
    """
    distance = np.broadcast_to(np.asarray(width, u.dtype), u.shape[:-1])[..., None]
    direction = signs(rng, u.shape, u.dtype) / np.asarray(u.shape[-1] ** 0.5, u.dtype)
    kept = min(CURVATURE.kept, max(1, CURVATURE.large // u.shape[-1])) if u.size > CURVATURE.large else u.shape[1]
    every = -(-u.shape[1] // kept)
    seen: list[list[np.ndarray]] = []
    for _ in range(CURVATURE.iterations):
        seed, offset = draw_seed(rng), distance * direction
        sides = [(seed, u + side * offset, orders[0]) for side in (1.0, -1.0)]
        plus, minus, *other = gradients([*sides, *((seed, u, order) for order in orders[1:])])
        product = (plus - minus) / (2.0 * distance)
        size = np.linalg.norm(product, axis=-1, keepdims=True)
        usable = np.isfinite(size) & (size > 0)
        direction = np.where(usable, product / np.where(usable, size, 1.0), direction)
        seen.append([x[:, ::every] for x in ((plus + minus) / 2.0, *other)])
    noise = np.full((4, NUM_ORDERS), UNKNOWN, u.dtype)
    for order, x in zip(orders, zip(*seen, strict=True), strict=True):
        noise[:, order] = _variances(rng, np.stack(x), mixes)
    return np.where(np.isfinite(size), size, UNKNOWN).ravel(), noise


def hessian_and_noise(
    rng: Generator, u: np.ndarray, gradients: Gradients, num_minibatches: int, num_pairs: int, order: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean Hessian of U and the covariance of the minibatch noise over particles ``(G, L, d)``.

    :param num_minibatches: how many give the Hessian. All columns use the same ones, because only then do the
        errors of small eigenvalues stay relative to them.
    :param num_pairs: how many pairs of minibatches give the noise, by their differences.
    :param order: that of the control variates of the gradients whose noise is measured.
    """
    dimension = u.shape[-1]
    hessian, covariance = np.zeros((2, dimension, dimension), u.dtype)
    for _ in range(num_minibatches):
        columns = _products(u, np.eye(dimension, dtype=u.dtype), gradients, draw_seed(rng))
        hessian += np.stack(list(columns)) / num_minibatches
    found = gradients((draw_seed(rng), u, order) for _ in range(2 * num_pairs))
    for one in found:
        noise = (one - next(found)).reshape(-1, dimension)
        noise = np.where(np.isfinite(noise).all(-1, keepdims=True), noise, 0.0)
        covariance += matmul(noise.T, noise) / (2.0 * len(noise) * num_pairs)
    return (hessian + hessian.T) / 2.0, covariance


def mean_diagonal(rng: Generator, u: np.ndarray, gradients: Gradients) -> np.ndarray:
    """Return the diagonal of the mean Hessian over particles ``(G, L, d)``, from products with unit vectors, or with
    random signs where these are more than `CURVATURE.probes`."""
    dimension = u.shape[-1]
    total, exact = np.zeros(dimension, u.dtype), dimension <= CURVATURE.probes
    for i in range(dimension if exact else CURVATURE.probes):
        seed = draw_seed(rng)
        probe = np.eye(dimension, dtype=u.dtype)[i] if exact else signs(rng, u.shape, u.dtype)
        plus, minus = gradients((seed, u + side * CURVATURE.width * probe, 0) for side in (1.0, -1.0))
        total += particle_mean(probe * (plus - minus)) / (2.0 * CURVATURE.width * (1 if exact else CURVATURE.probes))
    return total


def mean_product(u: np.ndarray, direction: np.ndarray, gradients: Gradients, seeds: Sequence[int]) -> np.ndarray:
    """Return the product of the mean Hessian over particles ``(G, L, d)`` with a unit vector, ``(d,)``.

    :param seeds: those of the minibatches. The same give one symmetric matrix for all directions.
    """
    return sum(next(_products(u, direction[None], gradients, seed)) for seed in seeds) / len(seeds)


def noise_by_coordinate(rng: Generator, u: np.ndarray, gradients: Gradients, num_pairs: int, order: int) -> np.ndarray:
    """Return the variance of the minibatch noise in each coordinate, pooled over each half of the particles
    ``(G, L, d)``, as ``(2, d)``; a single particle is in both. It is negative where no gradient is finite.

    :param num_pairs: how many pairs of minibatches give it, by their differences.
    """
    total = np.zeros((2, u.shape[-1]))
    found = gradients((draw_seed(rng), u, order) for _ in range(2 * num_pairs))
    for one in found:
        squared = ((one - next(found)) ** 2).reshape(1, -1, u.shape[-1])
        if not np.isfinite(squared).all(-1).any():
            return np.full_like(total, UNKNOWN)
        halves = (squared[:, ::2], squared[:, 1::2]) if squared.shape[1] > 1 else (squared, squared)
        total += np.stack([particle_mean(half) for half in halves]) / (2.0 * num_pairs)
    return total.astype(u.dtype)


def collective_shift(
    rng: Generator, u: np.ndarray, sds: np.ndarray, noise: np.ndarray, gradients: Gradients
) -> np.ndarray:
    """Return by how many of its standard deviations a mean moves for each unit of the mean inflation of variances by
    noise, for the coordinate that moves most; less what may be chance.

    Inflations Δᵢ of the variances move the mean of coordinate j by ½ Σ Δᵢ ∂ⱼ Hᵢᵢ. For thousands of effects, which have
    the same scale, these add up.

    :param u: particles, ``(G, L, d)``.
    :param sds: the standard deviations of the coordinates, ``(d,)``.
    :param noise: the variances of the noise along them, to which the relative inflations are proportional, ``(d,)``.
    """
    if not noise.any():
        return np.zeros(())
    # A single coordinate does not leave the region of the particles.
    lengths, found = sds * np.minimum(np.sqrt(noise / noise.mean()), 1.0 / CURVATURE.width), []
    for _ in range(2):
        seed, offset = draw_seed(rng), CURVATURE.width * lengths * signs(rng, u.shape, u.dtype)
        plus, middle, minus = gradients([(seed, u + side * offset, 0) for side in (1.0, 0.0, -1.0)])
        found.append((plus - 2.0 * middle + minus) * sds / (2.0 * CURVATURE.width**2))
    shifts = np.concatenate(found).reshape(-1, u.shape[-1]).astype(np.float64)
    shifts = shifts[np.isfinite(shifts).all(-1)]
    if len(shifts) < 2:
        return np.zeros(())
    return np.maximum(np.abs(shifts.mean(0)) - 3.0 * shifts.std(0, ddof=1) / len(shifts) ** 0.5, 0.0).max()


def rounding_shift(u: np.ndarray, gradients: Gradients) -> float:
    """Return by how many standard deviations the errors of rounded gradients may shift the mean of the whitened
    coordinate that they shift most: their size at the particles ``(G, L, d)``, by third differences of gradients.

    Gradients of many rows add up the same error of each, as of a function that single precision knows poorly.
    """
    offset = CURVATURE.nearby * signs(np.random.default_rng(0), u.shape, u.dtype)
    first, second, third, fourth = gradients((0, u + k * offset, 0) for k in range(4))
    differences = np.abs(fourth - first - 3.0 * (third - second)).reshape(-1, u.shape[-1])
    differences = differences[np.isfinite(differences).all(-1)]
    if not len(differences):
        return 0.0
    # Of independent errors their variance is 20 times as large. The median leaves out kinks between the points.
    return float(np.median(differences, 0).max()) / (0.6745 * 20.0**0.5)


def _products(u, directions, gradients, seed):
    """Yield the product of the mean Hessian on a minibatch with each unit vector, ``(d,)``."""
    cases = ((seed, u + side * CURVATURE.width * v, 0) for v in directions for side in (1.0, -1.0))
    found = gradients(cases)
    for plus in found:
        yield particle_mean(plus - next(found)) / (2.0 * CURVATURE.width)


def _variances(rng, gradients, mixes):
    """Return the variance of gradients ``(times, G, L, d)`` about each particle's mean: the largest, and the mean; and
    what the farthest coordinate of one in ten reaches, of gradients and of their noise."""
    times, dimension = len(gradients) // 2, gradients.shape[-1]
    known = gradients.reshape(2, times, -1, dimension)
    # A particle with gradients that are not finite has no noise, rather than that of zeros among the others.
    is_finite = np.isfinite(known).all((1, 3), keepdims=True)
    if not is_finite.any():
        return 4 * (UNKNOWN,)
    known = np.where(is_finite, known, 0.0)
    # Subtract the mean of each half: a common mean would correlate the halves negatively.
    deviations = known - known.mean(1, keepdims=True)
    rows, middle = 2 * known.shape[2] * (times - 1), known.shape[2] // 2
    # Half of the minibatches and half of the particles give the direction of the largest, the others the variance
    # along it. The largest eigenvalue of a covariance estimated from fewer rows than dimensions would be far too large,
    # and of thousands of coordinates some are noisy just where one particle is.
    sides = (slice(middle), slice(middle, None)) if mixes and middle else (slice(None),)
    largest = 0.0
    for half, other_half in ((0, 1), (1, 0)):
        for side, other_side in zip(sides, sides[::-1], strict=True):
            start = signs(rng, (dimension,), deviations.dtype) / dimension**0.5
            rows_of_half = deviations[half, :, side].reshape(-1, dimension)
            direction = widest(rows_of_half, start, CURVATURE.iterations).astype(deviations.dtype)
            along = matmul(deviations[other_half, :, other_side].reshape(-1, dimension), direction)
            largest += np.square(along).sum() / rows
    extremes = [np.quantile(np.abs(x).max(-1), CURVATURE.quantile) for x in (known, deviations)]
    # Of a single long gradient the mean of its half has a share.
    extremes[1] *= times / max(times - 1, 1)
    return largest, np.square(deviations).sum() / (rows * dimension), *extremes


def widest(rows: np.ndarray, direction: np.ndarray, number: int) -> np.ndarray:
    """Return the unit vector along which rows ``(n, d)`` vary most, by so many power iterations from a direction."""
    for _ in range(number):
        product = matmul(matmul(rows, direction), rows)
        size = np.linalg.norm(product)
        direction = product / size if size > 0 else direction
    return direction
