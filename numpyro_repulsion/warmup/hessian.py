"""The mean curvature of the potential energy over the cloud, from differences of gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer
import numpy as np

from numpyro_repulsion.noise import signs
from numpyro_repulsion.rounding import cholesky, eigh, matmul

__all__ = [
    "NUM_PROBES",
    "extremes",
    "hessian_and_noise",
    "mean_diagonal",
    "particle_mean",
    "mean_product",
    "num_minibatches",
    "num_noise_pairs",
    "shrink_noisy_directions",
    "whitening",
]

#: Rows for each parameter, which estimate a curvature to about a tenth in any direction, ...
ROWS_PER_PARAMETER = 200
#: ... unless that needs more than this many gradients of the cloud.
MAX_GRADIENTS = 2000
#: Fewer suffice for a few eigenvectors.
ROWS_FOR_LOW_RANK = 20
#: How many random directions of each particle give the diagonal of the curvature.
NUM_PROBES = 20
#: Draws for each parameter, which estimate the covariance of the noise, but not from more gradients of the cloud.
NOISE_DRAWS_PER_PARAMETER, MAX_NOISE_PAIRS = 3, 100
#: The smallest curvature, relative to those along the coordinates; smaller ones are noise.
SMALLEST = 1e-3
#: The smallest curvature along a coordinate in the scales so far, which are wider than the posterior at worst; smaller
#: ones are errors of the estimate.
SMALLEST_DIAGONAL = 0.1
#: The largest residual of an eigenvector, relative to what scaling by its eigenvalue tolerates.
CONVERGED = 0.3

#: ``(key, u) -> ∇U``
Gradient = Callable[[jax.Array, Float[Array, "*particles d"]], Float[Array, "*particles d"]]


def num_minibatches(dimension: int, rows: int, rank: int | None = None) -> int:
    """Return on how many minibatches of each particle to measure the curvature.

    :param rows: the number of rows in one minibatch of all particles, 0 if all rows are used.
    :param rank: how many eigenvectors are wanted; ``None`` for all.
    """
    if rows == 0:
        return 1
    wanted = -(-(ROWS_PER_PARAMETER if rank is None else ROWS_FOR_LOW_RANK) * dimension // rows)
    return max(1, min(wanted, MAX_GRADIENTS // (2 * (dimension if rank is None else 2 * rank))))


def hessian_and_noise(
    key: jax.Array,
    u: Float[Array, "*particles d"],
    gradient: Callable[[jax.Array, Float[Array, "*particles d"], Bool[Array, ""]], Float[Array, "*particles d"]],
    width: float,
    number: int,
    noise_number: Integer[Array, ""] | int,
    only_diagonal: Bool[Array, ""] | bool = False,
) -> tuple[Float[Array, "d d"], Float[Array, "d d"]]:
    """Return the mean Hessian of U and the covariance of the minibatch noise over particles ``(G, L, d)``.

    All columns of the Hessian use the same minibatches, because only then do the errors of small eigenvalues stay
    relative to them. The noise comes from differences of gradients on two minibatches.

    :param gradient: ``(key, u, is_noise) -> ∇U`` on clouds.
    :param width: half the distance over which gradients are compared.
    :param number: the number of minibatches for the Hessian.
    :param noise_number: the number of pairs of minibatches for the noise, 0 or more.
    :param only_diagonal: whether to estimate only the diagonal of the Hessian, as `mean_diagonal` does.
    :return: two arrays ``(d, d)``; zeros for the noise without pairs.
    """
    dimension = u.shape[-1]
    # Not by `mean_diagonal`, so that the gradient is compiled once.
    num_columns = jnp.where(only_diagonal, NUM_PROBES, number * dimension)

    def add_pair(i, totals):
        hessian, covariance = totals
        is_noise, column = i >= num_columns, i % dimension
        minibatch = jnp.where(only_diagonal, i, i // dimension)
        own = random.fold_in(key, jnp.where(is_noise, number + i, minibatch))
        column_probe = jnp.broadcast_to((jnp.arange(dimension) == column).astype(u.dtype), u.shape)
        probe = jnp.where(only_diagonal, signs(key, u.shape, u.dtype, i), column_probe)
        offset = jnp.where(is_noise, 0.0, width) * probe

        def add_side(side, total):
            sign = jnp.where(side == 0, 1.0, -1.0).astype(u.dtype)
            side_key = random.fold_in(own, jnp.where(is_noise, side, 0))
            return total + sign * gradient(side_key, u + sign * offset, is_noise)

        # Loops over pairs and sides, so that the gradient is compiled once.
        difference = lax.fori_loop(0, 2, add_side, jnp.zeros_like(u))

        def add_noise():
            noise = difference.reshape(-1, dimension)
            noise = jnp.where(jnp.isfinite(noise).all(-1, keepdims=True), noise, 0.0)
            return hessian, covariance + matmul(noise.T, noise) / (2.0 * len(noise))

        def add_column():
            found = particle_mean(difference * jnp.where(only_diagonal, probe, 1.0)) / (2.0 * width)
            place = jnp.where(only_diagonal, jnp.arange(dimension), column)
            return hessian.at[place, jnp.arange(dimension)].add(found), covariance

        return lax.cond(is_noise, add_noise, add_column)

    nothing = jnp.zeros((dimension, dimension), u.dtype)
    hessian, covariance = lax.fori_loop(0, num_columns + noise_number, add_pair, (nothing, nothing))
    repetitions = jnp.where(only_diagonal, NUM_PROBES, number)
    return (hessian + hessian.T) / (2.0 * repetitions), covariance / jnp.maximum(noise_number, 1)


def mean_diagonal(
    key: jax.Array, u: Float[Array, "*particles d"], gradient: Gradient, width: float, number: int
) -> Float[Array, " d"]:
    """Return the diagonal of the mean Hessian over particles ``(G, L, d)``, ``(d,)``, from products with random signs.

    :param number: the number of products for each particle.
    """

    def add_probe(i, total):
        probe = signs(key, u.shape, u.dtype, i)
        return total + particle_mean(
            probe * _difference(random.fold_in(key, i), u, width * probe, gradient) / (2.0 * width)
        )

    return lax.fori_loop(0, number, add_probe, jnp.zeros(u.shape[-1], u.dtype)) / number


def num_noise_pairs(dimension: int, particles: int) -> int:
    """Return on how many pairs of minibatches of each particle to measure the covariance of the noise."""
    return max(1, min(-(-NOISE_DRAWS_PER_PARAMETER * dimension // particles), MAX_NOISE_PAIRS))


def mean_product(
    key: jax.Array,
    u: Float[Array, "*particles d"],
    direction: Float[Array, " d"],
    gradient: Gradient,
    width: float,
    number: int,
) -> Float[Array, " d"]:
    """Return the product of the mean Hessian over particles ``(G, L, d)`` with a unit vector, ``(d,)``.

    The same key gives the same minibatches, and so one symmetric matrix for all directions.
    """

    def add_minibatch(i, total):
        return total + particle_mean(
            _difference(random.fold_in(key, i), u, width * direction, gradient) / (2.0 * width)
        )

    return lax.fori_loop(0, number, add_minibatch, jnp.zeros_like(direction)) / number


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


def _difference(key, u, offset, gradient):
    """Return the difference of gradients on the same minibatch at two points."""

    def add(side, total):
        sign = jnp.where(side == 0, 1.0, -1.0).astype(u.dtype)
        return total + sign * gradient(key, u + sign * offset)

    # A loop over the two sides, so that the gradient is compiled once.
    return lax.fori_loop(0, 2, add, jnp.zeros_like(u))


def particle_mean(x: Float[Array, "*particles d"]) -> Float[Array, " d"]:
    """Return the mean over the particles ``(G, L, d)`` with finite values, ``(d,)``."""
    usable = jnp.isfinite(x).all(-1, keepdims=True)
    return jnp.where(usable, x, 0.0).sum((0, 1)) / jnp.maximum(usable.sum(), 1)
