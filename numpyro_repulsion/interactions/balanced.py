"""Noise that sums to zero over particles or over groups of them."""

from __future__ import annotations

from dataclasses import dataclass

from jax import random

from numpyro_repulsion.interactions.base import Coupling, Gram, Interaction

__all__ = ["Balanced"]


@dataclass(frozen=True)
class Balanced(Interaction):
    r"""Noise that sums to zero: repulsion in the noise instead of the drift.

    Without an argument, ``K = I``, ``Γ = 0`` and the L particles of a group get
    :math:`\xi_i = \sqrt{L/(L-1)}\,(\eta_i - \bar\eta)` with white η. Given the past every ξ_i is N(0, I), so each
    particle is *exactly* the Markov chain it would be under :class:`Independent`; but the noises cancel in the
    ensemble average, whose error shrinks many times. The price is the product law: at one time the particles are
    (slightly, negatively) correlated. Plain noise for a group of one.

    With an interaction, ``Balanced(RBF())``, whole groups are balanced against each other in the same way, group
    ``a`` getting ``C_a`` applied to :math:`\sqrt{G/(G-1)}\,(\eta_a - \bar\eta)`. Each group's own law is exactly
    that of the interaction; it takes ``num_ensembles > 1``.

    :param interaction: the interaction within groups, or ``None`` for ``K = I``.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp
        >>> from numpyro_repulsion import Balanced
        >>> noise = Balanced().couple(jnp.zeros((5, 2))).draw(random.key(0))
        >>> bool(jnp.allclose(noise.sum(0), 0.0, atol=1e-5))
        True
    """

    interaction: Interaction | None = None

    def __post_init__(self):
        if self.interaction is not None and not isinstance(self.interaction, Gram):
            raise TypeError(
                "Balanced(interaction) balances groups of Gram-type particles against each other, such as "
                f"Balanced(RBF()); got {self.interaction!r}. For K = I write Balanced()."
            )

    @property
    def interacts(self):
        return self.interaction is not None

    @property
    def learns_bandwidth(self):
        return self.interaction is not None and self.interaction.learns_bandwidth

    @property
    def bandwidth(self):
        return getattr(self.interaction, "bandwidth", None)

    @property
    def positive_definite(self):
        return self.interaction is None or self.interaction.positive_definite

    def learn_bandwidth(self, u):
        return super().learn_bandwidth(u) if self.interaction is None else self.interaction.learn_bandwidth(u)

    def couple(self, u, bandwidth=None):
        def white(key):
            return _balance(random.normal(key, u.shape, u.dtype), axis=-2 if self.interaction is None else 0)

        if self.interaction is None:
            return Coupling.identity(white)
        if u.ndim != 3 or u.shape[0] < 2:
            raise ValueError(
                f"{self!r} balances groups against each other and needs at least two of them, a cloud of shape "
                f"(G, L, d) with G > 1; got {u.shape}. Set num_ensembles=2 or more, or use {self.interaction!r}."
            )
        return self.interaction.couple(u, bandwidth, white)

    def gram(self, u, bandwidth):
        """K and Γ of one group, where groups are balanced."""
        if self.interaction is None:
            raise TypeError("Balanced() has no Gram matrix within a group; Independent() has.")
        return self.interaction.gram(u, bandwidth)

    def __add__(self, other):
        raise TypeError(
            "Balanced noise has no Gram matrix and cannot be part of a sum; write Balanced(a + b) to balance groups "
            "of a sum, or use Independent() as the K = I term."
        )

    def __rmul__(self, weight):
        raise TypeError("Balanced noise cannot be scaled; change `step_size`, or write Balanced(weight * interaction).")

    __radd__ = __add__
    __mul__ = __rmul__


def _balance(noise, axis):
    """Centre along an axis and rescale, so that each slice stays N(0, I); a single slice is left alone."""
    size = noise.shape[axis]
    if size == 1:
        return noise
    return (size / (size - 1)) ** 0.5 * (noise - noise.mean(axis, keepdims=True))
