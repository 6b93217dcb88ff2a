"""Measurements of curvature and gradient noise on successive clouds, which bound the step size."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Integer
import numpy as np

from numpyro_repulsion.dynamics import CurvatureStats, Dynamics
from numpyro_repulsion.interactions import Coupling
from numpyro_repulsion.rounding import AnyArray

__all__ = ["NUM_ORDERS", "UNKNOWN", "Measurements", "summarize_curvature"]

#: Marks an unknown number in a state whose known values are 0 or more; not NaN, because `jax_debug_nans` stops at it.
UNKNOWN = -1.0
#: Of control variates: 0 for none, 1 and 2.
NUM_ORDERS = 3
#: The step suits the curvature at nine particles in ten; `largest_curvature` keeps the others stable.
QUANTILE = 0.9


class Measurements(NamedTuple):
    """Measurements on successive clouds since the scales last changed, in the first ``number`` rows.

    - **number** - how many clouds.
    - **curvature** - the largest absolute curvature at each particle, ``(rows, particles)``.
    - **noise** - the largest variance of the gradient in any direction, by the order of control variates,
      ``(rows, 3)``.
    - **isotropic_noise** - the mean of that variance over all directions, ``(rows, 3)``.
    - **steepness** - how fast Γ changes, ``(rows,)``.

    Unknown or non-finite numbers are negative.
    """

    number: Integer[AnyArray, ""]
    curvature: Float[AnyArray, "_ _"]
    noise: Float[AnyArray, "_ _"]
    isotropic_noise: Float[AnyArray, "_ _"]
    steepness: Float[AnyArray, " _"]

    @staticmethod
    def empty(rows: int, particles: int, dtype) -> Measurements:
        """Return no measurements, with room for ``rows`` clouds."""
        rows_of = (
            jnp.full((rows, *shape), UNKNOWN, dtype) for shape in ((particles,), (NUM_ORDERS,), (NUM_ORDERS,), ())
        )
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
        return self.curvature[self.curvature >= 0].max(initial=0.0)

    @property
    def mean_noise(self) -> np.ndarray:
        """The mean gradient noise by the order of control variates, ``(3,)``."""
        return _mean_of_known(self.noise)

    @property
    def mean_isotropic_noise(self) -> np.ndarray:
        """The mean of the isotropic gradient noise by the order of control variates, ``(3,)``."""
        return _mean_of_known(self.isotropic_noise)

    @property
    def typical_steepness(self) -> float:
        """The root mean square of the steepness; 0 if unknown."""
        return _mean_of_known(self.steepness, 2) ** 0.5


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


def _mean_of_known(x, power=1):
    """Return the mean over rows of numbers that are 0 or more, to a power; 0 where there is none."""
    is_known = x >= 0
    total = (np.where(is_known, x, 0.0) ** power).sum(0)
    return total / np.maximum(is_known.sum(0), 1).astype(x.dtype)
