"""Whatever depends on the update count alone: step sizes ``t -> ε_t``.

A schedule is any callable of the update count (0 at the first update, warmup included), so the schedules of optax
fit as they are. A float is a constant schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import math
from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["BiasBudget", "Constant", "Polynomial", "as_schedule"]

Schedule = Callable[..., jax.Array | float]


@dataclass(frozen=True)
class BiasBudget:
    r"""A step size that warmup measures, by the bias it may cause.

    A step ε inflates the stationary variance along a direction of curvature λ by about ``ελ/2`` of itself; minibatch
    noise of variance V adds ``εV/2``. The step is the largest that keeps the sum below a tolerance,

    .. math::
        \epsilon = \min\Bigl(\frac{2\delta}{1+\delta}, \frac{1}{2 \Lambda}\Bigr) \Big/ (\lambda + V)

    with λ the curvature that nine particles in ten stay below, and V the largest variance of the minibatch gradient,
    pooled over the cloud; Λ, the largest eigenvalue of K, matters for stability only. Where the noise is averaged
    (:class:`~numpyro_repulsion.Overdamped`) the bias of curvature is second order and that of V is not:

    .. math::
        \epsilon = \min\Bigl(\frac{\min(\sqrt{5\delta}, \frac12)}{\lambda}, \frac{2\delta}{(1+\delta)\, V}\Bigr)

    In neither case does the step exceed the limit of stability at the stiffest particle.

    A run may be so short that such a step would take it nowhere: variances known from ten effective draws gain nothing
    from a bias of 5 %. The step is then raised, until the run is worth a minimum of effective draws or to the limit of
    stability, and warmup warns of it with the bias to be expected.

    :param tolerance: δ, the tolerated relative inflation of a posterior variance.
    :param min_draws: the effective draws that a run as long as its warmup must be worth, if need be by longer steps.
        0 holds on to the tolerance.
    :raises ValueError: unless 0 < δ < 1 and ``min_draws`` is 0 or above.

    **References:**

    1. *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*, B. Leimkuhler and
       C. Matthews, https://arxiv.org/abs/1203.5428

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import BiasBudget
        >>> BiasBudget(0.1)
        BiasBudget(tolerance=0.1, min_draws=200.0)
    """

    tolerance: float = 0.05
    min_draws: float = 200.0

    def __post_init__(self):
        if not (isinstance(self.tolerance, Real) and 0.0 < self.tolerance < 1.0):
            raise ValueError(f"BiasBudget: `tolerance` must be a number between 0 and 1; got {self.tolerance!r}.")
        if not (isinstance(self.min_draws, Real) and 0.0 <= self.min_draws < float("inf")):
            raise ValueError(f"BiasBudget: `min_draws` must be a finite number, 0 or above; got {self.min_draws!r}.")

    def step_size(
        self,
        curvature: jax.Array,
        largest: jax.Array,
        noise: jax.Array,
        bound: jax.Array | float,
        order: int,
        draws_per_step: jax.Array | float,
    ) -> jax.Array:
        """The step for what was measured; infinite where that sets no limit.

        :param curvature: λ.
        :param largest: the curvature at the stiffest particle.
        :param noise: V.
        :param bound: Λ.
        :param order: of the bias in the step, 1 or 2.
        :param draws_per_step: effective draws of the run to come, per unit of ε.
        """
        tolerated = 2.0 * self.tolerance / (1.0 + self.tolerance)
        if order == 2:
            within = jnp.minimum(min(math.sqrt(5.0 * self.tolerance), 0.5) / curvature, tolerated / noise)
        else:
            within = jnp.minimum(tolerated, 0.5 / bound) / (curvature + noise)
        # One stiff particle feels K_ii = 1 of K and not Λ, which takes all of a group: λ_max(K½ H K½) is at most this.
        stable = 2.0 / (largest + (bound - 1.0) * curvature)
        needed = self.min_draws / draws_per_step
        raised = jnp.minimum(needed, 1.0 / (bound * curvature))
        return jnp.minimum(jnp.maximum(within, raised), stable)

    def bias(self, step_size: jax.Array, curvature: jax.Array, noise: jax.Array, order: int) -> jax.Array:
        """The relative inflation of a variance to be expected of a step; of order 2, by the larger of its sources."""
        # In one dimension (ελ)²/100 was the most that was measured; twenty times that, for curvature has a direction.
        if order == 2:
            return jnp.maximum(step_size * noise / 2.0, (step_size * curvature) ** 2 / 5.0)
        return 1.0 / jnp.maximum(1.0 - step_size * (curvature + noise) / 2.0, 1e-3) - 1.0


@dataclass(frozen=True)
class Polynomial:
    r"""The Robbins-Monro schedule :math:`\epsilon_t = \epsilon_0\, (1 + t / t_0)^{-\gamma}`.

    With ``1/2 < γ <= 1`` the steps sum to infinity and their squares do not, so the bias vanishes in the long run.

    :param step_size: ε_0, the first step.
    :param offset: t_0, the number of updates over which the step begins to fall.
    :param power: γ.
    :raises ValueError: for a step or an offset that is not positive, or a power outside (1/2, 1].

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import Polynomial
        >>> schedule = Polynomial(0.1, offset=100.0, power=1.0)
        >>> [f"{schedule(count):.3f}" for count in (0, 100, 900)]
        ['0.100', '0.050', '0.010']
    """

    step_size: float
    offset: float = 1000.0
    power: float = 0.55

    def __post_init__(self):
        for name in ("step_size", "offset"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and 0.0 < value < float("inf")):
                raise ValueError(f"Polynomial: `{name}` must be a positive, finite number; got {value!r}.")
        if not (isinstance(self.power, Real) and 0.5 < self.power <= 1.0):
            raise ValueError(f"Polynomial: `power` must lie in (0.5, 1] (Robbins-Monro); got {self.power!r}.")

    def __call__(self, count):
        return self.step_size * (1.0 + jnp.asarray(count) / self.offset) ** -self.power


@dataclass(frozen=True)
class Constant:
    """The schedule of a number."""

    step_size: float

    def __call__(self, count):
        del count
        return self.step_size


def as_schedule(step_size: float | Schedule) -> Schedule:
    """A number or a callable as a schedule, checked at the first update.

    :raises TypeError: for anything else.
    :raises ValueError: for a step that is not a positive, finite scalar.
    """
    if isinstance(step_size, np.ndarray | jax.Array) and step_size.ndim == 0:
        step_size = float(step_size)
    if isinstance(step_size, Real) and not isinstance(step_size, bool):
        schedule, first, least = Constant(float(step_size)), step_size, math.ulp(0.0)
    elif callable(step_size):
        # A schedule may begin at 0, as learning-rate warmups do.
        schedule, first, least = step_size, step_size(0), 0.0
    else:
        raise TypeError(
            "`step_size` must be None (measured in warmup), a positive number, or a callable of the update count "
            f"such as Polynomial(0.01) or an optax schedule; got {step_size!r}."
        )
    if jnp.shape(first) != () or not least <= float(first) < float("inf"):
        raise ValueError(
            f"`step_size` must be a positive, finite number; got {first!r} at the first update. Leave it "
            "out to have it measured in warmup."
        )
    return schedule
