"""Differences of gradients of the cloud, in programs: curvature of U and noise of the gradient."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from numpyro_repulsion.interactions import Interaction
from numpyro_repulsion.noise import signs
from numpyro_repulsion.rounding import einsum, matmul
from numpyro_repulsion.warmup.curvature import UNKNOWN

__all__ = [
    "NUM_PROBES",
    "CorrectableEnergyAndGrad",
    "estimate_curvature",
    "hessian_and_noise",
    "mean_diagonal",
    "mean_product",
    "measure_steepness",
    "particle_mean",
]

#: How many random directions of each particle give the diagonal of the curvature.
NUM_PROBES = 20
POWER_ITERATIONS = 8
#: Clouds of more numbers than this are large: of each group, the noise is measured on this many particles at most, and
#: on fewer that have that many numbers, because the gradients of all power iterations are kept.
LARGE, NUM_KEPT = 1_000_000, 4

#: ``(key, u, corrected) -> (U, ∇U)`` on clouds; ``corrected`` says whether control variates correct the gradient.
CorrectableEnergyAndGrad = Callable[
    [jax.Array, Float[Array, "*particles d"], Bool[Array, ""]],
    tuple[Float[Array, "*particles"], Float[Array, "*particles d"]],
]
#: ``(key, u) -> ∇U``
Gradient = Callable[[jax.Array, Float[Array, "*particles d"]], Float[Array, "*particles d"]]


def estimate_curvature(
    key: jax.Array,
    u: Float[Array, "*particles d"],
    width: Float[Array, "*particles"] | Float[Array, ""] | float,
    energy_and_grad: CorrectableEnergyAndGrad,
    corrected: Bool[Array, ""],
    compare: bool,
) -> tuple[Float[Array, " _"], Float[Array, 2], Float[Array, 2]]:
    """Estimate the curvature by power iteration on gradient differences, and the gradient noise from their midpoints.

    Both sides of a difference use the same minibatch, and each iteration uses another one. So midpoints differ between
    iterations by the minibatch and, where U is not quadratic, slightly by the direction. In large clouds only those of
    a few particles are kept.

    :param u: particles, ``(G, L, d)``.
    :param width: half the distance over which gradients are compared, ``(G, L)`` or a scalar.
    :param corrected: whether control variates are in use.
    :param compare: whether to measure the noise both without and with control variates.
    :return: the largest absolute curvature at each particle, ``(G L,)``, negative where it is not finite; and the
        largest variance of the gradient in any direction, pooled over the particles, without control variates and with
        them, ``(2,)``; and the mean of that variance over all directions, ``(2,)``.
    """
    distance = jnp.broadcast_to(width, u.shape[:-1])[..., None].astype(u.dtype)

    def iterate(direction, key):
        offset = distance * direction
        sides = jnp.asarray([1.0, -1.0] + [0.0] * compare, u.dtype)
        flags = jnp.stack([corrected, corrected] + [~corrected] * compare)
        # A loop over the points, so that the gradient is compiled once.
        gradients = lax.map(lambda point: energy_and_grad(key, u + point[0] * offset, point[1])[1], (sides, flags))
        product = (gradients[0] - gradients[1]) / (2.0 * distance)
        size = jnp.linalg.norm(product, axis=-1, keepdims=True)
        usable = jnp.isfinite(size) & (size > 0)
        middle = (gradients[0] + gradients[1]) / 2.0
        seen = jnp.stack([middle, gradients[2]] if compare else [middle])[:, :, ::every]
        return jnp.where(usable, product / jnp.where(usable, size, 1.0), direction), (size[..., 0], seen)

    dimension = u.shape[-1]
    kept = min(NUM_KEPT, max(1, LARGE // dimension)) if u.size > LARGE else u.shape[1]
    every = -(-u.shape[1] // kept)
    keys = random.split(key, POWER_ITERATIONS)
    white = signs(key, (u.size // dimension + 2, dimension), u.dtype)
    direction, start = white[:-2].reshape(u.shape), white[-2:]
    direction /= jnp.linalg.norm(direction, axis=-1, keepdims=True)
    _, (sizes, seen) = lax.scan(iterate, direction, keys)
    curvature = jnp.where(jnp.isfinite(sizes[-1]), sizes[-1], UNKNOWN).ravel()
    seen = jnp.moveaxis(seen, 1, 0)
    # One after the other, so that memory holds the deviations of one.
    found = lax.map(lambda x: jnp.stack(_variances(start, x)), seen)
    used, other = found[0], found[-1]
    largest, mean = jnp.where(corrected, jnp.stack([other, used]), jnp.stack([used, other])).T
    return curvature, largest, mean


def measure_steepness(
    key: jax.Array, interaction: Interaction, u: Float[Array, "*particles d"], bandwidth: Float[Array, ""] | float
) -> Float[Array, ""]:
    """Return how fast Γ changes along a random direction of all particles at once, as a root mean square.

    :param u: particles, ``(G, L, d)``.
    """
    if not interaction.interacts:
        return jnp.zeros((), u.dtype)
    direction = signs(key, u.shape, u.dtype)
    change = jax.jvp(lambda u: interaction.couple(u, bandwidth).repulsion + jnp.zeros_like(u), (u,), (direction,))[1]
    return jnp.sqrt(jnp.mean(jnp.where(jnp.isfinite(change), change, 0.0) ** 2))


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


def _variances(start, gradients):
    """Return the variance of gradients ``(times, G, L, d)`` about each particle's mean: the largest, and the mean.

    Both are over directions. One half of the times gives the direction of the largest and the other half the variance
    along it, and vice versa, because the largest eigenvalue of a covariance estimated from fewer rows than dimensions
    would be far too large.
    """
    times = gradients.shape[0] // 2
    # Subtract the mean of each half: a common mean would correlate the halves negatively.
    halves = gradients.reshape(2, times, -1, gradients.shape[-1])
    deviations = halves - halves.mean(1, keepdims=True)
    deviations = jnp.where(jnp.isfinite(deviations).all(-1, keepdims=True), deviations, 0.0)
    halves = deviations.reshape(2, -1, gradients.shape[-1])
    rows = halves.shape[1] * (times - 1) / times

    def iterate(directions, _):
        product = einsum("hnd,hn->hd", halves, einsum("hnd,hd->hn", halves, directions))
        size = jnp.linalg.norm(product, axis=-1, keepdims=True)
        return jnp.where(size > 0, product / jnp.where(size > 0, size, 1.0), directions), None

    directions, _ = lax.scan(iterate, start / jnp.linalg.norm(start, axis=-1, keepdims=True), length=POWER_ITERATIONS)
    largest = jnp.mean(jnp.sum(einsum("hnd,hd->hn", halves, directions[::-1]) ** 2, -1)) / rows
    return largest, jnp.mean(jnp.sum(halves**2, 1)) / rows
