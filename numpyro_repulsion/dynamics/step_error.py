"""How much a step size distorts the stationary distribution, and how long steps may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_repulsion.interactions import Coupling

__all__ = ["AveragedError", "CurvatureStats", "EulerError", "MomentumError", "StepError", "UnknownError"]


class CurvatureStats(NamedTuple):
    """Statistics of curvature and noise that bound the step size; scalars.

    - **curvature** - λ, which nine particles in ten stay below.
    - **largest** - the curvature at the stiffest particle.
    - **noise** - V, the largest variance of the minibatch gradient in any direction.
    - **steepness** - s, how fast Γ changes with the particles, in the root mean square over directions; 0 where K is
      constant.
    """

    curvature: jax.Array
    largest: jax.Array
    noise: jax.Array
    steepness: jax.Array | float = 0.0


class StepError:
    """Base class: the error of a step ε, given an interaction.

    Warmup measures the step size through these six functions. A dynamics returns an instance by
    :meth:`Dynamics.step_error <numpyro_repulsion.Dynamics.step_error>`; a subclass defines all six.
    """

    def bias(self, step_size: jax.Array, stats: CurvatureStats) -> jax.Array:
        """The expected relative inflation of variances by a step; NaN where it is unknown."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `bias`.")

    def max_step_for_bias(self, tolerance: float, stats: CurvatureStats) -> jax.Array:
        """The step that inflates variances by a share of themselves, the ``tolerance`` δ."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `max_step_for_bias`.")

    def max_step_for_short_run(self, stats: CurvatureStats, draws_per_step: jax.Array | float) -> jax.Array:
        """The longest step from which a run with few draws gains; it has ``draws_per_step`` times ε."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `max_step_for_short_run`.")

    def stability_limit(self, stats: CurvatureStats) -> jax.Array:
        """The step beyond which particles diverge."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `stability_limit`.")

    def relaxation_rate(self, variance: jax.Array) -> jax.Array:
        """How fast a direction of this variance is forgotten, per unit of time (updates times step size)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `relaxation_rate`.")

    def from_overdamped_step(self, step_size: jax.Array) -> jax.Array:
        """The step that moves a particle about as far as this step of overdamped dynamics."""
        raise NotImplementedError(f"{type(self).__name__} does not implement `from_overdamped_step`.")


@dataclass(frozen=True)
class UnknownError(StepError):
    """Nothing is known of the error, so that ``step_size`` must be given.

    - **reason** - the message of the ``ValueError`` that measuring a step raises.
    """

    reason: str

    def bias(self, step_size, stats):
        return jnp.full_like(step_size, jnp.nan)

    def max_step_for_bias(self, tolerance, stats):
        raise ValueError(self.reason)

    def max_step_for_short_run(self, stats, draws_per_step):
        raise ValueError(self.reason)

    def stability_limit(self, stats):
        raise ValueError(self.reason)

    def relaxation_rate(self, variance):
        raise ValueError(self.reason)

    def from_overdamped_step(self, step_size):
        raise ValueError(self.reason)


@dataclass(frozen=True)
class EulerError(StepError):
    """Euler's method for overdamped dynamics: a bias of first order in ε."""

    coupling: Coupling

    def bias(self, step_size, stats):
        half = step_size * jnp.mean(self.coupling.diagonal) / 2.0
        # Of Euler's chain on a Gaussian: noise heats it by so much, where curvature amplifies whatever is there.
        curved = half * (stats.curvature + stats.noise) / jnp.maximum(1.0 - half * stats.curvature, 1e-3)
        return jnp.maximum(curved, (step_size * stats.steepness) ** 2 / 10.0)

    def max_step_for_bias(self, tolerance, stats):
        """The step that inflates variances by a share of themselves, the ``tolerance`` δ.

        A step ε inflates the stationary variance along a direction of curvature λ by about ``ελ/2``; gradient noise
        of variance V adds ``εV/2``. Both are for ``K_ii = 1`` and grow with it: modes of K average to its mean. A
        repulsion of steepness s, where particles are dense, inflates it by ``(εs)²/10``, as was measured; the larger
        of the two counts.
        """
        coupling = self.coupling
        limit = jnp.minimum(2.0 * tolerance / (1.0 + tolerance) / jnp.mean(coupling.diagonal), 0.5 / coupling.bound)
        limit = limit / (stats.curvature + stats.noise)
        return jnp.minimum(limit, jnp.sqrt(10.0 * tolerance) / stats.steepness)

    def max_step_for_short_run(self, stats, draws_per_step):
        """The longest step from which a run with few draws gains where particles are dense.

        There repulsion inflates variances by ``(εs)²/10``, and ``n`` draws, ``draws_per_step`` times ε, leave them
        uncertain by ``sqrt(2/n)``: beyond the step at which the two are equal, more draws gain less than the bias
        costs.
        """
        return (200.0 / (stats.steepness**4 * draws_per_step)) ** 0.2

    def stability_limit(self, stats):
        # One stiff particle feels K_ii of K and not Λ, which takes all of a group: λ_max(K½ H K½) is at most this.
        own = jnp.max(self.coupling.diagonal)
        return 2.0 / (own * stats.largest + (self.coupling.bound - own) * stats.curvature)

    def relaxation_rate(self, variance):
        return jnp.mean(self.coupling.diagonal) / variance

    def from_overdamped_step(self, step_size):
        return step_size


@dataclass(frozen=True)
class AveragedError(EulerError):
    """Overdamped dynamics with ``K = I`` and averaged noise (Leimkuhler & Matthews): a bias of second order in ε."""

    def bias(self, step_size, stats):
        # By the larger of its sources. In one dimension (ελ)²/100 was the most that was measured; twenty times that,
        # for curvature has a direction.
        return jnp.maximum(step_size * stats.noise / 2.0, (step_size * stats.curvature) ** 2 / 5.0)

    def max_step_for_bias(self, tolerance, stats):
        limit = min((5.0 * tolerance) ** 0.5, 0.5)
        return jnp.minimum(limit / stats.curvature, 2.0 * tolerance / (1.0 + tolerance) / stats.noise)


@dataclass(frozen=True)
class MomentumError(EulerError):
    """Dynamics with momenta: a bias of second order in ε where an update is symmetric.

    - **friction** - C.
    - **is_symmetric** - whether an update is.
    """

    friction: float
    is_symmetric: bool

    def bias(self, step_size, stats):
        bound = self.coupling.bound
        square = step_size**2 / 2.0 * stats.curvature * bound**2
        curved = square**2 / 5.0 if self.is_symmetric else square
        change = step_size * stats.steepness
        # Beyond the limit of stability variances were several times too large.
        dense = jnp.where(change > 1.0, 1e3, change**2 / 10.0)
        return jnp.maximum(jnp.maximum(step_size * self._heat(stats), curved), dense)

    def max_step_for_bias(self, tolerance, stats):
        # BAOAB at high friction is averaged overdamped dynamics at ε²/2, with the same bias from curvature; the cruder
        # integrator is given a third of that.
        limit = min((5.0 * tolerance) ** 0.5, 0.5) if self.is_symmetric else tolerance
        curved = self.from_overdamped_step(limit / stats.curvature) / self.coupling.bound
        # As for overdamped dynamics, though the step is one of time: it is so that it was measured.
        dense = jnp.sqrt(10.0 * tolerance) / stats.steepness
        return jnp.minimum(jnp.minimum(curved, dense), tolerance / self._heat(stats))

    def stability_limit(self, stats):
        # K acts twice, on the kick and on the drift, and the diagonal of K² is at most Λ K_ii.
        Λ, own = self.coupling.bound, self.coupling.bound * jnp.max(self.coupling.diagonal)
        limit = 2.0 / jnp.sqrt(own * stats.largest + (Λ**2 - own) * stats.curvature)
        return jnp.minimum(limit, 1.0 / jnp.asarray(stats.steepness))

    def relaxation_rate(self, variance):
        # A direction of frequency ω = K_ii/s forgets at C/2 while friction is weak, and at ω²/C where it is strong.
        square = jnp.mean(self.coupling.diagonal) ** 2 / variance
        return jnp.minimum(self.friction / 2.0, square / self.friction)

    def from_overdamped_step(self, step_size):
        return jnp.sqrt(2.0 * step_size)

    def _heat(self, stats):
        """By how much gradient noise heats the momenta, for a step of 1.

        The kick takes it through K and the injected noise is white, so that it counts by the diagonal of K². A
        thermostat takes away what is the same in all directions; others are heated all the same.
        """
        return self.coupling.bound * jnp.mean(self.coupling.diagonal) * stats.noise / (2.0 * self.friction)
