"""How long the steps of Euler's method may be."""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_repulsion.dynamics.base import Dynamics

__all__ = ["EulerBounds"]


class EulerBounds(Dynamics):
    """Bounds on the steps of Euler's method for overdamped dynamics."""

    def tolerated(self, tolerance, stats, coupling):
        """The step at which variances are inflated by δ, the ``tolerance``, of themselves.

        A step ε inflates the stationary variance along a direction of curvature λ by about ``ελ/2``; gradient noise
        of variance V adds ``εV/2``. Both are for ``K_ii = 1`` and grow with it: modes of K average to its mean. A
        repulsion of steepness s, where particles are dense, inflates it by ``(εs)²/10``, as was measured; the larger
        of the two counts.
        """
        limit = jnp.minimum(2.0 * tolerance / (1.0 + tolerance) / jnp.mean(coupling.diagonal), 0.5 / coupling.bound)
        limit = limit / (stats.curvature + stats.noise)
        return jnp.minimum(limit, jnp.sqrt(10.0 * tolerance) / stats.steepness)

    def worthwhile(self, stats, draws_per_step):
        """The longest step that a run short of draws gains from where particles are dense.

        There repulsion inflates variances by ``(εs)²/10``, and ``n`` draws, ``draws_per_step`` times ε, leave them
        uncertain by ``sqrt(2/n)``: beyond the step at which the two are equal, draws gained are worth less than the
        bias they cost.
        """
        return (200.0 / (stats.steepness**4 * draws_per_step)) ** 0.2

    def stable(self, stats, coupling):
        # One stiff particle feels K_ii of K and not Λ, which takes all of a group: λ_max(K½ H K½) is at most this.
        own = jnp.max(coupling.diagonal)
        return 2.0 / (own * stats.largest + (coupling.bound - own) * stats.curvature)

    def bias(self, step_size, stats, coupling):
        half = step_size * jnp.mean(coupling.diagonal) / 2.0
        # Of Euler's chain on a Gaussian: noise heats it by so much, where curvature amplifies whatever is there.
        curved = half * (stats.curvature + stats.noise) / jnp.maximum(1.0 - half * stats.curvature, 1e-3)
        return jnp.maximum(curved, (step_size * stats.steepness) ** 2 / 10.0)

    def rate(self, variance, coupling):
        return jnp.mean(coupling.diagonal) / variance

    def comparable(self, step_size):
        return step_size
