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

    How a step inflates variances depends on the dynamics. Where its bias is of first order in ε
    (:class:`~numpyro_repulsion.Overdamped` with repulsion) the step is

    .. math::
        \epsilon = \min\Bigl(\frac{2\delta}{(1+\delta)\, \kappa}, \frac{1}{2 \Lambda}\Bigr) \Big/ (\lambda + V)

    with λ the curvature that nine particles in ten stay below, and V the largest variance of the minibatch gradient,
    pooled over the cloud; κ is the mean of K_ii, 1 for :class:`~numpyro_repulsion.RBF`, and Λ, the largest eigenvalue
    of K, matters for stability only. Where K = I and the noise is
    averaged the bias of curvature is second order and that of V is not:

    .. math::
        \epsilon = \min\Bigl(\frac{\min(\sqrt{5\delta}, \frac12)}{\lambda}, \frac{2\delta}{(1+\delta)\, V}\Bigr)

    With momenta (:class:`~numpyro_repulsion.Underdamped`) ``ε²/2`` takes the place of ε for the curvature. In no case
    does the step exceed the limit of stability at the stiffest particle.

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
        tolerated: jax.Array,
        moderate: jax.Array,
        stable: jax.Array,
        draws_per_step: jax.Array | float,
    ) -> jax.Array:
        """The step for what was measured; infinite where that sets no limit.

        :param tolerated: the step at which variances are inflated by the tolerance.
        :param moderate: the longest step for a run that is worth too few draws.
        :param stable: the longest step of all.
        :param draws_per_step: effective draws of the run to come, per unit of ε.
        """
        raised = jnp.minimum(self.min_draws / draws_per_step, moderate)
        return jnp.minimum(jnp.maximum(tolerated, raised), stable)


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
