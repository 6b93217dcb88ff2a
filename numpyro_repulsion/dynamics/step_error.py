"""How much a step size distorts the stationary distribution, and the limits on it that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
import numpy as np

from numpyro_repulsion.interactions import Coupling
from numpyro_repulsion.rounding import AnyArray, xp


class CurvatureStats(NamedTuple):
    """Statistics of curvature and noise that bound the step size; scalars.

    - **curvature** - λ, the curvature that nine particles in ten stay below.
    - **largest** - the curvature at the stiffest particle.
    - **noise** - V, the largest variance of the minibatch gradient in any direction.
    - **steepness** - s, how fast Γ changes with the particles, as the root mean square over directions; 0 if K is
      constant.
    - **sweep** - M, the number of minibatches that pass through all rows; ``None`` if minibatches are independent.
    - **isotropic_noise** - V̄, the mean of that variance over all directions.
    """

    curvature: Float[AnyArray, ""]
    largest: Float[AnyArray, ""]
    noise: Float[AnyArray, ""]
    steepness: Float[AnyArray, ""] | float = 0.0
    sweep: int | None = None
    isotropic_noise: Float[AnyArray, ""] | float = 0.0


class StepError:
    """Base class (no exception): how much a step ε distorts the stationary distribution, given an interaction.

    Warmup measures the step size through these methods. A dynamics returns an instance from
    :meth:`Dynamics.step_error <numpyro_repulsion.dynamics.Dynamics.step_error>`; a subclass defines all but
    `remaining_noise` and `is_second_order`.
    """

    #: Whether the bias from curvature is of second order in ε.
    is_second_order: bool = False

    def bias(self, step_size: Float[AnyArray, ""], stats: CurvatureStats) -> Float[AnyArray, ""]:
        """Return the expected relative inflation of variances by a step; NaN if unknown."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `bias`.")

    def mean_bias(self, step_size: Float[AnyArray, ""], stats: CurvatureStats) -> Float[AnyArray, ""]:
        """Return the expected relative inflation as the mean over directions: of noise, and what is of first order."""
        flat = xp.zeros_like(stats.curvature) if self.is_second_order else stats.curvature
        return self.bias(step_size, stats._replace(curvature=flat, noise=stats.isotropic_noise))

    def remaining_noise(self, step_size: Float[AnyArray, ""], stats: CurvatureStats) -> Float[AnyArray, ""]:
        """Return the variance of independent minibatches with the same bias: V, and less in a sweep."""
        return stats.noise

    def max_step_for_bias(self, tolerance: float, stats: CurvatureStats) -> Float[AnyArray, ""]:
        """Return the step that inflates variances by the relative ``tolerance`` δ."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `max_step_for_bias`.")

    def max_step_for_short_run(
        self, stats: CurvatureStats, draws_per_step: Float[AnyArray, ""] | float
    ) -> Float[AnyArray, ""]:
        """Return the longest step that still helps a run with few draws, ``draws_per_step`` times ε."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `max_step_for_short_run`.")

    def stability_limit(self, stats: CurvatureStats) -> Float[AnyArray, ""]:
        """Return the step above which particles diverge."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `stability_limit`.")

    def relaxation_rate(self, variance: Float[AnyArray, ""]) -> Float[AnyArray, ""]:
        """Return the relaxation rate of a direction with this variance, per unit of time (updates times step size)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `relaxation_rate`.")

    def from_overdamped_step(self, step_size: Float[AnyArray, ""]) -> Float[AnyArray, ""]:
        """Return the step that moves a particle about as far as this step of overdamped dynamics."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `from_overdamped_step`.")


@dataclass(frozen=True)
class UnknownError(StepError):
    """The error of a dynamics for which none is known, so that ``step_size`` must be given."""

    reason: str  # the message of the ``ValueError`` that any attempt to measure a step raises

    def bias(self, step_size, stats):
        return xp.full_like(step_size, float("nan"))

    def _refuse(self, *_, **__):
        raise ValueError(self.reason)

    max_step_for_bias = max_step_for_short_run = stability_limit = relaxation_rate = from_overdamped_step = _refuse


@dataclass(frozen=True)
class EulerError(StepError):
    """Euler's method for overdamped dynamics: a bias of first order in ε."""

    coupling: Coupling

    def bias(self, step_size, stats):
        half = step_size * xp.mean(self.coupling.diagonal) / 2.0
        # Euler's chain on a Gaussian: noise adds this much variance, and curvature amplifies it.
        noise = self.remaining_noise(step_size, stats)
        curved = half * (stats.curvature + noise) / xp.maximum(1.0 - half * stats.curvature, 1e-3)
        return xp.maximum(curved, (step_size * stats.steepness) ** 2 / 10.0)

    def remaining_noise(self, step_size, stats):
        return stats.noise if stats.sweep is None else stats.noise * xp.minimum(1.0, self._passed(step_size, stats))

    def _passed(self, step_size, stats):
        # How far the fastest direction goes in a sweep.
        return step_size * xp.mean(self.coupling.diagonal) * stats.curvature * (stats.sweep + 1.0) / 3.0

    def max_step_for_bias(self, tolerance, stats):
        # A step ε inflates the variance along a direction of curvature λ by about ελ/2; gradient noise of variance V
        # adds εV/2. Both hold for K_ii = 1 and scale with the mean of K_ii. Where particles are dense, repulsion of
        # steepness s inflates it by (εs)²/10 (an empirical value). The larger inflation counts.
        coupling = self.coupling
        limit = xp.minimum(2.0 * tolerance / (1.0 + tolerance) / xp.mean(coupling.diagonal), 0.5 / coupling.bound)
        longest = _over(limit, stats.curvature + stats.noise)
        if stats.sweep is not None:
            # The noise that remains grows with the step, so the inflation is quadratic in it.
            square = stats.noise * xp.mean(coupling.diagonal) * stats.curvature * (stats.sweep + 1.0) / 3.0
            swept = 2.0 * limit / (stats.curvature + xp.sqrt(stats.curvature**2 + 4.0 * limit * square))
            longest = xp.maximum(longest, swept)
        return xp.minimum(longest, _over((10.0 * tolerance) ** 0.5, stats.steepness))

    def max_step_for_short_run(self, stats, draws_per_step):
        # n draws leave variances uncertain by sqrt(2/n). Beyond the step at which repulsion inflates them by as much,
        # (εs)²/10, the bias costs more than further draws gain.
        return _over(200.0, stats.steepness**4 * draws_per_step) ** 0.2

    def stability_limit(self, stats):
        # For one stiff particle K_ii matters, not Λ, which involves the whole group: this bounds λ_max(K½ H K½).
        own = xp.max(self.coupling.diagonal)
        return _over(2.0, own * stats.largest + (self.coupling.bound - own) * stats.curvature)

    def relaxation_rate(self, variance):
        return xp.mean(self.coupling.diagonal) / variance

    def from_overdamped_step(self, step_size):
        return step_size


@dataclass(frozen=True)
class AveragedError(EulerError):
    """Overdamped dynamics with ``K = I`` and averaged noise (Leimkuhler & Matthews): a bias of second order in ε."""

    is_second_order = True

    def bias(self, step_size, stats):
        return xp.maximum(self._warming(step_size, stats), _of_second_order(step_size * stats.curvature))

    def max_step_for_bias(self, tolerance, stats):
        limit = _over(_longest_of_second_order(tolerance), stats.curvature)
        return _longest(lambda step_size: self._warming(step_size, stats), tolerance, limit)

    def _warming(self, step_size, stats):
        # By gradient noise; exact on a Gaussian of curvature λ.
        half = step_size / 2.0
        return half * self.remaining_noise(step_size, stats) / xp.maximum(1.0 - half * stats.curvature, 1e-3)


@dataclass(frozen=True)
class MomentumError(EulerError):
    """Dynamics with momenta: a bias of second order in ε if an update is symmetric.

    - **friction** - C.
    - **is_second_order** - whether an update is symmetric.
    """

    friction: float
    is_second_order: bool

    def bias(self, step_size, stats):
        bound = self.coupling.bound
        square = step_size**2 / 2.0 * stats.curvature * bound**2
        curved = _of_second_order(square) if self.is_second_order else square
        change = step_size * stats.steepness
        # Above the stability limit, measured variances were several times too large.
        dense = xp.where(change > 1.0, 1e3, change**2 / 10.0)
        return xp.maximum(xp.maximum(self._warming(step_size, stats), curved), dense)

    def _passed(self, step_size, stats):
        return step_size**2 * (self.coupling.bound**2 * stats.curvature * (stats.sweep + 1.0) ** 2) / 12.0

    def max_step_for_bias(self, tolerance, stats):
        # BAOAB at high friction is averaged overdamped dynamics at ε²/2, with the same bias from curvature. The
        # first-order integrator gets a third of that step.
        limit = _longest_of_second_order(tolerance) if self.is_second_order else tolerance
        curved = self.from_overdamped_step(_over(limit, stats.curvature)) / self.coupling.bound
        # An empirical value, the same as for overdamped dynamics although the step is one of time.
        dense = _over((10.0 * tolerance) ** 0.5, stats.steepness)
        return _longest(lambda step_size: self._warming(step_size, stats), tolerance, xp.minimum(curved, dense))

    def stability_limit(self, stats):
        # K acts twice, on the kick and on the drift, and the diagonal of K² is at most Λ K_ii.
        Λ, own = self.coupling.bound, self.coupling.bound * xp.max(self.coupling.diagonal)
        limit = _over(2.0, xp.sqrt(own * stats.largest + (Λ**2 - own) * stats.curvature))
        return xp.minimum(limit, _over(1.0, stats.steepness))

    def relaxation_rate(self, variance):
        # A direction of frequency ω = K_ii/s relaxes at the rate C/2 if friction is weak, and ω²/C if it is strong.
        square = xp.mean(self.coupling.diagonal) ** 2 / variance
        return xp.minimum(self.friction / 2.0, square / self.friction)

    def from_overdamped_step(self, step_size):
        return xp.sqrt(2.0 * step_size)

    def _warming(self, step_size, stats):
        # The kick multiplies gradient noise by K and the injected noise is white, so the diagonal of K² matters. If an
        # update is symmetric, this is exact on a Gaussian of curvature λ.
        noise = self.coupling.bound * xp.mean(self.coupling.diagonal) * self.remaining_noise(step_size, stats)
        heat = step_size * noise / (2.0 * self.friction)
        if not self.is_second_order:
            return heat
        half = self.friction * step_size / 2.0
        return heat * half / xp.tanh(half) / xp.maximum(1.0 - step_size**2 / 4.0 * stats.curvature, 1e-3)


@dataclass(frozen=True)
class ThermostatError(MomentumError):
    """Dynamics with a thermostat and ``K = I``: the friction rises until it removes the mean heat of gradient noise.

    In a direction with noise of variance V, where the mean variance is V̄, the temperature becomes
    ``(C + εV/2) / (C + εV̄/2)``. For any other K, or noise of a sweep, a thermostat removes only a part of that heat,
    which is not counted on.
    """

    def _warming(self, step_size, stats):
        excess = xp.maximum(stats.noise - stats.isotropic_noise, 0.0)
        return step_size * excess / (2.0 * self.friction + step_size * stats.isotropic_noise)

    def max_step_for_short_run(self, stats, draws_per_step):
        # A longer step would gain no draws.
        return xp.minimum(super().max_step_for_short_run(stats, draws_per_step), self._max_step_for_friction(stats))

    def max_step_for_bias(self, tolerance, stats):
        return xp.minimum(super().max_step_for_bias(tolerance, stats), self._max_step_for_friction(stats))

    def _max_step_for_friction(self, stats):
        # If the friction more than triples, positions move more slowly for longer steps.
        return _over(4.0 * self.friction, stats.isotropic_noise)


@np.errstate(divide="ignore", invalid="ignore")
def _over(a, b):
    """Return a / b, infinite for b = 0, where nothing limits the step."""
    return a / xp.asarray(b)


def _of_second_order(change):
    """Return the inflation of variances by curvature λ, for ``change = ελ``, if the bias is of second order in ε."""
    # The largest bias measured in one dimension was (ελ)²/100. This is more, because curvature has a direction.
    return change**2 / 25.0


def _longest_of_second_order(tolerance):
    """Return the largest ελ within a tolerance, and well within the limit of stability."""
    return min(5.0 * tolerance**0.5, 0.5)


def _longest(inflation, tolerance, limit):
    """Return the longest step up to ``limit`` with an ``inflation(step)`` of at most ``tolerance``, or 0."""

    def step(halvings):
        return limit * 2.0**-halvings

    few, most = xp.zeros_like(limit), 64.0
    many = few + most
    for _ in range(24):
        middle = (few + many) / 2.0
        fits = inflation(step(middle)) <= tolerance
        few, many = xp.where(fits, few, middle), xp.where(fits, middle, many)
    return xp.where(inflation(limit) <= tolerance, limit, xp.where(many < most, step(many), 0.0))
