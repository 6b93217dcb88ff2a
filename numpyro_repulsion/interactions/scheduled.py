"""Repulsion that changes with time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from jax import random
import jax.numpy as jnp
from jaxtyping import Array, Float

from numpyro_repulsion.interactions.base import Interaction, Wrapping
from numpyro_repulsion.noise import normal

__all__ = ["Scheduled"]


@dataclass(frozen=True)
class Scheduled(Wrapping):
    r"""An interaction whose strength is a function of the update count.

    .. math::
        K_t = w(t)\, K + (1 - w(t))\, I, \qquad \Gamma_t = w(t)\, \Gamma

    At ``w = 1`` this is the interaction, at ``w = 0`` parallel SGLD. For any w in [0, 1], ``D = K_t ⊗ I`` and
    ``Q = 0`` (with momenta ``Q = [[0, −K_t], [K_t, 0]]``). K_t is positive definite, and w depends on time but not on
    the particles, so Γ_t is complete. ``∏_i π(u_i)`` is therefore the stationary distribution of every K_t and, as
    ε → 0, of the whole run, for any schedule w.

    The paper switches repulsion off for the last half of training: w is 1 before and 0 after, as in the example. The
    count includes warmup, ``num_steps`` updates for each iteration. Every update computes K for any w, and integrators
    do not detect that it is I at ``w = 0``: with momenta the integrator stays first order. Warmup measures the step for
    the w in [0, 1] at which it must be shortest.

    :param interaction: the scheduled interaction, whose K must depend on the particles: ``RBF()``, a sum,
        ``RandomFeatures()``, ``RandomGroups(...)`` or ``Balanced(RBF())`` (groups stay balanced against each other).
    :param weight: w, a callable of the update count (0 at the first update) with values in [0, 1], for example an
        optax schedule. Values outside are clipped.
    :raises TypeError: for an interaction whose K does not depend on the particles, or a weight that is not callable.
    :raises ValueError: for a first value that is not a number in [0, 1].

    **References:**

    1. *Stochastic Gradient MCMC with Repulsive Forces*, V. Gallego and D. Ríos Insua,
       https://arxiv.org/abs/1812.00071

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import RBF
        >>> from numpyro_repulsion.interactions import Scheduled
        >>> interaction = Scheduled(RBF(bandwidth=2.0), lambda count: jnp.where(count < 10_000, 1.0, 0.0))
        >>> u = jnp.array([[0.0], [1.0]])
        >>> [f"{interaction.at(None, count).couple(u).repulsion[1, 0]:.2f}" for count in (0, 10_000)]
        ['0.61', '0.00']
    """

    interaction: Interaction
    weight: Callable[..., Float[Array, ""] | float]
    #: The weight of the current update. It is 1 if not set, as when warmup measures.
    now: Float[Array, ""] | float | None = field(default=None, repr=False, compare=False)

    interacts: ClassVar[bool] = True

    def __post_init__(self):
        if self.now is not None:
            return
        if not (isinstance(self.interaction, Interaction) and self.interaction.interacts):
            raise TypeError(
                "Scheduled takes an interaction whose K depends on the particles, such as RBF() or RandomFeatures(); "
                f"got {self.interaction!r}."
            )
        if not callable(self.weight):
            raise TypeError(
                "Scheduled: `weight` must be a callable of the update count with values in [0, 1], such as "
                "`lambda count: jnp.where(count < 10_000, 1.0, 0.0)` or an optax schedule; got "
                f"{self.weight!r}. For a constant weight write 0.3 * RBF() + 0.7 * Independent()."
            )
        first = self.weight(0)
        if jnp.shape(first) != () or not 0.0 <= float(first) <= 1.0:
            raise ValueError(
                f"Scheduled: `weight` must be a number in [0, 1] at any update; got {first!r} at the first one."
            )

    def __repr__(self):
        # The name of a function without its address, because this is stored with the results.
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
            # The largest over w, because the step is measured once.
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
        """Return K and Γ of one group ``(L, d)``, if the interaction or its redrawn groups have a Gram matrix."""
        gram, repulsion = self.interaction.gram(u, bandwidth)  # type: ignore[attr-defined]
        w = 1.0 if self.now is None else jnp.asarray(self.now, u.dtype)
        return w * gram + (1.0 - w) * jnp.eye(gram.shape[-1], dtype=u.dtype), w * repulsion
