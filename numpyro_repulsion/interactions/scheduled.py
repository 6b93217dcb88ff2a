"""Repulsion that changes with time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
from jax import random
import jax.numpy as jnp

from numpyro_repulsion.interactions.base import Interaction, Wrapping
from numpyro_repulsion.noise import normal

__all__ = ["Scheduled"]


@dataclass(frozen=True)
class Scheduled(Wrapping):
    r"""An interaction whose strength is a function of the update count: repulsion now, and less of it later.

    .. math::
        K_t = w(t)\, K + (1 - w(t))\, I, \qquad \Gamma_t = w(t)\, \Gamma

    At ``w = 1`` it is the interaction, at ``w = 0`` parallel SGLD. ``D = K_t ⊗ I``, ``Q = 0`` (with momenta
    ``Q = [[0, −K_t], [K_t, 0]]``), for any w in [0, 1]: K_t is positive definite, and w depends on the time alone and
    not on the particles, so that Γ_t lacks no term. ``∏_i π(u_i)`` is thus the stationary law of every K_t, and as
    ε → 0 that of the whole run, at every moment and however w moves.

    The paper switches repulsion off for the last half of training: that is a w of 1 for the updates before and 0
    after, as in the example. The count includes warmup, ``num_steps`` updates for each iteration. K is computed in
    every update, whatever w is, and integrators do not know that it is I where ``w = 0``: momenta keep the integrator
    of first order. Warmup measures the step for the w in [0, 1] at which it must be shortest.

    :param interaction: what is scheduled: any in which particles feel each other, such as ``RBF()``, a sum,
        ``RandomFeatures()``, ``RandomGroups(...)`` or ``Balanced(RBF())`` (groups stay balanced against each other).
    :param weight: w, a callable of the update count (0 at the first update) with values in [0, 1], such as a schedule
        of optax. Values beyond are clipped.
    :raises TypeError: for an interaction in which no particle feels another, or a weight that is not callable.
    :raises ValueError: for a first value that is not a number in [0, 1].

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import RBF, Scheduled
        >>> interaction = Scheduled(RBF(bandwidth=2.0), lambda count: jnp.where(count < 10_000, 1.0, 0.0))
        >>> u = jnp.array([[0.0], [1.0]])
        >>> [f"{interaction.at(None, count).couple(u).repulsion[1, 0]:.2f}" for count in (0, 10_000)]
        ['0.61', '0.00']
    """

    interaction: Any
    weight: Callable[..., jax.Array | float]
    #: The weight of one update: set anew in every one. Without it, as where warmup measures, that is 1.
    now: Any = field(default=None, repr=False, compare=False)

    interacts: ClassVar[bool] = True

    def __post_init__(self):
        if self.now is not None:
            return
        if not (isinstance(self.interaction, Interaction) and self.interaction.interacts):
            raise TypeError(
                "Scheduled takes an interaction in which particles feel each other, such as RBF() or RandomFeatures(), "
                f"for nothing else has a strength to change; got {self.interaction!r}."
            )
        if not callable(self.weight):
            raise TypeError(
                "Scheduled: `weight` must be a callable of the update count with values in [0, 1], such as "
                "`lambda count: jnp.where(count < 10_000, 1.0, 0.0)` or a schedule of optax; got "
                f"{self.weight!r}. For a constant weight write 0.3 * RBF() + 0.7 * Independent()."
            )
        first = self.weight(0)
        if jnp.shape(first) != () or not 0.0 <= float(first) <= 1.0:
            raise ValueError(
                f"Scheduled: `weight` must be a number in [0, 1] at any update; got {first!r} at the first one."
            )

    def __repr__(self):
        # The name of a function, without its address: this is kept with the results.
        return f"Scheduled({self.interaction!r}, weight={getattr(self.weight, '__name__', repr(self.weight))})"

    @property
    def is_redrawn(self):
        return self.interaction.is_redrawn

    @property
    def balances_ensembles(self):
        return self.interaction.balances_ensembles

    def at(self, key, count):
        now = jnp.clip(self.weight(count), 0.0, 1.0)
        return replace(self, interaction=self.interaction.at(key, count), now=now)

    def couple(self, u, bandwidth=None):
        coupling = self.interaction.couple(u, bandwidth)
        if self.now is None:
            # The largest over w, for the step is measured once.
            return coupling._replace(
                bound=jnp.maximum(coupling.bound, 1.0), diagonal=jnp.maximum(coupling.diagonal, 1.0)
            )
        w = jnp.asarray(self.now, u.dtype)

        def white(key):
            return normal(key, u.shape, u.dtype) if coupling.white is None else coupling.white(key)

        def draw(key):
            common_key, own_key = random.split(key)
            return jnp.sqrt(w) * coupling.draw(common_key) + jnp.sqrt(1.0 - w) * white(own_key)

        return coupling._replace(
            apply=lambda x: w * coupling.apply(x) + (1.0 - w) * x,
            repulsion=w * coupling.repulsion,
            draw=draw,
            bound=w * coupling.bound + 1.0 - w,
            diagonal=w * coupling.diagonal + 1.0 - w,
        )

    def gram(self, u, bandwidth):
        """K and Γ of one group ``(L, d)``, where the interaction has a Gram matrix, or its redrawn groups have."""
        gram, repulsion = self.interaction.gram(u, bandwidth)
        w = 1.0 if self.now is None else jnp.asarray(self.now, u.dtype)
        return w * gram + (1.0 - w) * jnp.eye(gram.shape[-1], dtype=u.dtype), w * repulsion
