"""Step-size schedules ``t -> ε_t``.

A schedule is any callable of the update count (0 at the first update, warmup included), so optax schedules work
unchanged. A float is a constant schedule. For an interaction that changes with the count see
:class:`~numpyro_repulsion.interactions.Scheduled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import math
from numbers import Real

import jax
import jax.numpy as jnp

from numpyro_repulsion.checks import integer, keep, number, plain, positive
from numpyro_repulsion.rounding import xp

Schedule = Callable[..., jax.Array | float]


@dataclass(frozen=True)
class BiasBudget:
    """A step size that warmup adapts, within a tolerated bias.

    It is the largest step size that is expected to inflate posterior variances by the relative tolerance δ at most.
    Warmup measures what this depends on: the curvature that nine particles in ten stay below, the largest variance of
    the minibatch gradient, and how fast repulsion changes. The formulas are in :ref:`the step size rule
    <step-size-rule>`. The step size never exceeds the stability limit at the stiffest particle.

    In a short run such a step size would hardly move the particles: if the ESS is ten, a bias of only 5% gains nothing.
    Warmup then raises the step size until the ESS of a run of its own length is ``min_draws``, within
    :ref:`limits <short-runs>`, and warns of the expected bias.

    :param tolerance: δ, the tolerated relative inflation of a posterior variance. ``"auto"`` is 0.01 if the bias of the
        integrator is second order in ε and gradients take all rows, or minibatches with control variates of second
        order, and otherwise 0.05; with an arrow as preconditioner 0.01 on average over directions, and 0.05 for any.
    :param min_draws: the least ESS of a run as long as its warmup, if necessary by a larger step size; with minibatches
        only if that gives 20. With 0 the step size always keeps the tolerance.
    :raises ValueError: unless 0 < δ < 1, and ``min_draws`` is 0 or above.

    **References:**

    1. *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*, B. Leimkuhler and
       C. Matthews, https://arxiv.org/abs/1203.5428

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import BiasBudget
        >>> BiasBudget(0.1)
        BiasBudget(tolerance=0.1, min_draws=200.0)
    """

    tolerance: float | str = "auto"
    min_draws: float = 200.0

    def __post_init__(self):
        if self.tolerance != "auto":
            expected = '"auto", or a number between 0 and 1'
            keep(self, "tolerance", number, expected=expected, accepts=lambda x: 0.0 < x < 1.0)
        keep(self, "min_draws", positive, or_zero=True)

    def tolerance_for(self, is_second_order: bool) -> float:
        """Return δ, given whether integrator and control variates are of second order."""
        if isinstance(self.tolerance, str):
            return 0.01 if is_second_order else 0.05
        return self.tolerance

    def step_size(
        self,
        max_step_for_bias: jax.Array,
        max_step_for_short_run: jax.Array,
        stability_limit: jax.Array,
        draws_per_step: jax.Array | float,
    ) -> jax.Array:
        """Return the step for these measurements; infinite if they set no limit.

        :param draws_per_step: effective draws of the run after warmup, per unit of ε.
        """
        raised = xp.minimum(self.min_draws / draws_per_step, max_step_for_short_run)
        return xp.minimum(xp.maximum(max_step_for_bias, raised), stability_limit)


@dataclass(frozen=True)
class Polynomial:
    r"""The Robbins-Monro schedule :math:`\epsilon_t = \epsilon_0\, (1 + t / t_0)^{-\gamma}`.

    With ``1/2 < γ <= 1`` the steps sum to infinity and their squares do not, so the bias vanishes in the limit.

    :param step_size: ε_0, the first step.
    :param offset: t_0, the number of updates after which the step is :math:`2^{-\gamma}` of the first.
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
        keep(self, "step_size", positive)
        keep(self, "offset", positive)
        keep(self, "power", number, expected="a number in (0.5, 1] (Robbins-Monro)", accepts=lambda x: 0.5 < x <= 1.0)

    def __call__(self, count):
        return self.step_size * (1.0 + jnp.asarray(count) / self.offset) ** -self.power


@dataclass(frozen=True)
class Cyclical:
    r"""Cycles of long steps that explore and short steps that sample; the last update of a cycle gives a draw.

    .. math::
        \epsilon_t = \frac{\epsilon_0}{2} \Bigl(\cos \frac{\pi\, (t \bmod M)}{M} + 1\Bigr)

    *Stationary distribution*: none, because the distribution of the particles changes with t. Every update applies the
    kernel's dynamics with its current step, so as ε_0 → 0 the posterior is stationary under each update. At a given ε_0
    a draw has the bias of its own small step, and what remains of the bias of the longer ones: the second half of a
    cycle lasts for a time (the sum of its steps) of 0.09 ε_0 M, and only what relaxes in less time is forgotten.
    Transitions between modes happen in the first half, so the weights of the modes may differ from those of the
    posterior.

    The noise stays on throughout, as in the paper's experiments on mixtures. For networks the paper drops it in the
    first part, which is then gradient descent and does not preserve the posterior, however small the steps.

    :param step_size: ε_0, the first and longest step of a cycle.
    :param length: M, the updates of a cycle. The kernel's ``num_steps`` must be a multiple of it.
    :raises ValueError: for numbers out of range.

    **References:**

    1. *Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning*, R. Zhang, C. Li, J. Zhang, C. Chen and
       A. G. Wilson, https://arxiv.org/abs/1902.03932

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import Cyclical
        >>> schedule = Cyclical(0.1, length=200)
        >>> [f"{schedule(count):.3f}" for count in (0, 50, 100, 150, 200)]
        ['0.100', '0.085', '0.050', '0.015', '0.100']
    """

    step_size: float
    length: int

    def __post_init__(self):
        keep(self, "step_size", positive)
        keep(self, "length", integer, least=2)

    def __call__(self, count):
        # The formula above as a square, because the sum cancels near the end of a cycle.
        left = self.length - jnp.asarray(count) % self.length
        return self.step_size * jnp.sin(0.5 * jnp.pi * left / self.length) ** 2

    def check(self, num_steps: int) -> None:
        """Raise ``ValueError`` if draws are made elsewhere than at the ends of cycles."""
        if num_steps % self.length:
            raise ValueError(
                f"A cycle of {self.length} updates gives one draw, after its last update: with {self!r} set "
                f"num_steps={self.length}, or a multiple of it; got num_steps={num_steps}."
            )


@dataclass(frozen=True)
class Constant:
    """The constant schedule."""

    step_size: float

    def __call__(self, count):
        return self.step_size


def as_schedule(step_size: float | Schedule | str) -> Schedule:
    """Return a number or a callable as a schedule, checked at the first update.

    :raises TypeError: for anything else.
    :raises ValueError: for a step that is not a positive, finite scalar.
    """
    if isinstance(step_size, jax.core.Tracer):
        # A function, because a setting that contains a tracer has no hash.
        traced = step_size
        return as_schedule(lambda count: traced)
    step_size = plain(step_size)
    if isinstance(step_size, Real) and not isinstance(step_size, bool):
        schedule, first, least = Constant(float(step_size)), step_size, math.ulp(0.0)
    elif callable(step_size):
        # A schedule may begin at 0, as learning-rate warmups do.
        schedule, first, least = step_size, step_size(0), 0.0
    else:
        raise TypeError(
            '`step_size` must be "auto" (adapted in warmup), a positive number, or a callable of the update count '
            f"such as Polynomial(0.01) or an optax schedule; got {step_size!r}."
        )
    # A traced step, as when several steps are tried at once, has no value yet.
    unknown = isinstance(first, jax.core.Tracer)
    if jnp.shape(first) != () or not (unknown or least <= float(first) < float("inf")):
        raise ValueError(
            f"`step_size` must be positive and finite; got {first!r}{' at update 0' * callable(step_size)}. Omit it "
            "to adapt it in warmup."
        )
    return schedule
