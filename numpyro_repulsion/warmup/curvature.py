"""Estimates of curvature and gradient noise on the cloud, which bound the step size."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer
import numpy as np

from numpyro_repulsion.dynamics import CurvatureStats, Dynamics
from numpyro_repulsion.interactions import Coupling, Interaction
from numpyro_repulsion.noise import signs
from numpyro_repulsion.rounding import einsum

__all__ = [
    "UNKNOWN",
    "CorrectableEnergyAndGrad",
    "Measurements",
    "estimate_curvature",
    "measure_steepness",
    "summarize_curvature",
]

#: Marks an unknown number in a state whose known values are 0 or more; not NaN, because `jax_debug_nans` stops at it.
UNKNOWN = -1.0
POWER_ITERATIONS = 8
#: Clouds of more numbers than this are large: of each group, the noise is measured on this many particles at most, and
#: on fewer that have that many numbers, because the gradients of all power iterations are kept.
LARGE, NUM_KEPT = 1_000_000, 4
#: The step suits the curvature at nine particles in ten; `largest_curvature` keeps the others stable.
QUANTILE = 0.9

#: ``(key, u, corrected) -> (U, ∇U)`` on clouds; ``corrected`` says whether control variates correct the gradient.
CorrectableEnergyAndGrad = Callable[
    [jax.Array, Float[Array, "*particles d"], Bool[Array, ""]],
    tuple[Float[Array, "*particles"], Float[Array, "*particles d"]],
]


class Measurements(NamedTuple):
    """Measurements on successive clouds since the scales last changed, in the first ``number`` rows.

    - **number** - how many clouds.
    - **curvature** - the largest absolute curvature at each particle, ``(rows, particles)``.
    - **noise** - the largest variance of the gradient in any direction, without control variates and with,
      ``(rows, 2)``.
    - **isotropic_noise** - the mean of that variance over all directions, ``(rows, 2)``.
    - **steepness** - how fast Γ changes, ``(rows,)``.

    Unknown or non-finite numbers are negative.
    """

    number: Integer[Array, ""]
    curvature: Float[Array, "_ _"]
    noise: Float[Array, "_ _"]
    isotropic_noise: Float[Array, "_ _"]
    steepness: Float[Array, " _"]

    @staticmethod
    def empty(rows: int, particles: int, dtype) -> Measurements:
        """Return no measurements, with room for ``rows`` clouds."""
        rows_of = (jnp.full((rows, *shape), UNKNOWN, dtype) for shape in ((particles,), (2,), (2,), ()))
        return Measurements(jnp.zeros((), jnp.int32), *rows_of)

    def add(
        self, curvature: np.ndarray, noise: np.ndarray, isotropic_noise: np.ndarray, steepness: float
    ) -> Measurements:
        """Return the measurements with one more cloud."""
        row = min(int(self.number), len(self.curvature) - 1)
        arrays = [np.array(known) for known in self[1:]]
        for known, new in zip(arrays, (curvature, noise, isotropic_noise, steepness), strict=True):
            known[row] = new
        return Measurements(np.asarray(row + 1), *arrays)

    @property
    def typical_curvature(self) -> float:
        """The curvature that one particle in ten exceeds; 0 if unknown."""
        known = self.curvature[self.curvature >= 0]
        return np.quantile(known, QUANTILE) if known.size else known.sum()

    @property
    def largest_curvature(self) -> float:
        """The largest curvature; 0 if unknown."""
        return self.curvature.max(initial=0.0)

    @property
    def mean_noise(self) -> np.ndarray:
        """The mean gradient noise without control variates and with them, ``(2,)``."""
        return _mean_of_known(self.noise)

    @property
    def mean_isotropic_noise(self) -> np.ndarray:
        """The mean of the isotropic gradient noise without control variates and with them, ``(2,)``."""
        return _mean_of_known(self.isotropic_noise)

    @property
    def typical_steepness(self) -> float:
        """The root mean square of the steepness; 0 if unknown."""
        return _mean_of_known(self.steepness, 2) ** 0.5


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


def summarize_curvature(
    measurements: Measurements,
    noise: tuple[float, float],
    spread: float,
    coupling: Coupling,
    dynamics: Dynamics,
    shared: bool,
    sweep: int | None,
) -> CurvatureStats:
    """Return the statistics that bound the step size.

    :param noise: the largest variance of the gradient in use, in any direction, and the mean over all directions.
    :param spread: the largest variance of the positions in any direction, in units of the temperature.
    :param shared: whether the particles of a group share their minibatch.
    :param sweep: the number of minibatches that pass through all rows; ``None`` if minibatches are independent.
    """
    temperature = dynamics.temperature or 1.0
    # K amplifies noise that all particles share by its largest eigenvalue Λ, and each particle's own noise by K_ii.
    largest_noise, isotropic_noise = (
        x * (coupling.bound / np.mean(coupling.diagonal) if shared else 1.0) / temperature for x in noise
    )
    # The mean curvature in a direction is at least 1 / variance, even if the measurements missed it.
    curvature = np.maximum(measurements.typical_curvature, 1.0 / spread)
    largest = np.maximum(measurements.largest_curvature, curvature)
    steepness = temperature * measurements.typical_steepness
    return CurvatureStats(curvature, largest, largest_noise, steepness, sweep, isotropic_noise)


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


def _mean_of_known(x, power=1):
    """Return the mean over rows of numbers that are 0 or more, to a power; 0 where there is none."""
    is_known = x >= 0
    total = (np.where(is_known, x, 0.0) ** power).sum(0)
    return total / np.maximum(is_known.sum(0), 1).astype(x.dtype)


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
