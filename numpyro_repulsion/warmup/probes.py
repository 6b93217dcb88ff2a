"""Curvature of U and noise of its gradient over the cloud, from differences of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.random import Generator

from numpyro_repulsion.warmup.curvature import NUM_ORDERS, UNKNOWN

__all__ = [
    "Gradients",
    "estimate_curvature",
    "hessian_and_noise",
    "mean_diagonal",
    "mean_product",
    "minibatch",
    "particle_mean",
    "signs",
]

#: Half the distance over which gradients are compared, in units of the scales.
WIDTH = 0.2
#: How many random directions of each particle give the diagonal of the curvature.
NUM_PROBES = 20
POWER_ITERATIONS = 8
#: Clouds of more numbers than this are large: of each group, the noise is measured on this many particles at most, and
#: on fewer that have that many numbers, because the gradients of all power iterations are kept.
LARGE, NUM_KEPT = 1_000_000, 4

#: The gradients ``(G, L, d)`` for each case ``(number, point, order)``: the number of a minibatch, the particles,
#: and the order of the control variates.
Gradients = Callable[[Iterable[tuple[int, np.ndarray, int]]], Iterator[np.ndarray]]


def minibatch(rng: Generator) -> int:
    """Return a random number of a minibatch."""
    return int(rng.integers(2**32))


def signs(rng: Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return 1 and -1, each with probability 1/2."""
    return (2 * rng.integers(2, size=shape, dtype=np.int8) - 1).astype(dtype)


def particle_mean(x: np.ndarray) -> np.ndarray:
    """Return the mean over the particles ``(G, L, d)`` with finite values, ``(d,)``."""
    usable = np.isfinite(x).all(-1, keepdims=True)
    return np.where(usable, x, 0.0).sum((0, 1)) / max(usable.sum(), 1)


def estimate_curvature(
    rng: Generator, u: np.ndarray, width: np.ndarray | float, gradients: Gradients, orders: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Estimate the curvature by power iteration on gradient differences, and the gradient noise from their midpoints.

    Both sides of a difference use the same minibatch, and each iteration uses another one. So midpoints differ between
    iterations by the minibatch and, where U is not quadratic, slightly by the direction. In large clouds only those of
    a few particles are kept.

    :param u: particles, ``(G, L, d)``.
    :param width: half the distance over which gradients are compared, ``(G, L)`` or a scalar.
    :param orders: those of the control variates: the one in use, and others whose noise is measured too.
    :return: the largest absolute curvature at each particle, ``(G L,)``, negative where it is not finite; and the
        largest variance of the gradient in any direction, pooled over the particles, for each order of control
        variates, ``(3,)``; and the mean of that variance over all directions, ``(3,)``; negative where unknown.
    """
    distance = np.broadcast_to(np.asarray(width, u.dtype), u.shape[:-1])[..., None]
    direction = signs(rng, u.shape, u.dtype) / np.asarray(u.shape[-1] ** 0.5, u.dtype)
    kept = min(NUM_KEPT, max(1, LARGE // u.shape[-1])) if u.size > LARGE else u.shape[1]
    every = -(-u.shape[1] // kept)
    seen: list[list[np.ndarray]] = []
    for _ in range(POWER_ITERATIONS):
        number, offset = minibatch(rng), distance * direction
        sides = [(number, u + side * offset, orders[0]) for side in (1.0, -1.0)]
        plus, minus, *other = gradients([*sides, *((number, u, order) for order in orders[1:])])
        product = (plus - minus) / (2.0 * distance)
        size = np.linalg.norm(product, axis=-1, keepdims=True)
        usable = np.isfinite(size) & (size > 0)
        direction = np.where(usable, product / np.where(usable, size, 1.0), direction)
        seen.append([x[:, ::every] for x in ((plus + minus) / 2.0, *other)])
    noise = np.full((2, NUM_ORDERS), UNKNOWN, u.dtype)
    for order, x in zip(orders, zip(*seen, strict=True), strict=True):
        noise[:, order] = _variances(rng, np.stack(x))
    return np.where(np.isfinite(size), size, UNKNOWN).ravel(), *noise


def hessian_and_noise(
    rng: Generator, u: np.ndarray, gradients: Gradients, number: int, noise_number: int, order: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean Hessian of U and the covariance of the minibatch noise over particles ``(G, L, d)``.

    All columns of the Hessian use the same minibatches, because only then do the errors of small eigenvalues stay
    relative to them. The noise comes from differences of gradients on two minibatches.

    :param number: the number of minibatches for the Hessian.
    :param noise_number: the number of pairs of minibatches for the noise, 0 or more.
    :param order: that of the control variates of the gradients whose noise is measured.
    :return: two arrays ``(d, d)``; zeros for the noise without pairs.
    """
    dimension = u.shape[-1]
    hessian, covariance = np.zeros((2, dimension, dimension), u.dtype)
    for _ in range(number):
        hessian += np.stack(list(_products(u, np.eye(dimension, dtype=u.dtype), gradients, minibatch(rng)))) / number
    found = gradients((minibatch(rng), u, order) for _ in range(2 * noise_number))
    for one in found:
        noise = (one - next(found)).reshape(-1, dimension)
        noise = np.where(np.isfinite(noise).all(-1, keepdims=True), noise, 0.0)
        covariance += noise.T @ noise / (2.0 * len(noise) * noise_number)
    return (hessian + hessian.T) / 2.0, covariance


def mean_diagonal(rng: Generator, u: np.ndarray, gradients: Gradients) -> np.ndarray:
    """Return the diagonal of the mean Hessian over particles ``(G, L, d)``, from products with random signs."""
    total = np.zeros(u.shape[-1], u.dtype)
    for _ in range(NUM_PROBES):
        number, probe = minibatch(rng), signs(rng, u.shape, u.dtype)
        plus, minus = gradients((number, u + side * WIDTH * probe, 0) for side in (1.0, -1.0))
        total += particle_mean(probe * (plus - minus)) / (2.0 * WIDTH * NUM_PROBES)
    return total


def mean_product(u: np.ndarray, direction: np.ndarray, gradients: Gradients, numbers: Sequence[int]) -> np.ndarray:
    """Return the product of the mean Hessian over particles ``(G, L, d)`` with a unit vector, ``(d,)``.

    :param numbers: those of the minibatches. The same give one symmetric matrix for all directions.
    """
    return sum(next(_products(u, direction[None], gradients, number)) for number in numbers) / len(numbers)


def _products(u, directions, gradients, number):
    """Yield the product of the mean Hessian on a minibatch with each unit vector, ``(d,)``."""
    cases = ((number, u + side * WIDTH * v, 0) for v in directions for side in (1.0, -1.0))
    found = gradients(cases)
    for plus in found:
        yield particle_mean(plus - next(found)) / (2.0 * WIDTH)


def _variances(rng, gradients):
    """Return the variance of gradients ``(times, G, L, d)`` about each particle's mean: the largest, and the mean.

    Both are over directions. One half of the times gives the direction of the largest and the other half the variance
    along it, and vice versa, because the largest eigenvalue of a covariance estimated from fewer rows than dimensions
    would be far too large.
    """
    times, dimension = len(gradients) // 2, gradients.shape[-1]
    # Subtract the mean of each half: a common mean would correlate the halves negatively.
    halves = gradients.reshape(2, times, -1, dimension)
    deviations = halves - halves.mean(1, keepdims=True)
    deviations = np.where(np.isfinite(deviations).all(-1, keepdims=True), deviations, 0.0)
    halves = deviations.reshape(2, -1, dimension)
    rows = halves.shape[1] * (times - 1) / times
    directions = [_widest(rng, half) for half in halves]
    along = [half @ direction for half, direction in zip(halves, directions[::-1], strict=True)]
    return np.square(along).sum(1).mean() / rows, np.square(halves).sum(1).mean() / rows


def _widest(rng, rows):
    """Return the unit vector along which rows ``(n, d)`` vary most, by power iteration."""
    direction = signs(rng, rows.shape[-1:], rows.dtype) / rows.shape[-1] ** 0.5
    for _ in range(POWER_ITERATIONS):
        product = rows @ direction @ rows
        size = np.linalg.norm(product)
        direction = product / size if size > 0 else direction
    return direction.astype(rows.dtype)
