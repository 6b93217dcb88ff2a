"""Scales from the mean curvature of the potential energy over the cloud."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from numpyro_repulsion.rounding import cholesky, eigh

__all__ = ["extremes", "num_minibatches", "num_noise_pairs", "shrink_noisy_directions", "whitening"]

#: Rows for each parameter, which estimate a curvature to about a tenth in any direction, ...
ROWS_PER_PARAMETER = 200
#: ... unless that needs more than this many gradients of the cloud.
MAX_GRADIENTS = 2000
#: Fewer suffice for a few eigenvectors.
ROWS_FOR_LOW_RANK = 20
#: Draws for each parameter, which estimate the covariance of the noise, but not from more gradients of the cloud.
NOISE_DRAWS_PER_PARAMETER, MAX_NOISE_PAIRS = 3, 100
#: Draws for each minibatch of the data, so that they meet each row about 40 times.
NOISE_DRAWS_PER_MINIBATCH = 20
#: The smallest curvature, relative to those along the coordinates; smaller ones are noise.
SMALLEST = 1e-3
#: The smallest curvature along a coordinate in the scales so far, which are wider than the posterior at worst; smaller
#: ones are errors of the estimate.
SMALLEST_DIAGONAL = 0.1
#: The largest residual of an eigenvector, relative to what scaling by its eigenvalue tolerates.
CONVERGED = 0.3


def num_minibatches(dimension: int, rows: int, rank: int | None = None) -> int:
    """Return on how many minibatches of each particle to measure the curvature.

    :param rows: the number of rows in one minibatch of all particles, 0 if all rows are used.
    :param rank: how many eigenvectors are wanted; ``None`` for all.
    """
    if rows == 0:
        return 1
    wanted = -(-(ROWS_PER_PARAMETER if rank is None else ROWS_FOR_LOW_RANK) * dimension // rows)
    return max(1, min(wanted, MAX_GRADIENTS // (2 * (dimension if rank is None else 2 * rank))))


def num_noise_pairs(dimension: int, particles: int, num_minibatches: int, num_updates: int) -> int:
    """Return on how many pairs of minibatches of each particle to measure the covariance of the noise.

    A few rows may make nearly all of it, so that rows should be met several times, if the warmup is long.

    :param particles: how many particles have minibatches of their own.
    :param num_minibatches: how many minibatches there are in the data.
    :param num_updates: the number of updates of the warmup.
    """
    few = max(1, min(-(-NOISE_DRAWS_PER_PARAMETER * dimension // particles), MAX_NOISE_PAIRS))
    return max(few, min(-(-NOISE_DRAWS_PER_MINIBATCH * num_minibatches // particles), num_updates // 100))


def extremes(
    start: np.ndarray, product: Callable[[np.ndarray], np.ndarray], rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the eigenvectors, ``(d, rank)``, and absolute eigenvalues, ``(rank,)``, that differ most from 1.

    They come from Lanczos's method with full reorthogonalization. A pair that has not converged is replaced by a zero
    vector and 1, because scaling by it would couple its direction to others.

    :param start: a random vector, ``(d,)``.
    :param product: the product of a symmetric matrix with a unit vector.
    """
    steps, v = min(2 * rank, len(start)), start / np.linalg.norm(start)
    basis = np.zeros((steps, len(start)), start.dtype)
    diagonal, beside = np.zeros((2, steps), start.dtype)
    for i in range(steps):
        basis[i], image = v, product(v)
        diagonal[i] = v @ image
        for _ in range(2):
            image = image - basis @ image @ basis
        beside[i] = np.linalg.norm(image)
        v = image / (beside[i] if beside[i] > 0 else 1.0)
    values, weights = eigh(np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1))
    absolute = np.maximum(np.abs(values), SMALLEST)
    residual = np.abs(beside[-1] * weights[-1])
    converged = (residual < CONVERGED * np.sqrt(absolute)) & np.isfinite(absolute)
    extremity = np.where(converged, np.abs(np.log(absolute)), 0.0)
    chosen = np.argsort(-extremity, kind="stable")[:rank]
    usable = converged[chosen]
    return np.where(usable, (weights.T @ basis)[chosen].T, 0.0), np.where(usable, absolute[chosen], 1.0)


def whitening(curvature: np.ndarray) -> np.ndarray:
    """Return S, lower triangular or ``(d,)``, with ``S Sᵀ`` the inverse of a curvature made positive.

    Negative eigenvalues count by their absolute value, as in a saddle, whose scale they give as well as positive ones.

    :param curvature: ``(d, d)``, or its diagonal ``(d,)``.
    """
    diagonal = np.abs(curvature if curvature.ndim == 1 else curvature.diagonal())
    if curvature.ndim == 1:
        return np.maximum(np.where(np.isfinite(diagonal), diagonal, 1.0), SMALLEST_DIAGONAL) ** -0.5
    unit = np.where(np.isfinite(diagonal) & (diagonal > 0), diagonal, 1.0) ** -0.5
    values, vectors = eigh(curvature * np.outer(unit, unit))
    values = np.maximum(np.abs(values), SMALLEST)
    return _root(np.outer(unit, unit) * (vectors / values @ vectors.T), unit)


def shrink_noisy_directions(covariance: np.ndarray, num_draws: int, allowed: float) -> tuple[np.ndarray, float]:
    """Return S, lower triangular, that rescales noisy directions until their gradient noise is at most the allowed one.

    The bias of a step is largest along the direction with the most noise, and would limit the step of all. Only the
    ratios of the directions matter, so the least noisy one keeps its scale. The eigenvalues move toward their mean by
    the oracle approximating shrinkage (Chen, Wiesel, Eldar and Hero, 2010), because an estimate from few draws spreads
    those of equal noise by a factor of ten.

    :param covariance: that of the gradient noise in whitened coordinates, ``(d, d)``.
    :param num_draws: the number of draws that it was estimated from.
    :param allowed: the largest variance tolerated at the longest stable step.
    :return: S, and the largest factor by which a variance grows in the new coordinates.
    """
    values, vectors = eigh(covariance)
    dimension, total, square = len(values), values.sum(), np.sum(values**2)
    spread = (num_draws + 1 - 2 / dimension) * (square - total**2 / dimension)
    share = min(1.0, ((1 - 2 / dimension) * square + total**2) / spread) if spread > 0 else 1.0
    values = (1.0 - share) * values + share * total / dimension
    factor = np.maximum(values / allowed, 1.0)
    factor = factor / factor.min()
    return _root(vectors / factor @ vectors.T, np.ones_like(values)), factor.max()


def _root(matrix, otherwise):
    """Return the lower Cholesky factor of a matrix, or a diagonal where it is not finite."""
    scale = cholesky((matrix + matrix.T) / 2.0)
    return scale if np.isfinite(scale).all() else np.diag(otherwise)
