"""Whatever depends on the update count alone: step sizes ``t -> ε_t``.

A schedule is any callable of the update count (0 at the first update, warmup included), so the schedules of optax
fit as they are. A float is a constant schedule. How an interaction changes with the count is its own affair, see
:class:`~numpyro_repulsion.Scheduled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count as count_from
import math
from numbers import Real

import jax
import jax.numpy as jnp

from numpyro_repulsion.checks import integer, keep, number, plain, positive

__all__ = ["BiasBudget", "Constant", "Cyclical", "Polynomial", "as_schedule"]

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
    does the step exceed the limit of stability at the stiffest particle; nor, but for runs too short for it (below),
    :math:`\sqrt{10\,\delta} / s`, with s how fast repulsion changes where particles are dense.

    A run may be so short that such a step would take it nowhere: variances known from ten effective draws gain nothing
    from a bias of 5 %. The step is then raised, until the run is worth a minimum of effective draws, or to the limit of
    stability, or to where the bias of dense particles, :math:`(\epsilon s)^2 / 10`, is as large as the uncertainty of
    the variances, :math:`\sqrt{2/n}` after n effective draws. Warmup warns of it with the bias to be expected.

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
        keep(self, "tolerance", number, expected="a number between 0 and 1", accepts=lambda x: 0.0 < x < 1.0)
        keep(self, "min_draws", positive, or_zero=True)

    def step_size(
        self,
        max_step_for_bias: jax.Array,
        max_step_for_short_run: jax.Array,
        stability_limit: jax.Array,
        draws_per_step: jax.Array | float,
    ) -> jax.Array:
        """The step for what was measured; infinite where that sets no limit.

        :param max_step_for_bias: the step at which variances are inflated by the tolerance.
        :param max_step_for_short_run: the longest step for a run that is worth too few draws.
        :param stability_limit: the longest step of all.
        :param draws_per_step: effective draws of the run to come, per unit of ε.
        """
        raised = jnp.minimum(self.min_draws / draws_per_step, max_step_for_short_run)
        return jnp.minimum(jnp.maximum(max_step_for_bias, raised), stability_limit)


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
            keep(self, name, positive)
        keep(self, "power", number, expected="a number in (0.5, 1] (Robbins-Monro)", accepts=lambda x: 0.5 < x <= 1.0)

    def __call__(self, count):
        return self.step_size * (1.0 + jnp.asarray(count) / self.offset) ** -self.power


@dataclass(frozen=True)
class Cyclical:
    r"""Cycles of long steps that explore and short steps that sample; only the short ones make draws.

    .. math::
        \epsilon_t = \frac{\epsilon_0}{2} \Bigl(\cos \frac{\pi\, (t \bmod M)}{M} + 1\Bigr)

    The first ``num_hot`` updates of a cycle of M are hot, the others cold. A kernel makes all hot updates at the
    beginning of the iteration that begins a cycle, so that every draw is of the cold part; a cycle gives
    ``(M − num_hot) / num_steps`` of them, of equal weight.

    *Stationary law*: none, for the law of the particles changes with t. Every update is one of the kernel's dynamics
    at its step, so that as ε_0 → 0 the posterior is stationary under each of them. At a given ε_0 a draw has the bias
    of its own small step, and what is left of that of the hot part: the cold part lasts for a time (the sum of its
    steps) of :math:`\epsilon_0 M\, (1 - \beta - \sin(\pi \beta) / \pi) / 2`, 0.09 ε_0 M by default, and only what
    relaxes in less is forgotten. How often particles go from mode to mode is left to the hot part, so that modes may
    come out with weights that are not those of the posterior.

    The noise stays on throughout, as it does in the paper's experiments on mixtures. Its networks drop it in the hot
    part, which is gradient descent then and has no posterior to leave alone, however small the steps.

    :param step_size: ε_0, the first and longest step of a cycle.
    :param length: M, the updates of a cycle. The cold ones must be a multiple of the kernel's ``num_steps``.
    :param exploration: β, the share of a cycle that is hot, 0 or more and below 1.
    :raises ValueError: for numbers out of range, or a share that leaves no cold update.

    **References:**

    1. *Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning*, R. Zhang, C. Li, J. Zhang, C. Chen and
       A. G. Wilson, https://arxiv.org/abs/1902.03932

    **Example**

    .. doctest::

        >>> from numpyro_repulsion import Cyclical
        >>> schedule = Cyclical(0.1, length=200)
        >>> [f"{schedule(count):.3f}" for count in (0, 50, 100, 150, 200)]
        ['0.100', '0.085', '0.050', '0.015', '0.100']
        >>> schedule.num_hot
        100
    """

    step_size: float
    length: int
    exploration: float = 0.5

    def __post_init__(self):
        keep(self, "step_size", positive)
        keep(self, "length", integer, least=2)
        keep(self, "exploration", number, expected="a number in [0, 1)", accepts=lambda x: 0.0 <= x < 1.0)
        if self._cold(self.length) == 0:
            raise ValueError(
                f"Cyclical: exploration={self.exploration!r} of length={self.length} leaves no cold update to draw "
                "from; make the cycle longer, or explore for less of it."
            )

    @property
    def num_hot(self) -> int:
        """The updates at the beginning of a cycle of which no draw is kept: β M, rounded."""
        return self.length - self._cold(self.length)

    def __call__(self, count):
        # The formula above, as a square: near the end of a cycle the sum would cancel.
        left = self.length - jnp.asarray(count) % self.length
        return self.step_size * jnp.sin(0.5 * jnp.pi * left / self.length) ** 2

    def num_ahead(self, count: jax.Array, num_steps: int) -> jax.Array:
        """How many updates to make before the next ``num_steps`` are all cold: ``num_hot`` at a cycle's beginning."""
        # Since the cold part of the last cycle began. What is left of that is no whole draw where a run goes on from
        # the state of another kernel.
        since = (count - self.num_hot) % self.length
        return jnp.where(since + num_steps > self.length - self.num_hot, self.length - since, 0)

    def check(self, num_steps: int) -> None:
        """Refuses, by a ``ValueError``, a cold part that is no multiple of ``num_steps``."""
        if self._cold(self.length) % num_steps == 0:
            return
        shorter = (m for m in range(self.length, 1, -1) if self._cold(m) > 0 and self._cold(m) % num_steps == 0)
        longer = next(m for m in count_from(self.length) if self._cold(m) % num_steps == 0)
        fits = " or ".join(f"length={m}" for m in (next(shorter, None), longer) if m)
        raise ValueError(
            f"{self!r} has {self.num_hot} hot updates and {self._cold(self.length)} cold ones, which must be a "
            f"multiple of num_steps={num_steps}, the updates between draws. Use {fits}, or another `num_steps`."
        )

    def _cold(self, length):
        return length - round(self.exploration * length)


@dataclass(frozen=True)
class Constant:
    """The schedule of a number."""

    step_size: float

    def __call__(self, count):
        del count
        return self.step_size


def _traced(step_size, count):
    del count
    return step_size


def as_schedule(step_size: float | Schedule) -> Schedule:
    """A number or a callable as a schedule, checked at the first update.

    :raises TypeError: for anything else.
    :raises ValueError: for a step that is not a positive, finite scalar.
    """
    if isinstance(step_size, jax.core.Tracer):
        # A function, because a setting that holds a tracer has no hash.
        return as_schedule(partial(_traced, step_size))
    step_size = plain(step_size)
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
    # A step that is traced, as where steps are tried side by side, has no value yet.
    unknown = isinstance(first, jax.core.Tracer)
    if jnp.shape(first) != () or not (unknown or least <= float(first) < float("inf")):
        raise ValueError(
            f"`step_size` must be a positive, finite number; got {first!r} at the first update. Leave it "
            "out to have it measured in warmup."
        )
    return schedule
